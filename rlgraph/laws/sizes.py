"""Laws of what a model's size allows: sharing its rows, dividing its layers or experts, serving it in 8 bits.

Where a size is not known, an engine asks the model itself, once it has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from rlgraph.costs.lora_size import shares_base
from rlgraph.costs.model_size import is_vision_language
from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import UNDIVIDED, UNSHARED
from rlgraph.engines.registry import BALANCED, serving
from rlgraph.engines.sglang_options import FP8_BLOCK, REPLICATED
from rlgraph.errors import Problem, divisors
from rlgraph.ir.plan import ServePlan
from rlgraph.laws.views import ServeSizeView, SizedView, TrainSizeView


def _reads_text_alone(view: SizedView) -> Iterator[Problem]:
    """Yield a vision-language model that the run would load. An endpoint may serve one."""
    has_remote_weights = view.model.serve is not None and not serving(view.model.serve).paths
    if has_remote_weights and view.model.train is None:
        return
    same_path = [name for name, model in view.plan.models.items() if model.path == view.model.path]
    is_first = same_path[0] == view.name  # where several models have the path
    if not is_first or not is_vision_language(view.model.path):
        return
    law = f"models.{view.name}.path: {view.model.path} is a vision-language model, and vision-language "
    law += "models are not supported yet"
    remedy = f"give the path of a text-only language model: models.{view.name}.path=..."
    yield Problem("vision-language", law, None, remedy=remedy)


def _four_bits_are_of_linear_layers(view: SizedView) -> Iterator[Problem]:
    """Yield a model that can't have its weights in 4 bits: a mixture, whose experts are no linear layers, or
    one that generates beside an adapter with weights of its files."""
    train, serve = view.model.train, view.model.serve
    if train is None or train.lora is None or train.lora.quantize is None:
        return
    path = f"models.{view.name}.train.lora.quantize"
    if view.config and view.config.experts:
        law = f"`{view.name}` is a mixture of experts, whose weights can't lie in 4 bits ({path})"
        yield Problem("four-bits", law, None, remedy=f"leave out {path}")
        return
    if serve is None or serve.lora != "adapter":
        return
    if not shares_base(view.plan, view.name, serve.pool):
        law = f"the engine of `{view.name}` reads the weights below the adapter from files, where they are "
        law += f"not those in 4 bits beside which it trains ({path})"
        remedy = f"leave out models.{view.name}.serve.lora: a sync then sends weights with the adapter added"
        yield Problem("four-bits", law, None, remedy=remedy)


def _trains_as_its_size_allows(view: SizedView) -> Iterator[Problem]:
    """A train engine divides and balances only what a model of known size has."""
    if view.model.train and view.config:
        trained = TrainSizeView(view.plan, view.name, view.model.train, view.config)
        for law in TRAIN_SIZE_LAWS:
            yield from law(trained)


def _rows_can_be_shared(view: TrainSizeView) -> Iterator[Problem]:
    family = view.config.model_type
    if view.train.sequence_parallel == 1 or family not in UNSHARED:
        return
    law = f"`{view.name}` is a {family}: its {UNSHARED[family]}, so that devices can't share its rows "
    law += f"(models.{view.name}.train.sequence_parallel)"
    yield Problem("sequence-parallel", law, None, ("1",))


def _layers_can_be_divided(view: TrainSizeView) -> Iterator[Problem]:
    ranks = view.train.tensor_parallel
    if ranks == 1:
        return
    setting = f"(models.{view.name}.train.tensor_parallel)"
    reason = undivided_layers(view.config)
    if reason:
        law = f"`{view.name}` {reason} can't be divided among devices {setting}"
        yield Problem("tensor-parallel", law, None, ("1",))
        return
    counts = divided_counts(view.config)
    for name, count in counts.items():
        if count % ranks:
            law = f"the {count} {name} of `{view.name}` can't be shared out among {ranks} devices {setting}"
            devices = view.plan.pools[view.train.pool]
            fitting = divisors(gcd(devices, *counts.values()))
            yield Problem("tensor-parallel", law, None, tuple(fitting))
            return


def undivided_layers(config: Config) -> str:
    """Return why devices can't divide the layers of a model, however many they are; "" where they can."""
    if config.experts:
        return "is a mixture of experts, whose layers"
    reason = UNDIVIDED.get(config.model_type)
    return f"is a {config.model_type}: its {reason}, so that its layers" if reason else ""


def divided_counts(config: Config) -> dict[str, int]:
    """Return what each device that divides a layer has as much of as the others."""
    return {
        "query heads": config.num_attention_heads,
        "key heads": config.key_heads,
        "columns of the MLP": config.intermediate_size,
    }


def _experts_can_be_divided(view: TrainSizeView) -> Iterator[Problem]:
    ranks = view.train.expert_parallel
    if ranks == 1:
        return
    setting = f"(models.{view.name}.train.expert_parallel)"
    experts = view.config.experts
    if not experts:
        law = f"`{view.name}` is not a mixture: it has no experts that devices could divide {setting}"
        yield Problem("expert-parallel", law, None, ("1",))
    elif experts % ranks:
        law = f"the {experts} experts of `{view.name}` can't be shared out among {ranks} devices {setting}"
        fitting = divisors(gcd(view.plan.meshes[view.name].shard, experts))
        yield Problem("expert-parallel", law, None, tuple(fitting))


def _experts_can_be_balanced(view: TrainSizeView) -> Iterator[Problem]:
    config = view.config
    path = f"models.{view.name}.train"
    for setting in BALANCED:
        if not getattr(view.train, setting):
            continue
        if not config.experts:
            law = f"`{view.name}` is not a mixture: it has no experts to balance ({path}.{setting})"
            yield Problem("balance", law, None, (), f"leave out {path}.{setting}")
        elif setting == "router_bias_update_rate" and not config.biased_choice:
            law = f"the routers of `{view.name}`, a {config.model_type}, choose experts without a bias "
            law += f"({path}.{setting})"
            remedy = f"leave out {path}.{setting}; {path}.router_aux_loss_coef balances them"
            yield Problem("balance", law, None, (), remedy)


def _devices_serve_8_bits(view: SizedView) -> Iterator[Problem]:
    serve = view.model.serve
    if not serve or not serve.quantization:
        return
    if view.config is None:
        reason = "the sizes of its layers are not known"
    elif view.plan.device != "cuda":
        reason = "that takes Hopper GPUs"
    else:
        return
    law = f"`{view.name}` can't be served in {serve.quantization}: {reason}"
    yield Problem("quantization", law, None, (), f"leave out {serve.setting_name(view.name, 'quantization')}")


def _serves_as_its_size_allows(view: SizedView) -> Iterator[Problem]:
    """A serve engine divides and quantizes only what a model of known size has."""
    if view.model.serve and view.config:
        served = ServeSizeView(view.plan, view.name, view.model.serve, view.config)
        for law in SERVE_SIZE_LAWS:
            yield from law(served)


def _servers_deal_out_experts(view: ServeSizeView) -> Iterator[Problem]:
    devices = view.serve.expert_parallel
    if devices == 1:
        return
    experts = view.config.experts
    if experts and experts % devices == 0:
        return
    reason = f"has {experts} experts" if experts else "is not a mixture of experts"
    law = f"`{view.name}` {reason}, which can't be dealt out to {devices} devices "
    law += f"({view.serve.setting_name(view.name, 'expert_parallel')})"
    fitting = [size for size in divisors(experts or 1) if int(size) <= devices]
    yield Problem("expert-parallel", law, None, tuple(fitting))


def _attention_has_copies(view: ServeSizeView) -> Iterator[Problem]:
    family = view.config.model_type
    if view.serve.attention_replicas == 1 or family in REPLICATED:
        return
    law = f"SGLang has no copies of attention for `{view.name}`, a {family} "
    law += f"({view.serve.setting_name(view.name, 'attention_replicas')})"
    yield Problem("attention-replicas", law, None, (), "leave it out: tensor_parallel alone")


def _layers_have_8_bit_blocks(view: ServeSizeView) -> Iterator[Problem]:
    serve = view.serve
    if not serve.quantization or view.plan.device != "cuda":
        return
    for name, count in _columns_on_device(serve, view.config).items():
        if count % FP8_BLOCK:
            path = serve.setting_name(view.name, "quantization")
            law = f"the {name} of `{view.name}`, {count} on each device of a server, are no "
            law += f"blocks of {FP8_BLOCK} ({path}: {serve.quantization})"
            remedy = "let a server span fewer devices (serve.tensor_parallel), or leave out quantization"
            yield Problem("quantization", law, None, (), remedy)
            return


def _columns_on_device(serve: ServePlan, config: Config) -> dict[str, int]:
    """Return the columns of each kind of matrix that a device of a server has."""
    group = serve.tensor_parallel
    attention_group = group // serve.attention_replicas
    columns = {
        "columns of hidden states": config.hidden_size,
        "columns of queries": config.queries // attention_group,
        "columns of keys": config.keys // min(attention_group, config.key_heads),
    }
    is_sparse = [config.is_sparse(layer) for layer in range(config.num_hidden_layers)]
    if not all(is_sparse):
        columns["columns of the MLP"] = config.intermediate_size // group
    if any(is_sparse):
        columns["columns of an expert"] = config.expert_size // (group // serve.expert_parallel)
    return columns


TRAIN_SIZE_LAWS: tuple[Callable[[TrainSizeView], Iterator[Problem]], ...] = (
    _rows_can_be_shared,
    _layers_can_be_divided,
    _experts_can_be_divided,
    _experts_can_be_balanced,
)
SERVE_SIZE_LAWS: tuple[Callable[[ServeSizeView], Iterator[Problem]], ...] = (
    _servers_deal_out_experts,
    _attention_has_copies,
    _layers_have_8_bit_blocks,
)
SIZE_LAWS: tuple[Callable[[SizedView], Iterator[Problem]], ...] = (
    _reads_text_alone,
    _four_bits_are_of_linear_layers,
    _trains_as_its_size_allows,
    _devices_serve_8_bits,
    _serves_as_its_size_allows,
)
