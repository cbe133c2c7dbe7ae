"""What a worker uses: the memory that it has held, and the work that a pass of a model is."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlgraph.runtime.columns import Part


@dataclass(frozen=True)
class Usage:
    """Of one device's share of a step."""

    memory: int = 0  # the most bytes held since the worker began: on CUDA by torch, else of the process
    gpu: str = ""  # what it is called, empty on a CPU
    tokens: float = 0.0  # that a train engine went through
    squares: float = 0.0  # the sum of the squared lengths of its sequences


def usage(device: str, engine: str | None, columns: Mapping[str, Part]) -> Usage:
    """That of an op which has just run.

    Args:
        device: ``cpu`` or ``cuda``.
        engine: which the op runs on, ``train`` or ``serve``, if any.
        columns: what it read, by the op's names.
    """
    if device == "cuda":
        memory, gpu = torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()
    else:
        memory, gpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, ""
    if engine != "train" or "tokens" not in columns:
        return Usage(memory, gpu)
    lengths = columns["tokens"].lengths.astype(float)
    return Usage(memory, gpu, float(lengths.sum()), float((lengths**2).sum()))
