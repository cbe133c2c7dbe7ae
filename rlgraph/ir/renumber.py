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
    numbers = {}
    last_user = {}
    columns = _columns_used(steps)
    for number, step in enumerate(steps, 1):
        numbers[step.id] = number
        for column in columns[step.id]:
            last_user[column] = step.id

    changed = []
    for step in steps:
        freed = []
        for column in columns[step.id]:
            if last_user[column] == step.id and column not in keep:
                freed.append(column)
        after = sorted(numbers[number] for number in step.after)
        changed.append(replace(step, id=numbers[step.id], after=tuple(after), frees=tuple(freed)))
    return tuple(changed), numbers


def _columns_used(steps: Sequence[Step]) -> dict[int, list[str]]:
    """Return the columns that each step reads or writes, each once.

    An update also reads what the terms that join it have left to it.
    """
    terms: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        terms[step.joins].append(step)
    columns: dict[int, list[str]] = {}
    for step in steps:
        joined = terms[step.node] if step.updated else []
        used: dict[str, None] = {}
        for user in (step, *joined):
            used.update(dict.fromkeys((*user.reads, *user.writes)))
        columns[step.id] = list(used)
    return columns


def with_order(plan: Plan, steps: Sequence[Step], slot: Iterable[int]) -> Plan:
    """Return the plan with these training steps, renumbered; ``slot`` holds their old numbers."""
    in_order, numbers = renumbered(steps)
    return replace(plan, steps=in_order, slot=tuple(numbers[number] for number in slot))


def surrounded(steps: Iterable[Step], around: StepsAround) -> list[Step]:
    """Put other steps before and behind some steps; a step waits for one that was put before it."""
    surrounded_steps: list[Step] = []
    for step in steps:
        earlier, later = around.get(step.id, ((), ()))
        waits = [*step.after]
        waits += [inserted.id for inserted in earlier]
        surrounded_steps += [*earlier, replace(step, after=tuple(waits)), *later]
    return surrounded_steps
