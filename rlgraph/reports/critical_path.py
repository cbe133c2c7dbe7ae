"""The critical path: the chain of steps that an iteration waits for.

gen      rollout ────────────╮
train                        ╰─ update_policy     rollout, update_policy
score            ref ──────┄┄                     off it: it could take longer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlgraph.ir.plan import Plan
from rlgraph.planning.simulate import simulate, steady

SHORT = 1e-9  # seconds; less is rounding


class CriticalStep(NamedTuple):
    """A step of the critical path, and its seconds in it."""

    step: str
    seconds: float


def critical_path(plan: Plan, seconds: Mapping[int, float]) -> list[CriticalStep]:
    """Return the chain over one iteration of the steady state; its seconds add up to the iteration's.

    Args:
        plan: with its order of steps.
        seconds: of each training step, by its number: measured, or predicted.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> plan = compile_graph("sft", devices=1)
        >>> critical_path(plan, {step.id: 1.0 for step in plan.steps})
        [CriticalStep(step='examples', seconds=1.0), CriticalStep(step='update_policy', seconds=1.0)]
    """
    deep = 1 + max((step.lead for step in plan.steps), default=0)
    count = 4 * deep
    events = simulate(steady(plan), seconds, count)
    ends = [max(event.end for event in events if event.iteration == n) for n in range(count)]
    # from the end of the last one back: the chain settles into what repeats, iteration after iteration
    since, until = ends[deep - 1], ends[2 * deep - 1]
    found: dict[str, float] = {}
    chain = [max(events, key=lambda event: event.end)]
    while chain[-1].waited >= 0:
        chain.append(events[chain[-1].waited])
    for event in reversed(chain):
        inside = min(event.end, until) - max(event.start, since)
        if inside > SHORT:
            found[event.step.node] = found.get(event.step.node, 0.0) + inside / deep
    return [CriticalStep(step, took) for step, took in found.items()]
