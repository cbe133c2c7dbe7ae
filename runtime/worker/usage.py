"""A worker measures the memory that it holds in a step, and the work that a pass of a model is."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import replace

import torch

from rlgraph.runtime.columns.part import Part
from rlgraph.runtime.engines.memory.saver import SavedMemory
from rlgraph.runtime.messages.report import Usage


def begin(device: str) -> None:
    """Count the most memory anew, from here on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def held(used: Usage, device: str) -> Usage:
    """The same with the memory held since ``begin``, on a device ``cpu`` or ``cuda``."""
    if device != "cuda":
        return replace(used, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    free, total = torch.cuda.mem_get_info()
    most, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    name, paused = torch.cuda.get_device_name(), SavedMemory.paused(device)
    return replace(used, memory=most - paused, reserved=reserved - paused, device=total - free, gpu=name)


def work(engine: str | None, columns: Mapping[str, Part]) -> Usage:
    """Return what an op goes through.

    Args:
        engine: which it runs on, ``train`` or ``serve``, if any.
        columns: what it reads, by its own names.
    """
    if engine != "train" or "tokens" not in columns:
        return Usage()
    lengths = columns["tokens"].lengths.astype(float)
    return Usage(tokens=float(lengths.sum()), squares=float((lengths**2).sum()))
