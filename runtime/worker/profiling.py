"""Traces all that a worker computes in an iteration: operators, kernels, and waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

RUNNING: dict[str, Any] = {}  # profilers of this process: workers that share one share a trace


def begin(place: str) -> None:
    """Start to record, unless another worker of this process does."""
    if place in RUNNING:  # left by a run that failed
        RUNNING.pop(place).stop()
    if not RUNNING:
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        RUNNING[place] = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)
        RUNNING[place].start()


def end(place: str, path: str) -> None:
    """Write what was recorded since ``begin``, as gzipped Chrome trace events: for ui.perfetto.dev."""
    if place in RUNNING:
        recorded = RUNNING.pop(place)
        recorded.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        aside = Path(path).with_name(f"writing-{Path(path).name}")
        recorded.export_chrome_trace(str(aside))
        aside.rename(path)
