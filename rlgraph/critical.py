"""The chain of steps that an iteration waits for: no other step can be made shorter to any avail.

gen      rollout ────────────╮
train                        ╰─ update_policy     rollout, update_policy
score            ref ──────┄┄                     off it: it could take longer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rlgraph.plan import Plan
from rlgraph.simulate import Event, simulate, steady

CLOSE = 1e-9  # seconds: an event that ends so close to a start is what that waited for


class Link(NamedTuple):
    """A step of the chain, and its seconds in it."""

    step: str
    seconds: float


def critical_path(plan: Plan, seconds: Mapping[int, float]) -> list[Link]:
    """The chain over one iteration of the steady state; its seconds add up to those of the iteration.

    Args:
        plan: with its order of steps.
        seconds: of each training step, by its number: measured, or predicted.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> plan = compile_graph("sft", devices=1)
        >>> critical_path(plan, {step.id: 1.0 for step in plan.steps})
        [Link(step='examples', seconds=1.0), Link(step='update_policy', seconds=1.0)]
    """
    deep = 1 + max((step.lead for step in plan.steps), default=0)
    count = 4 * deep
    events = simulate(steady(plan), seconds, count)
    ends = [max(event.end for event in events if event.iteration == n) for n in range(count)]
    # from the end of the last one back: the chain settles into what repeats, iteration after iteration
    since, until = ends[deep - 1], ends[2 * deep - 1]
    found: dict[str, float] = {}
    for event in reversed([*_backwards(events, max(events, key=lambda event: event.end))]):
        inside = min(event.end, until) - max(event.start, since)
        if inside > CLOSE:
            found[event.step.node] = found.get(event.step.node, 0.0) + inside / deep
    return [Link(step, took) for step, took in found.items()]


def _backwards(events: Sequence[Event], event: Event) -> Iterator[Event]:
    """An event, what it waited for, what that waited for, and so on."""
    number = next(n for n, other in enumerate(events) if other is event)
    while True:
        event = events[number]
        yield event
        before = [n for n in range(number) if abs(events[n].end - event.start) < CLOSE]
        if not before:
            return
        number = max(before, key=lambda n: (_why(events[n], event), n))


def _why(before: Event, event: Event) -> int:
    """What it makes with its columns comes first; then whose pool it has; then the slot that it ended."""
    if before.iteration == event.iteration and before.step.id in event.step.after:
        return 2
    return int(bool({before.step.pool, before.step.source} & {event.step.pool, event.step.source} - {""}))
