"""A worker measures the memory of a step and the work of a pass, and traces what it computes."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlgraph.runtime.columns.chunk import Chunk
from rlgraph.runtime.engines.memory.saver import SavedMemory
from rlgraph.runtime.messages.report import Usage

PROFILES: dict[str, Any] = {}  # running ones of this process: workers that share it share a trace


def begin(device: str) -> None:
    """Count the most memory anew, from here on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def held(used: Usage, device: str) -> Usage:
    """Return the same with the memory held since ``begin``, on a device ``cpu`` or ``cuda``."""
    if device != "cuda":
        return replace(used, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    free, total = torch.cuda.mem_get_info()
    most = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    name = torch.cuda.get_device_name()
    paused = SavedMemory.paused(device)
    return replace(used, memory=most - paused, reserved=reserved - paused, device=total - free, gpu=name)


def work(engine: str | None, columns: Mapping[str, Chunk]) -> Usage:
    """Return what an op on a ``train`` or ``serve`` engine, or none, goes through, by its columns."""
    if engine != "train" or "tokens" not in columns:
        return Usage()
    lengths = columns["tokens"].lengths.astype(float)
    return Usage(tokens=float(lengths.sum()), squares=float((lengths**2).sum()))


class StepRange(record_function):
    """Names what is computed inside, in traces of torch and, on a GPU by an NVTX range, of Nsight Systems."""

    def __init__(self, name: str, device: str) -> None:
        super().__init__(name)
        self.nvtx = device == "cuda"

    def __enter__(self) -> StepRange:
        if self.nvtx:
            torch.cuda.nvtx.range_push(self.name)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.nvtx:
            torch.cuda.nvtx.range_pop()


def begin_profile(place: str) -> None:
    """Trace operators, kernels and waits for them, unless another worker of this process does."""
    if place in PROFILES:  # left by a run that failed
        PROFILES.pop(place).stop()
    if not PROFILES:
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        PROFILES[place] = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)
        PROFILES[place].start()


def end_profile(place: str, path: str) -> None:
    """Write the trace, if there is one, as gzipped Chrome trace events: for ui.perfetto.dev."""
    if place in PROFILES:
        trace = PROFILES.pop(place)
        trace.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        aside = Path(path).with_name(f"writing-{Path(path).name}")
        trace.export_chrome_trace(str(aside))
        aside.rename(path)
