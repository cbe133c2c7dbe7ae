"""A graph that streams on two pools, and the work of a region that does, in round numbers."""

from __future__ import annotations

from typing import Any

from rlgraph.streaming.rules import Window
from rlgraph.streaming.simulate import RegionWork

STREAMED = (
    "pools={train: {devices: 4}, gen: {devices: 4}}",
    "schedule.buffer={staleness: 1}",
    "update_policy.in.old_logprobs=rollout_logprobs",
    "rollout.max_new_tokens=8192",
)


def work(lengths: list[float], staleness: int = 1, chunk: float = 100, **changed: Any) -> RegionWork:
    """Four groups of two, whose every token takes a second, however many are drawn."""
    told: dict[str, Any] = {
        "window": Window(rows=8, group=2, staleness=staleness),
        "lengths": lengths,
        "prompt": 0.0,
        "chunk": chunk,
        "servers": 1,
        "slots": 1000,
        "decode": lambda samples, context: 1.0,
        "read": lambda samples, tokens: 0.0,
        "measuring_on_pool": (0.0, 0.0),
        "measuring_elsewhere": (0.0, 0.0),
    }
    return RegionWork(**told | changed)
