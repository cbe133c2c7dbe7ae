"""Two plans are compared step by step, in words.

Numbers of steps, and what only explains (``about``, ``because``), are passed over; predictions as well, but
where both plans have them.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rlgraph.ir.function import Function
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import ModelPlan, Plan, Step, plain
from rlgraph.printing.plan_text import sentence

EXPLAINS = ("about", "digest", "origin", "version", "checksum")
APART = ("models", "steps", "slot", "eval_steps", "domains", "columns", "functions", "notes", "open_values")
PHASES = {"train": "in every iteration", "eval": "in evaluation"}
SETS = ("reads", "writes", "frees")
OTHERWISE = ("id", "phase", "node", "because", "after", "pool", "devices", "when")  # said otherwise
FOLLOWS = {"ins": "reads", "outs": "writes", "target": "op"}  # what the step says in other words
ABSENT = object()


def differences(old: Plan, new: Plan) -> list[str]:
    """Return lines that say what ``new`` does otherwise than ``old``; none where both do the same.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> for line in differences(compile_graph("ppo", devices=1), compile_graph("ppo", ["seed=1"], 1)):
        ...     print(line)
        seed: 0 -> 1
    """
    if old.predicted is None or new.predicted is None:  # a plan that `run` makes again is of no cluster
        old, new = _unpredicted(old), _unpredicted(new)
    a, b = old.fields, new.fields
    alike = [name for name in a if name not in (*EXPLAINS, *APART)]
    lines = [line for name in alike for line in _values(name, a[name], b[name])]
    lines += _models(old.models, new.models)
    for phase, title in PHASES.items():
        changes = [*_phase(PlanSide.of(old, a, phase), PlanSide.of(new, b, phase))]
        lines += [title, *(f"  {line}" for line in changes)] if changes else []
    lines += _slot(old, new)
    lines += _listed("note", old.notes, new.notes)
    lines += _listed("still open", old.open_values, new.open_values)
    if not lines and old.digest != new.digest:
        lines.append(f"the graph differs in what no step shows: digest {old.digest} -> {new.digest}")
    return lines


def against_text(old: Plan, new: Plan) -> str:
    """Return the differences, one a line; nothing where there is none."""
    return "".join(f"{line}\n" for line in differences(old, new))


def _unpredicted(plan: Plan) -> Plan:
    steps = tuple(replace(step, seconds=None, bytes=None) for step in plan.steps)
    return replace(plan, steps=steps, peak=None, predicted=None)


def _models(old: Mapping[str, ModelPlan], new: Mapping[str, ModelPlan]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield f"model {name}: removed"
        elif name not in old:
            yield f"model {name}: added, {new[name].path}"
        else:
            both = (old[name], new[name])
            pair = ({**plain(model), "rate": model.rate and str(model.rate)} for model in both)
            yield from (f"model {name}: {line}" for line in _values("", *pair))


def _slot(old: Plan, new: Plan) -> Iterator[str]:
    """Yield where steps overlap, the order in which the pools get them."""
    names = [[plan.steps[number - 1].node for number in plan.slot] for plan in (old, new)]
    common = {*names[0]} & {*names[1]}
    before, now = ([name for name in in_slot if name in common] for in_slot in names)
    if before != now and any(step.lead for plan in (old, new) for step in plan.steps):
        yield f"while the pipeline is full, another order: {', '.join(now)}"


def _listed(word: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    yield from (f"{word}, no longer: {item}" for item in old if item not in new)
    yield from (f"{word}, new: {item}" for item in new if item not in old)
    if sorted(old) == sorted(new) and old != new:
        yield f"{word}: in another order"


@dataclass(frozen=True)
class PlanSide:
    """One of the two plans, in one phase."""

    steps: Mapping[str, Step]  # the keys are nodes, in their order
    pools: Mapping[str, int]
    functions: Mapping[str, Function]
    columns: Mapping[str, Any]
    domains: Mapping[str, Any]

    @staticmethod
    def of(plan: Plan, data: Mapping[str, Any], phase: str) -> PlanSide:
        steps = plan.steps if phase == "train" else plan.eval_steps
        functions = plan.functions.get(phase, {})
        parts = (data[name].get(phase, {}) for name in ("columns", "domains"))
        return PlanSide({step.node: step for step in steps}, plan.pools, functions, *parts)

    def waits(self, step: Step, known: Container[str]) -> list[str]:
        """Return the known steps that one waits for, by name."""
        names = {step.id: name for name, step in self.steps.items()}
        return sorted(names[number] for number in step.after if names[number] in known)

    def on_all(self, step: Step) -> bool:
        """Return whether a step runs on every device of its pool."""
        return step.devices == tuple(range(self.pools.get(step.pool, 0)))


def _phase(old: PlanSide, new: PlanSide) -> Iterator[str]:
    for name, step in old.steps.items():
        if name not in new.steps:
            yield f"removed  step {step.id}, {sentence(step)}"
    moved = _moved([*old.steps], [*new.steps])
    for name, step in new.steps.items():
        if name not in old.steps:
            yield f"added    step {step.id}, {sentence(step)}"
            continue
        if name in moved:
            yield f"moved    {name}: was {_place(name, [*old.steps])}, is {_place(name, [*new.steps])}"
        if changes := [*_changes(name, old, new)]:
            yield f"changed  step {step.id}, {name}"
            yield from (f"           {change}" for change in changes)
    yield from (f"domain   {line}" for line in _values("", _domains(old), _domains(new)))
    yield from _columns(old, new)


def _moved(old: list[str], new: list[str]) -> set[str]:
    """Return the fewest names without which the others are in one order: those off a longest common run.

    Example:
        >>> _moved(["a", "b", "c", "d"], ["d", "a", "b", "c"])
        {'d'}
    """
    import networkx as nx  # here, as most commands compare no plans

    common = [name for name in new if name in old]
    if common == [name for name in old if name in new]:
        return set()
    place = {name: at for at, name in enumerate(old)}
    alike = nx.DiGraph((b, a) for b, a in combinations(common[::-1], 2) if place[a] < place[b])
    return {*common}.difference(nx.dag_longest_path(alike) or common[-1:])


def _place(name: str, names: list[str]) -> str:
    at = names.index(name)
    return f"after {names[at - 1]}" if at else "the first"


def _changes(name: str, old: PlanSide, new: PlanSide) -> Iterator[str]:
    """Yield what differs about one step and its function; what follows from that is left out."""
    before, now = old.steps[name], new.steps[name]
    a, b = plain(before), plain(now)
    for field in SETS:
        yield from _set(field, a[field], b[field])
    on_all = old.on_all(before) and new.on_all(now) and before.pool == now.pool
    if (before.pool, before.devices) != (now.pool, now.devices) and not on_all:
        yield f"runs on {_devices(now)}, no longer on {_devices(before)}"
    if before.when != now.when:
        yield " -> ".join(f"runs {words(step.when) or 'in every iteration'}" for step in (before, now))
    for field in a:
        if field not in (*SETS, *OTHERWISE):
            yield from _values(field, a[field], b[field])
    if a["reads"] == b["reads"]:
        yield from _set("waits for", old.waits(before, new.steps), new.waits(now, old.steps))
    was, call = (_told(side.functions.get(name)) for side in (old, new))
    for field, shown in FOLLOWS.items():
        if a[shown] != b[shown]:
            was.pop(field, None), call.pop(field, None)
    for line in _values("", was, call):
        yield line.replace("hooks.", "", 1).replace("attributes.", "", 1)


def _told(function: Function | None) -> dict[str, Any]:
    """Return a function with words for the attributes that change over the iterations."""
    if function is None:
        return {}
    courses = {name: str(course) for name, course in function.courses.items()}
    hooks = {path: _told(hook) for path, hook in function.hooks.items()}
    attributes = plain({**function.attributes, **courses})
    return {**plain(function), "attributes": attributes, "courses": {}, "hooks": hooks}


def _set(word: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield text such as ``reads tokens, no longer rewards``."""
    more, fewer = [x for x in new if x not in old], [x for x in old if x not in new]
    if more:
        yield f"{word} {', '.join(more)}" + (f", no longer {', '.join(fewer)}" if fewer else " as well")
    elif fewer:
        yield f"no longer {word} {', '.join(fewer)}"
    elif [*old] != [*new]:
        yield f"{word} {', '.join(new)}, in another order"


def _devices(step: Step) -> str:
    first, last = step.devices[0], step.devices[-1]
    return f"{step.pool}[{first}]" if first == last else f"{step.pool}[{first}-{last}]"


def _domains(side: PlanSide) -> dict[str, str]:
    """Return domain -> how many rows it has."""
    named = {column["domain"]: side.domains[column["domain"]] for column in side.columns.values()}
    return {
        name: f"{domain['times']} for each of {domain['parent']}" if domain["parent"] else "a batch"
        for name, domain in named.items()
    }


def _columns(old: PlanSide, new: PlanSide) -> Iterator[str]:
    """Yield what differs of columns of both plans; of the others it is said which step writes them."""
    for name in [name for name in old.columns if name in new.columns]:
        pair = [{**side.columns[name]} for side in (old, new)]
        for side, column in zip((old, new), pair, strict=True):
            writer = side.steps.get(column["writer"])
            if writer and writer.layout == column["layout"]:
                column["layout"] = "its writer's"
        yield from (f"column   {name}: {line}" for line in _values("", *pair))


def _values(path: str, old: Any, new: Any) -> Iterator[str]:
    """Yield where values differ, as ``schedule.iterations: 500 -> 10``."""
    for place, before, now in changed_values(old, new, (path,) if path else ()):
        yield f"{'.'.join(place)}: {value_text(before)} -> {value_text(now)}"


def changed_values(
    old: Any, new: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the paths at which values differ, with both; 1, 1.0 and true are three values.

    Example:
        >>> [*changed_values({"a": {"b": 1, "c": 2}}, {"a": {"b": True, "c": 2}})]
        [(('a', 'b'), 1, True)]
    """
    if json.dumps(old, sort_keys=True, default=str) == json.dumps(new, sort_keys=True, default=str):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            yield from changed_values(old.get(name, ABSENT), new.get(name, ABSENT), (*path, name))
    else:
        yield path, old, new


def value_text(value: Any) -> str:
    """Return a value as a change shows it."""
    if value is ABSENT:
        return "nothing"
    return value if isinstance(value, str) and value else json.dumps(value)
