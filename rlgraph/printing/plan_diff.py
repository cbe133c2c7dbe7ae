"""Compares two plans step by step, in words.

The numbers of steps and fields that only explain (``about``, ``because``) are left out. Predictions are
compared only if both plans have them.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rlgraph.ir.function import Function
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import ModelPlan, Plan, Step, plain
from rlgraph.printing.step_text import sentence

EXPLANATIONS = ("about", "digest", "origin", "version", "checksum")
# fields of a plan that are compared by a function of their own
STRUCTURED = (
    "models",
    "steps",
    "slot",
    "eval_steps",
    "domains",
    "columns",
    "functions",
    "notes",
    "open_values",
)
PHASES = {"train": "in every iteration", "eval": "in evaluation"}
SETS = ("reads", "writes", "frees")  # fields of a step
# fields of a step that are left out, or compared by a function of their own
OTHERWISE = ("id", "phase", "node", "because", "after", "pool", "devices", "when")
# a field of a function -> the field of its step that changes with it, and is compared already
REPEATED = {"ins": "reads", "outs": "writes", "target": "op"}
ABSENT = object()  # in place of a value that one side does not have


def differences(old: Plan, new: Plan) -> list[str]:
    """Return lines that say how ``new`` differs from ``old``; none if both do the same.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> for line in differences(compile_graph("ppo", devices=1), compile_graph("ppo", ["seed=1"], 1)):
        ...     print(line)
        seed: 0 -> 1
    """
    # a plan that `run` makes again has no cluster, and so no prediction
    if old.predicted is None or new.predicted is None:
        old = _without_prediction(old)
        new = _without_prediction(new)
    old_fields = old.fields
    new_fields = new.fields
    lines: list[str] = []
    for name in old_fields:
        if name not in EXPLANATIONS and name not in STRUCTURED:
            lines += _values(old_fields[name], new_fields[name], name)
    lines += _models(old.models, new.models)
    for phase, title in PHASES.items():
        old_side = PlanSide.of(old, old_fields, phase)
        new_side = PlanSide.of(new, new_fields, phase)
        changes = [f"  {change}" for change in _phase(old_side, new_side)]
        if changes:
            lines += [title, *changes]
    lines += _slot(old, new)
    lines += _texts("note", old.notes, new.notes)
    lines += _texts("still open", old.open_values, new.open_values)
    if not lines and old.digest != new.digest:
        lines.append(f"the graph differs in what no step shows: digest {old.digest} -> {new.digest}")
    return lines


def against_text(old: Plan, new: Plan) -> str:
    """Return the differences, one per line; empty if there is none."""
    return "".join(f"{line}\n" for line in differences(old, new))


def _without_prediction(plan: Plan) -> Plan:
    steps = tuple(replace(step, seconds=None, bytes=None) for step in plan.steps)
    return replace(plan, steps=steps, peak=None, predicted=None)


def _models(old: Mapping[str, ModelPlan], new: Mapping[str, ModelPlan]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield f"model {name}: removed"
        elif name not in old:
            yield f"model {name}: added, {new[name].path}"
        else:
            for line in _values(_model_fields(old[name]), _model_fields(new[name])):
                yield f"model {name}: {line}"


def _model_fields(model: ModelPlan) -> dict[str, Any]:
    """Return a model's fields, with its learning rate in words."""
    return {**plain(model), "rate": model.rate and str(model.rate)}


def _slot(old: Plan, new: Plan) -> Iterator[str]:
    """Yield the new order in which pools get steps that overlap, if that differs."""
    is_pipelined = any(step.lead for step in (*old.steps, *new.steps))
    if not is_pipelined:
        return
    old_order = _slot_names(old)
    new_order = _slot_names(new)
    old_common = _those_in(old_order, new_order)
    new_common = _those_in(new_order, old_order)
    if old_common != new_common:
        yield f"while the pipeline is full, another order: {', '.join(new_common)}"


def _those_in(names: Iterable[str], others: Container[str]) -> list[str]:
    """Return the names that are among others, too, in their own order."""
    return [name for name in names if name in others]


def _those_not_in(names: Iterable[str], others: Container[str]) -> list[str]:
    return [name for name in names if name not in others]


def _slot_names(plan: Plan) -> list[str]:
    return [plan.steps[number - 1].node for number in plan.slot]


def _texts(label: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield which texts of a list are gone and which are new."""
    for text in _those_not_in(old, new):
        yield f"{label}, no longer: {text}"
    for text in _those_not_in(new, old):
        yield f"{label}, new: {text}"
    if old != new and sorted(old) == sorted(new):
        yield f"{label}: in another order"


@dataclass(frozen=True)
class PlanSide:
    """One of the two plans, in one phase."""

    steps: Mapping[str, Step]  # the keys are nodes, in their order
    pools: Mapping[str, int]
    functions: Mapping[str, Function]
    columns: Mapping[str, Any]
    domains: Mapping[str, Any]

    @staticmethod
    def of(plan: Plan, fields: Mapping[str, Any], phase: str) -> PlanSide:
        """Return a phase of a plan whose ``Plan.fields`` are given."""
        steps = plan.steps if phase == "train" else plan.eval_steps
        return PlanSide(
            steps={step.node: step for step in steps},
            pools=plan.pools,
            functions=plan.functions.get(phase, {}),
            columns=fields["columns"].get(phase, {}),
            domains=fields["domains"].get(phase, {}),
        )

    def waits_for(self, step: Step, known: Container[str]) -> list[str]:
        """Return the known steps that a step waits for, by name."""
        names = {step.id: name for name, step in self.steps.items()}
        awaited = [names[number] for number in step.after]
        return sorted(_those_in(awaited, known))

    def on_all(self, step: Step) -> bool:
        """Return whether a step runs on every device of its pool."""
        return step.devices == tuple(range(self.pools.get(step.pool, 0)))


def _phase(old: PlanSide, new: PlanSide) -> Iterator[str]:
    """Yield the changes of one phase: steps, then the domains and columns of both plans."""
    for name, step in old.steps.items():
        if name not in new.steps:
            yield f"removed  step {step.id}, {sentence(step)}"
    moved = _moved([*old.steps], [*new.steps])
    for name, step in new.steps.items():
        if name not in old.steps:
            yield f"added    step {step.id}, {sentence(step)}"
            continue
        if name in moved:
            yield f"moved    {name}: was {_position(name, old)}, is {_position(name, new)}"
        changes = [f"           {change}" for change in _changes(name, old, new)]
        if changes:
            yield f"changed  step {step.id}, {name}"
            yield from changes
    for line in _values(_domains(old), _domains(new)):
        yield f"domain   {line}"
    # a column of one plan only shows in the step that writes it
    for name in _those_in(old.columns, new.columns):
        for line in _values(_column_fields(name, old), _column_fields(name, new)):
            yield f"column   {name}: {line}"


def _moved(old: list[str], new: list[str]) -> set[str]:
    """Return the fewest names that have to move for the others to be in the same order.

    The others are a longest common subsequence of the two orders.

    Example:
        >>> _moved(["a", "b", "c", "d"], ["d", "a", "b", "c"])
        {'d'}
    """
    import networkx as nx  # here, as most commands compare no plans

    old_position = {name: index for index, name in enumerate(old)}
    common = _those_in(new, old)
    if common == sorted(common, key=old_position.__getitem__):
        return set()
    # an edge leads from each name to those that come later in both orders
    in_both = nx.DiGraph()
    for later, earlier in combinations(reversed(common), 2):
        if old_position[earlier] < old_position[later]:
            in_both.add_edge(earlier, later)
    unmoved = nx.dag_longest_path(in_both) or common[-1:]
    return set(common).difference(unmoved)


def _position(name: str, side: PlanSide) -> str:
    names = [*side.steps]
    index = names.index(name)
    if index == 0:
        return "the first"
    return f"after {names[index - 1]}"


def _changes(name: str, old: PlanSide, new: PlanSide) -> Iterator[str]:
    """Yield how a step and its function differ, without what follows from other differences."""
    old_step = old.steps[name]
    new_step = new.steps[name]
    old_fields = plain(old_step.as_file_row())
    new_fields = plain(new_step.as_file_row())
    for field in SETS:
        yield from _set(field, old_fields[field], new_fields[field])
    if _is_on_other_devices(old, old_step, new, new_step):
        yield f"runs on {_devices(new_step)}, no longer on {_devices(old_step)}"
    if old_step.when != new_step.when:
        yield f"{_cadence(old_step)} -> {_cadence(new_step)}"
    for field in old_fields:
        if field not in SETS and field not in OTHERWISE:
            yield from _values(old_fields[field], new_fields[field], field)
    if old_fields["reads"] == new_fields["reads"]:
        old_waits = old.waits_for(old_step, new.steps)
        new_waits = new.waits_for(new_step, old.steps)
        yield from _set("waits for", old_waits, new_waits)
    yield from _function_changes(name, old, new, old_fields, new_fields)


def _function_changes(
    name: str, old: PlanSide, new: PlanSide, old_fields: Mapping[str, Any], new_fields: Mapping[str, Any]
) -> Iterator[str]:
    """Yield how the function of a step differs, but for what the step's own fields have shown."""
    old_function = _function_fields(old.functions.get(name))
    new_function = _function_fields(new.functions.get(name))
    for field, step_field in REPEATED.items():
        if old_fields[step_field] != new_fields[step_field]:
            old_function.pop(field, None)
            new_function.pop(field, None)
    for line in _values(old_function, new_function):
        yield line.replace("hooks.", "", 1).replace("attributes.", "", 1)


def _is_on_other_devices(old: PlanSide, old_step: Step, new: PlanSide, new_step: Step) -> bool:
    """Return whether a step has changed its devices, other than by the size of its pool."""
    if old_step.pool != new_step.pool:
        return True
    # a step on all devices of its pool follows the pool, whose size is compared already
    follows_pool = old.on_all(old_step) and new.on_all(new_step)
    return not follows_pool and old_step.devices != new_step.devices


def _cadence(step: Step) -> str:
    return f"runs {words(step.when) or 'in every iteration'}"


def _function_fields(function: Function | None) -> dict[str, Any]:
    """Return a function's fields, with attributes that change over the iterations in words."""
    if function is None:
        return {}
    schedules = {name: str(schedule) for name, schedule in function.courses.items()}
    return {
        **plain(function),
        "attributes": plain({**function.attributes, **schedules}),
        "courses": {},
        "hooks": {path: _function_fields(hook) for path, hook in function.hooks.items()},
    }


def _set(verb: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield text such as ``reads tokens, no longer rewards``; nothing if both are the same."""
    added = ", ".join(_those_not_in(new, old))
    removed = ", ".join(_those_not_in(old, new))
    if added and removed:
        yield f"{verb} {added}, no longer {removed}"
    elif added:
        yield f"{verb} {added} as well"
    elif removed:
        yield f"no longer {verb} {removed}"
    elif [*old] != [*new]:
        yield f"{verb} {', '.join(new)}, in another order"


def _devices(step: Step) -> str:
    start = step.devices[0]
    end = step.devices[-1]
    if start == end:
        return f"{step.pool}[{start}]"
    return f"{step.pool}[{start}-{end}]"


def _domains(side: PlanSide) -> dict[str, str]:
    """Return domain -> how many rows it has, for the domains of columns."""
    rows = {}
    for column in side.columns.values():
        name = column["domain"]
        domain = side.domains[name]
        parent = domain["parent"]
        if parent:
            rows[name] = f"{domain['times']} for each of {parent}"
        else:
            rows[name] = "a batch"
    return rows


def _column_fields(name: str, side: PlanSide) -> dict[str, Any]:
    """Return a column's fields; its layout only if that is not its writer's, which is compared already."""
    column = {**side.columns[name]}
    writer = side.steps.get(column["writer"])
    if writer and writer.layout == column["layout"]:
        column["layout"] = "its writer's"
    return column


def _values(old: Any, new: Any, *path: str) -> Iterator[str]:
    """Yield the values that differ, as ``schedule.iterations: 500 -> 10``; ``path`` leads to both."""
    for names, old_value, new_value in changed_values(old, new, path):
        yield f"{'.'.join(names)}: {value_text(old_value)} -> {value_text(new_value)}"


def changed_values(
    old: Any, new: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the paths at which values differ, with both values; 1, 1.0 and true are three values.

    Example:
        >>> [*changed_values({"a": {"b": 1, "c": 2}}, {"a": {"b": True, "c": 2}})]
        [(('a', 'b'), 1, True)]
    """
    if json.dumps(old, sort_keys=True, default=str) == json.dumps(new, sort_keys=True, default=str):
        return
    are_mappings = isinstance(old, dict) and isinstance(new, dict)
    if not are_mappings:
        yield path, old, new
        return
    for name in dict.fromkeys((*old, *new)):
        yield from changed_values(old.get(name, ABSENT), new.get(name, ABSENT), (*path, name))


def value_text(value: Any) -> str:
    """Return a value as a change shows it."""
    if value is ABSENT:
        return "nothing"
    if isinstance(value, str) and value:
        return value
    return json.dumps(value)
