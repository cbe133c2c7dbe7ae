"""What a model lets devices do with it: share its rows, divide its layers or experts, balance or serve these.

Sizes of models decide it. Where they are not known, an engine asks the model itself, once it has read it.
The sizes of columns' fixed axes (``rlgraph/ops/column_types.py``) come from attributes, and from models, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd

from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import UNDIVIDED, UNSHARED
from rlgraph.costs.muon import steps_by_muon
from rlgraph.costs.plan_size import planned_size
from rlgraph.engines.registry import BALANCED
from rlgraph.engines.sglang_options import FP8_BLOCK, REPLICATED
from rlgraph.errors import GraphError, Problem, divisors, fail
from rlgraph.ir.function import Function
from rlgraph.ir.mesh import mesh_of
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Plan, ServePlan, TrainPlan
from rlgraph.ops import registry
from rlgraph.syntax.source import OPEN


def suit_models(plan: Plan) -> None:
    """Check that what a plan asks of each model is in it.

    Raises:
        GraphError: with what is not, of all models.
    """
    problems: list[Problem] = []
    for name, model in plan.models.items():
        config = _config(model)
        if config and model.train:
            problems += _trained(plan, name, model.train, config)
        if model.serve:
            problems += _served(plan, name, model.serve, config)
    if problems:
        raise GraphError(problems)


def _trained(plan: Plan, name: str, train: TrainPlan, config: Config) -> Iterator[Problem]:
    family, path = config.model_type, f"models.{name}.train"
    if train.sequence_parallel > 1 and family in UNSHARED:
        law = f"`{name}` is a {family}: its {UNSHARED[family]}, so that devices can't share its rows "
        yield Problem("sequence-parallel", f"{law}({path}.sequence_parallel)", None, ("1",))
    if (ranks := train.tensor_parallel) > 1:
        yield from _layers(name, ranks, plan.pools[train.pool], config)
    if (ranks := train.expert_parallel) > 1 and not config.experts:
        law = f"`{name}` is no mixture: it has no experts that devices could divide ({path}.expert_parallel)"
        yield Problem("expert-parallel", law, None, ("1",))
    elif config.experts % ranks:
        law = f"the {config.experts} experts of `{name}` can't be shared out among {ranks} devices "
        fit = divisors(gcd(mesh_of(plan, name).shard, config.experts))
        yield Problem("expert-parallel", f"{law}({path}.expert_parallel)", None, tuple(fit))
    for key in BALANCED:
        if getattr(train, key) and not config.experts:
            law = f"`{name}` is no mixture: it has no experts to balance ({path}.{key})"
            yield Problem("balance", law, None, (), f"leave out {key}")
        elif getattr(train, key) and key == "router_bias_update_rate" and not config.biased_choice:
            law = f"the routers of `{name}`, a {family}, choose experts without a bias ({path}.{key})"
            remedy = f"leave out {key}; {path}.router_aux_loss_coef balances them"
            yield Problem("balance", law, None, (), remedy)


def _layers(name: str, ranks: int, devices: int, config: Config) -> Iterator[Problem]:
    setting, counts = f"(models.{name}.train.tensor_parallel)", _divided(config)
    if whole := _whole(config):
        law = f"`{name}` {whole} can't be divided among devices {setting}"
        yield Problem("tensor-parallel", law, None, ("1",))
    elif cut := next((what for what, count in counts.items() if count % ranks), None):
        law = f"the {counts[cut]} {cut} of `{name}` can't be shared out among {ranks} devices {setting}"
        yield Problem("tensor-parallel", law, None, tuple(divisors(gcd(devices, *counts.values()))))


def _served(plan: Plan, name: str, serve: ServePlan, config: Config | None) -> Iterator[Problem]:
    path = f"models.{name}.serve"
    if serve.quantization and (config is None or plan.device != "cuda"):
        law = f"`{name}` can't be served in {serve.quantization}: "
        law += "that takes Hopper GPUs" if config else "the sizes of its layers are not known"
        yield Problem("quantization", law, None, (), f"leave out {path}.quantization")
        return
    if config is None:
        return
    devices = serve.expert_parallel
    if devices > 1 and (not config.experts or config.experts % devices):
        what = f"has {config.experts} experts" if config.experts else "is no mixture of experts"
        law = f"`{name}` {what}, which can't be dealt out to {devices} devices ({path}.expert_parallel)"
        fit = [size for size in divisors(config.experts or 1) if int(size) <= devices]
        yield Problem("expert-parallel", law, None, tuple(fit))
    elif serve.attention_replicas > 1 and config.model_type not in REPLICATED:
        law = f"SGLang has no copies of attention for `{name}`, a {config.model_type} "
        remedy = "leave it out: tensor_parallel alone"
        yield Problem("attention-replicas", f"{law}({path}.attention_replicas)", None, (), remedy)
    elif serve.quantization:
        yield from _blocks(name, serve, config)


def _blocks(name: str, serve: ServePlan, config: Config) -> Iterator[Problem]:
    group, heads = serve.tensor_parallel, serve.tensor_parallel // serve.attention_replicas
    sparse = {config.is_sparse(layer) for layer in range(config.num_hidden_layers)}
    counts = {
        "columns of hidden states": config.hidden_size,
        "columns of queries": config.queries // heads,
        "columns of keys": config.keys // min(heads, config.key_heads),
        "columns of the MLP": config.intermediate_size // group * (False in sparse),
        "columns of an expert": config.expert_size // (group // serve.expert_parallel) * (True in sparse),
    }
    if cut := next((what for what, count in counts.items() if count % FP8_BLOCK), None):
        law = f"the {cut} of `{name}`, {counts[cut]} on each device of a server, are no "
        law += f"blocks of {FP8_BLOCK} (models.{name}.serve.quantization: {serve.quantization})"
        remedy = "let a server span fewer devices (serve.tensor_parallel), or leave out quantization"
        yield Problem("quantization", law, None, (), remedy)


def sharing(plan: Plan) -> list[str]:
    """Return the models whose rows devices may share; a frozen one on another's weights does as that one."""
    return [
        name
        for name, model in plan.models.items()
        if model.train and model.train.tensor_parallel == 1 and not _follows(model)
        if (config := _config(model)) and config.model_type not in UNSHARED
    ]


def dividing(plan: Plan, setting: str, ranks: int) -> list[str]:
    """Return the models whose layers (``tensor_parallel``) or experts (``expert_parallel``) so many devices
    may divide, with all else as it is; a frozen one on other weights follows."""
    fit = []
    for name, model in plan.models.items():
        config, train = _config(model), model.train
        if not config or not train or _follows(model) or train.lora or train.compile:
            continue
        if setting == "expert_parallel":
            able = config.experts > 0 == config.experts % ranks and train.tensor_parallel == 1
        else:
            alone = train.sequence_parallel == 1 and not train.shard and not steps_by_muon(model)
            able = alone and not _whole(config) and not any(n % ranks for n in _divided(config).values())
        fit += [name] * able
    return fit


def _whole(config: Config) -> str:
    """Return why devices can't divide the layers of a model, however many they are."""
    if config.experts:
        return "is a mixture of experts, whose layers"
    if law := UNDIVIDED.get(config.model_type):
        return f"is a {config.model_type}: its {law}, so that its layers"
    return ""


def _divided(config: Config) -> dict[str, int]:
    """Return what each device that divides a layer has as much of as the others."""
    return {
        "query heads": config.num_attention_heads,
        "key heads": config.key_heads,
        "columns of the MLP": config.intermediate_size,
    }


def _follows(model: ModelPlan) -> bool:
    """Return whether a model's layout is that of another, which holds its weights."""
    return bool(model.shares) and model.frozen


def _config(model: ModelPlan) -> Config | None:
    """Return a model's configuration; None where it is not known: the engine asks the model itself."""
    try:
        return planned_size(model).config
    except GraphError:
        return None


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
