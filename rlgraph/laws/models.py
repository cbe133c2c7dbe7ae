"""Laws of a model's section: what its optimizer, its train engine and its serve engine go with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from rlgraph.engines.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from rlgraph.engines.registry import BALANCED, REFUSED, SERVING, no_adapter, takers
from rlgraph.engines.sglang_options import WITHIN
from rlgraph.errors import Problem, divisors
from rlgraph.ir.graph import Model
from rlgraph.laws.views import BoundView, ModelView, is_changed
from rlgraph.syntax.model_settings import EXPERTS

# fields of a config.json that decide which weights there are, and of what shapes
SHAPING = frozenset(
    {"model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"}
    | {"num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts"}
    | {"n_routed_experts", "n_shared_experts", "moe_intermediate_size", "tie_word_embeddings"}
    | {"decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace"}
    | {"attention_bias", "mlp_bias", "kv_lora_rank", "q_lora_rank", "quantization_config"}
)
GROUPED = 8  # numbers in the 16 bytes of which rows are multiples in a grouped product (torch), in bfloat16
# what devices may divide -> its name, and the settings that this excludes
DIVIDED = {
    "tensor_parallel": ("layers", ("shard", "sequence_parallel", "lora", "compile")),
    "expert_parallel": ("experts", ("tensor_parallel", "lora", "compile")),
}
# engine -> the settings that are sizes of its groups of devices
GROUP_SIZES = {
    "serve": ("tensor_parallel",),
    "train": ("shard", "sequence_parallel", "tensor_parallel", "expert_parallel"),
}


def _needs_optimizer(view: ModelView) -> Iterator[Problem]:
    if view.spec.frozen or view.spec.optimizer is not None:
        return
    law = f"model `{view.name}` has no optimizer, so it can't be trained"
    remedy = "give it `optimizer: {lr: 1e-6}`, or `frozen: true` if it is only read"
    yield Problem("no-optimizer", law, view.tree.key, (), remedy)


def _offloads_activations(view: ModelView) -> Iterator[Problem]:
    train = view.spec.train
    if not train.activation_offload:
        return
    remedy = f"leave out {view.path}.train.activation_offload"
    if view.spec.frozen:
        law = f"model `{view.name}` is frozen: nothing waits for a backward pass, "
        law += "on the device or on the host"
    elif not train.recompute:
        law = f"what waits on the host is what recompute keeps of each layer; of `{view.name}` it is false"
        remedy += f", or set {view.path}.train.recompute=true"
    else:
        return
    yield Problem("offload", law, view.key("train", "activation_offload"), (), remedy)


def _offloads_optimizer(view: ModelView) -> Iterator[Problem]:
    train = view.spec.train
    if not train.optimizer_offload:
        return
    if view.spec.frozen:
        law = f"model `{view.name}` is frozen: it has no optimizer that could be on the host"
    elif train.lora:
        law = f"the optimizer of `{view.name}` is of its adapters alone, and too small to be on the host"
    else:
        return
    remedy = f"leave out {view.path}.train.optimizer_offload"
    yield Problem("offload", law, view.key("train", "optimizer_offload"), (), remedy)


def _settings_of_its_optimizer(view: ModelView) -> Iterator[Problem]:
    """A model's optimizer section has no setting that only another optimizer reads."""
    section = view.tree.get("optimizer")
    if section is None:
        return
    chosen = _optimizer(view)
    for another, kind in OPTIMIZERS.items():
        if another == chosen:
            continue
        for key in kind.settings:
            setting = section.get(key)
            if not setting:
                continue
            law = f"`{view.path}.optimizer.{key}` is of {another}; the optimizer is {chosen}, "
            law += OPTIMIZERS[chosen].averages
            remedy = f"set: {{{view.path}.optimizer.kind: {another}}}, "
            remedy += f"or leave out {view.path}.optimizer.{key}"
            yield Problem("optimizer", law, setting.key, (), remedy)


def _optimizer_goes_with_engine(view: ModelView) -> Iterator[Problem]:
    """A model's train section has no setting that its optimizer excludes."""
    chosen = _optimizer(view)
    for setting, (optimizer_does, setting_does) in OPTIMIZERS[chosen].excludes.items():
        if is_changed(view.spec.train, setting):
            law = f"`{view.path}.optimizer` is {chosen}, whose {optimizer_does}, "
            law += f"and `{view.path}.train.{setting}` {setting_does}"
            remedy = f"set: {{{view.path}.optimizer.kind: {DEFAULT_OPTIMIZER}}}, "
            remedy += f"or leave out {view.path}.train.{setting}"
            yield Problem("optimizer", law, view.key("optimizer", "kind"), (), remedy)


def _optimizer(view: ModelView) -> str:
    optimizer = view.spec.optimizer
    return optimizer.kind if optimizer else DEFAULT_OPTIMIZER


def _rank_of_experts(view: ModelView) -> Iterator[Problem]:
    lora = view.spec.train.lora
    if lora is None or lora.rank % GROUPED == 0:
        return
    if not any(target.startswith(EXPERTS) for target in lora.targets):
        return
    path = f"{view.path}.train.lora"
    law = f"`{path}` adapts experts, whose products are grouped: their rank is a multiple of "
    law += f"{GROUPED}, not {lora.rank}"
    rounded_up = -(-lora.rank // GROUPED) * GROUPED
    remedy = f"set: {{{path}.rank: {rounded_up}}}"
    yield Problem("expert-adapters", law, view.key("train", "lora", "rank"), (), remedy)


def _four_bits(view: ModelView) -> Iterator[Problem]:
    """Frozen weights lie in 4 bits where one engine reads them in the forms that it knows."""
    train, serve = view.spec.train, view.serve
    if train.lora is None or train.lora.quantize is None:
        return
    path = f"{view.path}.train.lora.quantize"
    remedy = f"leave out {path}"
    if view.spec.head == "value":
        law = f"`{path}` is of language models, and `{view.name}` has a value head"
    elif train.compile:
        law = f"`{path}` holds weights in 4 bits, and compiled layers can't compute with them"
        remedy += f", or set {view.path}.train.compile=false"
    elif serve.lora == "adapter" and "base" not in SERVING[serve.engine].offered:
        law = f"the engine {serve.engine} reads the weights below an adapter from files, where they are not "
        law += f"those in 4 bits beside which it trains (`{path}`)"
        remedy = f"leave out {view.path}.serve.lora: a sync then sends weights with the adapter added"
    else:
        return
    yield Problem("four-bits", law, view.key("train", "lora", "quantize"), (), remedy)


def _head_has_logits(view: ModelView) -> Iterator[Problem]:
    if view.spec.head == "value" and view.spec.train.head_dtype:
        remedy = f"leave out {view.path}.train.head_dtype"
        law = f"`{view.path}.train.head_dtype` is of logits, and model `{view.name}` has a value head"
        yield Problem("head-dtype", law, view.key("train", "head_dtype"), (), remedy)


def _routers_train(view: ModelView) -> Iterator[Problem]:
    """Routers whose load is to be balanced train, and their layers are not compiled."""
    train = view.spec.train
    for setting in BALANCED:
        if not getattr(train, setting):
            continue
        if view.spec.frozen:
            law = f"model `{view.name}` is frozen: nothing balances its experts"
            remedy = f"leave out {view.path}.train.{setting}"
        elif train.compile:
            law = f"layers of `{view.name}` are compiled, and say nothing of the experts that they choose"
            remedy = f"set: {{{view.path}.train.compile: false}}, or leave out {view.path}.train.{setting}"
        elif train.lora and setting == "router_bias_update_rate":
            law = f"`{view.name}` trains an adapter beside weights that stay, "
            law += "and a router's bias is one of those"
            remedy = f"leave out {view.path}.train.{setting}"
        else:
            continue
        yield Problem("balance", law, view.key("train", setting), (), remedy)


def _config_keeps_shapes(view: ModelView) -> Iterator[Problem]:
    for field in sorted(SHAPING & view.spec.config.keys()):
        law = f"`{view.path}.config.{field}` changes the shapes of weights, which the model's files have"
        remedy = f"leave out {view.path}.config.{field}"
        yield Problem("config-shape", law, view.key("config", field), (), remedy)


def _engine_takes_settings(view: ModelView) -> Iterator[Problem]:
    serve = view.spec.serve
    for setting in REFUSED:
        if setting in SERVING[serve.engine].options or not is_changed(serve, setting):
            continue
        able = takers(setting)
        law = f"the engine {serve.engine} takes no `{view.path}.serve.{setting}`; {' or '.join(able)} does"
        remedy = f"set: {{{view.path}.serve.engine: {able[0]}}}, or leave out {view.path}.serve.{setting}"
        yield Problem("serve-option", law, view.key("serve", setting), (), remedy)


def _no_section_of_another_engine(view: ModelView) -> Iterator[Problem]:
    chosen = view.spec.serve.engine
    for another, record in SERVING.items():
        if another == chosen:
            continue
        for setting in record.claims:
            if not is_changed(getattr(view.spec.serve, another), setting):
                continue
            path = f"{view.path}.serve.{another}.{setting}"
            law = f"the engine {chosen} takes no `{path}`, which is of {another}"
            remedy = f"set: {{{view.path}.serve.engine: {another}}}, or leave out {path}"
            yield Problem("serve-option", law, view.key("serve", another, setting), (), remedy)


def _engine_has_settings(view: ModelView) -> Iterator[Problem]:
    serve = view.serve
    for setting in SERVING[serve.engine].needs:
        if getattr(serve, setting):
            continue
        path = view.serve_path(setting)
        law = f"the engine {serve.engine} needs `{path}`, which the graph does not give"
        yield Problem("serve-option", law, view.value("serve", "engine"), (), f"give {path}")


def _engine_takes_weights(view: ModelView) -> Iterator[Problem]:
    engine = view.spec.serve.engine
    if SERVING[engine].paths or view.spec.frozen:
        return
    law = f"model `{view.name}` is trained, and no weights can be brought to the engine {engine}"
    remedy = f"say {view.path}.frozen=true if it is only read, or choose another {view.path}.serve.engine"
    yield Problem("engine-frozen", law, view.value("serve", "engine"), (), remedy)


def _running_servers_as_they_are(view: ModelView) -> Iterator[Problem]:
    serve = view.serve
    if not serve.addresses:
        return
    for setting in ("tensor_parallel", *WITHIN, "quantization"):
        if is_changed(serve, setting):
            law = f"`{view.serve_path('addresses')}` are of servers that run already, "
            law += f"with a {setting} of their own"
            remedy = f"leave out {view.serve_path(setting)}"
            yield Problem("addresses", law, view.serve_key(setting), (), remedy)


def _servers_share_out_devices(view: ModelView) -> Iterator[Problem]:
    serve = view.serve
    for setting in WITHIN:
        size = getattr(serve, setting)
        if serve.tensor_parallel % size:
            law = f"the {serve.tensor_parallel} devices of a server can't be shared out by "
            law += f"{view.serve_path(setting)}: {size}"
            remedy = f"let `{view.path}.serve.tensor_parallel` be a multiple of it"
            yield Problem("tensor-parallel", law, view.serve_key(setting), (), remedy)


def _running_servers_read_files(view: ModelView) -> Iterator[Problem]:
    """Servers that run already have read the model's files: settings of how they are read come too late."""
    spec = view.spec
    if not view.serve.addresses or not SERVING[spec.serve.engine].paths:
        return
    if spec.config:
        setting = "config"
    elif spec.trust_remote_code:
        setting = "trust_remote_code"
    else:
        return
    law = f"`{view.serve_path('addresses')}` are of servers that run already: `{view.path}.{setting}` can't "
    law += "reach them"
    remedy = f"let the run start its servers, or leave out {view.path}.{setting}"
    yield Problem("addresses", law, view.key(setting), (), remedy)


def _serves_adapter(view: ModelView) -> Iterator[Problem]:
    """A serve engine gets an adapter where one is trained, and holds it apart where it can."""
    serve, lora = view.serve, view.spec.train.lora
    if not serve.lora:
        return
    path = f"{view.path}.serve.lora"
    if lora is None or view.spec.frozen:
        reason = f"model `{view.name}` trains no adapter ({view.path}.train.lora)"
        remedy = f"leave out {path}"
    elif serve.lora == "adapter":
        reason = no_adapter(serve, lora)
        remedy = f"set {path}=merged: a sync then sends all weights, with what trains in them"
    else:
        return
    if reason:
        law = f"`{path}` is {serve.lora}, but {reason}"
        yield Problem("serve-lora", law, view.key("serve", "lora"), (), remedy)


def _options_are_free(view: ModelView) -> Iterator[Problem]:
    """A graph gives an engine no setting that the run decides, or that running servers can't take."""
    serve = view.serve
    engine = SERVING[serve.engine]
    owned = engine.owned() if serve.options else {}
    for option in serve.options:
        name = f"`{view.serve_path('options')}.{option}`"
        if engine.own_servers and serve.addresses:
            law = f"{name} is of servers that the run starts; those of addresses run already"
            remedy = "start them with it, and leave it out here"
        elif option in owned:
            law = f"{name} is not the graph's to give: {owned[option]}"
            remedy = f"leave out {option}"
        else:
            continue
        yield Problem("serve-option", law, view.serve_key("options", option), (), remedy)


MODEL_LAWS: tuple[Callable[[ModelView], Iterator[Problem]], ...] = (
    _needs_optimizer,
    _offloads_activations,
    _offloads_optimizer,
    _settings_of_its_optimizer,
    _optimizer_goes_with_engine,
    _rank_of_experts,
    _four_bits,
    _head_has_logits,
    _routers_train,
    _config_keeps_shapes,
    _engine_takes_settings,
    _no_section_of_another_engine,
    _engine_has_settings,
    _engine_takes_weights,
    _running_servers_as_they_are,
    _servers_share_out_devices,
    _running_servers_read_files,
    _serves_adapter,
    _options_are_free,
)


def _weights_are_readable(view: BoundView) -> Iterator[Problem]:
    """Nothing scores with a model whose serve engine has weights that the run does not hold."""
    for node in view.nodes:
        if node.op.engine != "train":
            continue
        model = view.models.get(node.model or "")
        if model is None:
            continue
        engine = model.spec.serve.engine
        if SERVING[engine].paths:
            continue
        law = f"node `{node.name}` reads the weights of `{model.name}`; the engine "
        law += f"{engine} generates with weights of its own, which the run does not hold"
        remedy = f"choose another models.{model.name}.serve.engine, or generate with another model"
        yield Problem("engine-frozen", law, node.mark, (), remedy)


def _one_path_read_alike(view: BoundView) -> Iterator[Problem]:
    """Models of one path, such as a policy and its reference, are read in one way."""
    by_path: dict[str, Model] = {}
    for model in view.models.values():
        twin = by_path.setdefault(model.path, model)
        for key in ("config", "trust_remote_code"):
            if getattr(model.spec, key) != getattr(twin.spec, key):
                law = f"`{model.name}` and `{twin.name}` are of one path, and not alike in {key}: "
                law += "what one scores would be another model's"
                remedy = f"give models.{model.name}.{key} and models.{twin.name}.{key} the same value"
                yield Problem("unlike-files", law, model.mark, (), remedy)


def _groups_fill_pools(view: BoundView) -> Iterator[Problem]:
    """The devices that share a copy of a model, or work on one batch, divide those of its pool."""
    used = {(node.model, node.op.engine) for node in view.nodes}
    for name, engine in product(view.models, GROUP_SIZES):
        pool = view.engines[f"{name}.{engine}"]
        if (name, engine) not in used or pool not in view.pools:
            continue
        devices = view.pools[pool]
        settings = getattr(view.models[name].spec, engine)
        for setting in GROUP_SIZES[engine]:
            size = getattr(settings, setting)
            if not size or devices % size == 0:
                continue
            law = f"pool `{pool}` has {devices} devices, which `{name}` can't share out "
            law += f"in groups of {size} (models.{name}.{engine}.{setting})"
            remedy = f"give one of {', '.join(divisors(devices))}, or the pool a multiple of {size}"
            mark = view.sections[name].at((engine, setting)).mark
            yield Problem(setting.replace("_", "-"), law, mark, (), remedy)


def _divided_alone(view: BoundView) -> Iterator[Problem]:
    """A model whose layers or experts are divided among devices asks for nothing that this excludes, and
    experts are divided within a copy."""
    for name, (setting, (divided, excluded)) in product(view.models, DIVIDED.items()):
        train = view.models[name].spec.train
        ranks = getattr(train, setting)
        path = f"models.{name}.train"
        mark = view.sections[name].at(("train", setting)).mark
        clashing = [key for key in excluded if is_changed(train, key)]
        if ranks > 1 and clashing:
            law = f"the {divided} of `{name}` are divided among {ranks} devices "
            law += f"({path}.{setting}), which can't be combined with {', '.join(clashing)}"
            remedy = f"leave out {path}.{clashing[0]}, or set {setting} to 1"
            yield Problem(setting.replace("_", "-"), law, mark, (), remedy)
        if divided == "experts" and train.shard and train.shard % ranks:
            law = f"`{name}` is sharded over {train.shard} devices ({path}.shard), which can't be shared out "
            law += f"in groups of {ranks} that divide its experts ({path}.{setting})"
            yield Problem("expert-parallel", law, mark, tuple(divisors(train.shard)))


BOUND_LAWS: tuple[Callable[[BoundView], Iterator[Problem]], ...] = (
    _weights_are_readable,
    _one_path_read_alike,
    _groups_fill_pools,
    _divided_alone,
)
