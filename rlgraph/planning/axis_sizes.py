"""The sizes of fixed axes (``rlgraph/ops/column_types.py``), from attributes and the cards of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.costs.plan_size import planned_size
from rlgraph.errors import GraphError, fail
from rlgraph.ir.function import Function
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Plan
from rlgraph.ops import registry
from rlgraph.syntax.source import OPEN


def with_axis_sizes(plan: Plan) -> Plan:
    """Return the plan with the sizes of its columns' fixed axes, and how their values are stored.

    Those of a model whose path is still open are left open.

    Raises:
        GraphError: nothing says how long an axis is, or its model is no mixture of experts or of unknown
            size.
    """
    columns = {}
    for phase, unsized in plan.columns.items():
        merges = {step.node: step.reads[0] for step in plan.phases.get(phase, ()) if step.facts.merges}
        columns[phase] = {name: _sized(plan, phase, column, merges) for name, column in unsized.items()}
    return replace(plan, columns=columns)


def _sized(plan: Plan, phase: str, column: ColumnPlan, merges: Mapping[str, str]) -> ColumnPlan:
    made = plan.columns[phase][column.origin]
    if made.writer in merges:  # all that it joins are as long
        first = _sized(plan, phase, plan.columns[phase][merges[made.writer]], merges)
        return replace(column, sizes=first.sizes, stored=first.stored)
    function = plan.functions[phase].get(made.writer)
    if function is None or not (column.type.fixed or column.type.dtype == "int64"):
        return column
    if (held := _held(function, column.origin)) is not None:
        first = _sized(plan, phase, plan.columns[phase][held], merges)
        return replace(column, sizes=first.sizes, stored=first.stored)
    output = next(name for name, out in function.outs.items() if out == column.origin)
    stored = registry.load(function.target).declared.stores.get(output, "")
    sizes = [_size(axis, made, function, plan.models) for axis in column.type.fixed]
    return replace(column, sizes=tuple(filter(None, sizes)) if all(sizes) else (), stored=stored)


def _held(function: Function, column: str) -> str | None:
    """Return the column of the rows that come of which a node that holds rows gives one, if it is such."""
    return next((function.ins[name] for name in function.holds if function.outs[name] == column), None)


def _size(axis: str, made: ColumnPlan, function: Function, models: Mapping[str, ModelPlan]) -> int | None:
    """Return how long an axis of a column is; None where the path of its model is open."""
    given = int(axis) if axis.isdigit() else function.attributes.get(axis)
    if isinstance(given, int) and given > 0:
        return given
    law = f"node `{made.writer}` writes `{made.origin}`: {made.type}"
    if axis not in ("layers", "k") or function.model is None:
        remedy = f"give the op an attribute `{axis}`, a whole number above 0"
        raise fail("unsized-axis", f"{law}; nothing says how long `{axis}` is", None, remedy=remedy)
    model = models[function.model]
    path = model.path
    if path == OPEN:
        return None
    try:
        config = planned_size(model).config
    except GraphError as error:
        unknown = error.problems[0]
        raise fail(unknown.kind, f"{law}; {unknown.law}", None, remedy=unknown.remedy) from error
    mixtures = sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    if not mixtures:
        law += f"; models.{function.model} ({path}) is no mixture of experts"
        raise fail("no-mixture", law, None, remedy=f"leave `{made.origin}` out, or take a mixture of experts")
    return mixtures if axis == "layers" else config.num_experts_per_tok
