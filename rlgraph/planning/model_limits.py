"""The limits of a model: how devices may share its rows, divide its layers or experts, or balance it.

Sizes of models decide it. Where they are not known, an engine asks the model itself, once it has read it.
The sizes of columns' fixed axes (``rlgraph/ops/column_types.py``) come from attributes, and from models, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import UNSHARED
from rlgraph.costs.plan_size import known_sizes, planned_size
from rlgraph.engines.optimizers import OPTIMIZERS
from rlgraph.errors import GraphError, Problem, fail, raise_problems
from rlgraph.ir.actions import Merge
from rlgraph.ir.function import Function
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Plan
from rlgraph.laws.sizes import SIZE_LAWS, divided_counts, undivided_layers
from rlgraph.laws.views import SizedView
from rlgraph.ops import registry
from rlgraph.syntax.source import OPEN


def suit_models(plan: Plan) -> None:
    """Check that what a plan asks of each model is in it.

    Raises:
        GraphError: with what is not, of all models.
    """
    problems: list[Problem] = []
    for name, size in known_sizes(plan).items():
        config = size.config if size else None
        view = SizedView(plan, name, plan.models[name], config)
        for law in SIZE_LAWS:
            problems += law(view)
    raise_problems(problems)


def sharing(plan: Plan) -> list[str]:
    """Return the models whose rows devices may share; a frozen one on another's weights does as that one."""
    names = []
    for name, config in _configs(plan).items():
        train = plan.models[name].train
        if train is None or train.tensor_parallel > 1:
            continue
        if config.model_type not in UNSHARED:
            names.append(name)
    return names


def dividing(plan: Plan, setting: str, ranks: int) -> list[str]:
    """Return the models whose layers (``tensor_parallel``) or experts (``expert_parallel``) may be split over
    ``ranks`` devices, with all other settings as they are. Frozen models that share weights follow the model
    that owns these."""
    can_divide = CAN_DIVIDE[setting]
    names = []
    for name, config in _configs(plan).items():
        if can_divide(plan.models[name], config, ranks):
            names.append(name)
    return names


def _can_divide_experts(model: ModelPlan, config: Config, ranks: int) -> bool:
    train = model.train
    if train is None or train.tensor_parallel > 1:
        return False
    if train.lora or train.compile:
        return False
    if config.experts == 0:
        return False
    return config.experts % ranks == 0


def _can_divide_layers(model: ModelPlan, config: Config, ranks: int) -> bool:
    train = model.train
    if train is None or train.sequence_parallel > 1 or train.shard:
        return False
    if train.lora or train.compile:
        return False
    if model.optimizer:
        excluded = OPTIMIZERS[model.optimizer.kind].excludes
        if "tensor_parallel" in excluded:
            return False
    if undivided_layers(config):
        return False
    counts = divided_counts(config).values()
    return all(count % ranks == 0 for count in counts)


CAN_DIVIDE: Mapping[str, Callable[[ModelPlan, Config, int], bool]] = {
    "expert_parallel": _can_divide_experts,
    "tensor_parallel": _can_divide_layers,
}


def _configs(plan: Plan) -> dict[str, Config]:
    """Return the configurations that are known, of the models whose layout is not that of another.

    Where one is not known, the engine asks the model itself.
    """
    configs = {}
    for name, size in known_sizes(plan).items():
        if size is None:
            continue
        model = plan.models[name]
        follows_another = model.frozen and bool(model.shares)
        if not follows_another:
            configs[name] = size.config
    return configs


def with_axis_sizes(plan: Plan) -> Plan:
    """Return the plan with the sizes of its columns' fixed axes, and how their values are stored.

    Those of a model whose path is still open are left open.

    Raises:
        GraphError: nothing says how long an axis is, or its model is not a mixture of experts or of unknown
            size.
    """
    columns: dict[str, dict[str, ColumnPlan]] = {}
    for phase, unsized in plan.columns.items():
        merges: dict[str, str] = {}  # a step that joins parts -> the first of its parts
        for step in plan.phases.get(phase, ()):
            if isinstance(step.action, Merge):
                merges[step.node] = step.reads[0]
        columns[phase] = {}
        for name, column in unsized.items():
            columns[phase][name] = _sized(plan, phase, column, merges)
    return replace(plan, columns=columns)


def _sized(plan: Plan, phase: str, column: ColumnPlan, merges: Mapping[str, str]) -> ColumnPlan:
    """Return a column with its sizes.

    Those of joined parts, and of rows that a node returns, are as long as what these come from.
    """
    origin = plan.columns[phase][column.origin]
    if origin.writer in merges:
        return _sized_like(plan, phase, column, merges[origin.writer], merges)
    function = plan.functions[phase].get(origin.writer)
    has_sizes = bool(column.type.fixed) or column.type.dtype == "int64"
    if function is None or not has_sizes:
        return column
    output = next(name for name, written in function.outs.items() if written == column.origin)
    if output in function.holds:
        return _sized_like(plan, phase, column, function.ins[output], merges)
    stored = registry.load(function.target).declared.stores.get(output, "")
    sizes: list[int] = []
    for axis in column.type.fixed:
        size = _size(axis, origin, function, plan.models)
        if size is None:
            return replace(column, sizes=(), stored=stored)
        sizes.append(size)
    return replace(column, sizes=tuple(sizes), stored=stored)


def _sized_like(
    plan: Plan, phase: str, column: ColumnPlan, name: str, merges: Mapping[str, str]
) -> ColumnPlan:
    """Return a column with the sizes of another, whose rows it has."""
    model = _sized(plan, phase, plan.columns[phase][name], merges)
    return replace(column, sizes=model.sizes, stored=model.stored)


def _size(axis: str, column: ColumnPlan, function: Function, models: Mapping[str, ModelPlan]) -> int | None:
    """Return how long an axis of a column is; None where the path of its model is open."""
    if axis.isdigit():
        return int(axis)
    length = function.attributes.get(axis)
    if isinstance(length, int) and length > 0:
        return length
    law = f"node `{column.writer}` writes `{column.origin}`: {column.type}"
    if axis not in ("layers", "k") or function.model is None:
        remedy = f"give the op an attribute `{axis}`, a whole number above 0"
        raise fail("unsized-axis", f"{law}; nothing says how long `{axis}` is", None, remedy=remedy)
    model = models[function.model]
    if model.path == OPEN:
        return None
    try:
        config = planned_size(model).config
    except GraphError as error:
        unknown = error.problems[0]
        raise fail(unknown.kind, f"{law}; {unknown.law}", None, remedy=unknown.remedy) from error
    sparse_layers = sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    if not sparse_layers:
        law += f"; models.{function.model} ({model.path}) is not a mixture of experts"
        remedy = f"leave `{column.origin}` out, or take a mixture of experts"
        raise fail("no-mixture", law, None, remedy=remedy)
    return sparse_layers if axis == "layers" else config.num_experts_per_tok
