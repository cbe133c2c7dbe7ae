"""Renumbers a plan's steps after some came in or changed places, and frees columns anew."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from rlgraph.ir.plan import Plan, Step

StepsAround = Mapping[int, tuple[Sequence[Step], Sequence[Step]]]  # step -> steps before it and behind it


def renumbered(steps: Sequence[Step], keep: Collection[str] = ()) -> tuple[tuple[Step, ...], dict[int, int]]:
    """Return steps with the numbers 1, 2, ..., and the new number of each old one.

    Columns to ``keep`` outlive the steps: those that an evaluation reports.
    """
    numbers = {step.id: number for number, step in enumerate(steps, 1)}
    # an update reads what the terms that join it have left to it
    joining: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        joining[step.joins].append(step)
    terms = {step.id: joining[step.node] if step.updates else () for step in steps}
    holds = {
        step.id: [c for one in (step, *terms[step.id]) for c in (*one.reads, *one.writes)] for step in steps
    }
    last = {column: step.id for step in steps for column in holds[step.id]}

    def changed(step: Step) -> Step:
        touched = dict.fromkeys(holds[step.id])
        return replace(
            step,
            id=numbers[step.id],
            after=tuple(sorted(numbers[number] for number in step.after)),
            frees=tuple(c for c in touched if last[c] == step.id and c not in keep),
        )

    return tuple(map(changed, steps)), numbers


def with_order(plan: Plan, steps: Sequence[Step], slot: Iterable[int]) -> Plan:
    """Return the plan with these training steps, renumbered; ``slot`` holds their old numbers."""
    again, numbers = renumbered(steps)
    return replace(plan, steps=again, slot=tuple(numbers[number] for number in slot))


def surrounded(steps: Iterable[Step], around: StepsAround) -> list[Step]:
    """Put other steps before and behind some steps; a step waits for one that was put before it."""
    placed: list[Step] = []
    for step in steps:
        before, behind = around.get(step.id, ((), ()))
        placed += [*before, replace(step, after=(*step.after, *(b.id for b in before))), *behind]
    return placed
