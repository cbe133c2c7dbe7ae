"""Binds a model: validates its section, also by what its engines take, and settles it for the devices."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from rlgraph.engines.registry import BALANCED, EMBEDDED, REFUSED, SERVERS, SERVING, no_adapter, takers
from rlgraph.engines.sglang_options import WITHIN
from rlgraph.frontend.bind_call import resolved
from rlgraph.ir.graph import Model, Node
from rlgraph.ir.schedules import rate_course
from rlgraph.syntax.model_settings import EXPERTS, ModelSection, Serve, Train
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder, validate
from rlgraph.variables import with_values

# fields of a config.json that decide which weights there are, and of what shapes
SHAPING = frozenset(
    {"model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"}
    | {"num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts"}
    | {"n_routed_experts", "n_shared_experts", "moe_intermediate_size", "tie_word_embeddings"}
    | {"decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace"}
    | {"attention_bias", "mlp_bias", "kv_lora_rank", "q_lora_rank", "quantization_config"}
)
GROUPED = 8  # numbers in the 16 bytes of which rows are multiples in a grouped product (torch), in bfloat16
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*$")


def bind_model(name: str, tree: Tree, device: str, binder: Binder) -> Model | None:
    """Return a model, or None with the problems noted and its name among the broken ones."""
    tree, rate = rate_course(tree, f"models.{name}", binder)
    spec = validate(ModelSection, tree, f"models.{name}", binder)
    if spec is None:
        binder.broken.add(name)
        return None
    spec = on_device(spec, device)
    if not spec.frozen and spec.optimizer is None:
        law = f"model `{name}` has no optimizer, so it can't be trained"
        remedy = "give it `optimizer: {lr: 1e-6}`, or `frozen: true` if it is only read"
        binder.problem("no-optimizer", law, tree.key, remedy=remedy)
    _offloads(name, spec, tree, binder)
    _trains(name, spec, tree, binder)
    _balances(name, spec, tree, binder)
    for field in sorted(SHAPING & {*spec.config}):
        law = f"`models.{name}.config.{field}` changes the shapes of weights, which the model's files have"
        binder.problem("config-shape", law, tree.at(("config", field)).key, remedy=f"leave out {field}")
    _serves(name, spec, tree, binder)
    path = resolved(spec.path, tree.items["path"].mark)
    if HUB_ID.match(with_values(spec.path)) and not os.path.exists(with_values(path)):
        path = spec.path
    return Model(name, path, spec, tree.key or tree.mark, rate)


def on_device(spec: ModelSection, device: str) -> ModelSection:
    """Return a model with the data types and the engine that are ``auto`` settled for ``cuda`` or ``cpu``.

    Example:
        >>> model = on_device(ModelSection(path="some/model"), "cuda")
        >>> model.serve.engine, model.serve.dtype, model.train.dtype
        ('sglang', 'bfloat16', 'bfloat16')
    """
    serve, train = spec.serve, spec.train
    dtype = "bfloat16" if device == "cuda" else "float32"
    engine = SERVERS if device == "cuda" or any(not_default(serve)) else EMBEDDED
    auto = {"engine": engine, "dtype": dtype}
    serve = serve.model_copy(update={key: auto[key] for key in auto if getattr(serve, key) == "auto"})
    settled = {"dtype": dtype} if train.dtype == "auto" else {}
    again = {"recompute": True} if train.activation_offload and train.recompute == "auto" else {}
    train = train.model_copy(update=settled | again)
    return spec.model_copy(update={"serve": serve, "train": train})


def not_default(serve: Serve) -> Iterator[str]:
    """Yield the keys that not every engine takes, where they have another value than by default."""
    default = Serve()
    yield from (key for key in REFUSED if getattr(serve, key) != getattr(default, key))


def _offloads(name: str, spec: ModelSection, tree: Tree, binder: Binder) -> None:
    """Check that a model has what its train section puts on the host."""
    if spec.train.activation_offload and (spec.frozen or not spec.train.recompute):
        law = f"model `{name}` is frozen: nothing waits for a backward pass, on the device or on the host"
        if not spec.frozen:
            law = f"what waits on the host is what recompute keeps of each layer; of `{name}` it is false"
        remedy = f"leave out models.{name}.train.activation_offload"
        remedy += "" if spec.frozen else f", or set models.{name}.train.recompute=true"
        binder.problem("offload", law, tree.at(("train", "activation_offload")).key, remedy=remedy)
    if spec.train.optimizer_offload and (spec.frozen or spec.train.lora):
        law = f"model `{name}` is frozen: it has no optimizer that could be on the host"
        if not spec.frozen:
            law = f"the optimizer of `{name}` is of its adapters alone, and too small to be on the host"
        mark = tree.at(("train", "optimizer_offload")).key
        binder.problem("offload", law, mark, remedy=f"leave out models.{name}.train.optimizer_offload")


def _trains(name: str, spec: ModelSection, tree: Tree, binder: Binder) -> None:
    """Check that the optimizer and the head of a model go with what trains, and with what comes out."""
    path, optimizer = f"models.{name}", tree.get("optimizer")
    muon = bool(spec.optimizer and spec.optimizer.kind == "muon")
    if optimizer and not muon and (momentum := optimizer.get("momentum")):
        law = f"`{path}.optimizer.momentum` is of muon; the optimizer is adamw, whose averages have `betas`"
        remedy = f"set: {{{path}.optimizer.kind: muon}}, or leave out momentum"
        binder.problem("optimizer", law, momentum.key, remedy=remedy)
    against = {
        "lora": (
            "steps are orthogonal matrices",
            "trains two factors of a matrix, whose product takes no such step",
        ),
        "optimizer_offload": ("matrices are orthogonalised on devices", "puts AdamW on the host"),
        "tensor_parallel": ("matrices are orthogonalised whole", "leaves a device parts of them"),
    }
    for key, (whose, does) in against.items():
        if muon and getattr(spec.train, key) != getattr(Train(), key):
            law = f"`{path}.optimizer` is muon, whose {whose}, and `{path}.train.{key}` {does}"
            remedy = f"set: {{{path}.optimizer.kind: adamw}}, or leave out {key}"
            binder.problem("optimizer", law, tree.at(("optimizer", "kind")).key, remedy=remedy)
    lora = spec.train.lora
    if lora and lora.rank % GROUPED and any(target.startswith(EXPERTS) for target in lora.targets):
        law = f"`{path}.train.lora` adapts experts, whose products are grouped: their rank is a multiple of "
        law += f"{GROUPED}, not {lora.rank}"
        remedy = f"set: {{{path}.train.lora.rank: {-(-lora.rank // GROUPED) * GROUPED}}}"
        binder.problem("expert-adapters", law, tree.at(("train", "lora", "rank")).key, remedy=remedy)
    if spec.head == "value" and spec.train.head_dtype:
        law = f"`{path}.train.head_dtype` is of logits, and model `{name}` has a value head"
        mark = tree.at(("train", "head_dtype")).key
        binder.problem("head-dtype", law, mark, remedy="leave out head_dtype")


def _balances(name: str, spec: ModelSection, tree: Tree, binder: Binder) -> None:
    """Check that routers whose load is to be balanced train, and are not compiled."""
    path = f"models.{name}"
    for key in (key for key in BALANCED if getattr(spec.train, key)):
        law = remedy = ""
        if spec.frozen:
            law, remedy = f"model `{name}` is frozen: nothing balances its experts", f"leave out {key}"
        elif spec.train.compile:
            law = f"layers of `{name}` are compiled, and say nothing of the experts that they choose"
            remedy = f"set: {{{path}.train.compile: false}}, or leave out {key}"
        elif spec.train.lora and key == "router_bias_update_rate":
            law = f"`{name}` trains an adapter beside weights that stay, and a router's bias is one of those"
            remedy = f"leave out {path}.train.{key}"
        if law:
            binder.problem("balance", law, tree.at(("train", key)).key, remedy=remedy)


def _serves(name: str, spec: ModelSection, tree: Tree, binder: Binder) -> None:
    """Check that a model's serve section has what its engine needs, and nothing that it does not take."""
    serve, engine, path = spec.serve, SERVING[spec.serve.engine], f"models.{name}.serve"
    for key in not_default(serve):
        if key not in engine.options:
            law = f"the engine {serve.engine} takes no `{path}.{key}`; {' or '.join(takers(key))} does"
            remedy = f"set: {{{path}.engine: {takers(key)[0]}}}, or leave out {key}"
            binder.problem("serve-option", law, tree.at(("serve", key)).key, remedy=remedy)
    for key in engine.needs:
        if not getattr(serve, key):
            law = f"the engine {serve.engine} needs `{path}.{key}`, which the graph does not give"
            chosen = tree.at(("serve", "engine"))
            binder.problem("serve-option", law, chosen.mark, remedy=f"give {path}.{key}")
    if not engine.paths and not spec.frozen:
        law = f"model `{name}` is trained, and no weights can be brought to the engine {serve.engine}"
        remedy = f"say models.{name}.frozen=true if it is only read, or choose another {path}.engine"
        binder.problem("engine-frozen", law, tree.at(("serve", "engine")).mark, remedy=remedy)
    for key in ("tensor_parallel", *WITHIN, "quantization") if serve.addresses else ():
        if getattr(serve, key) != getattr(Serve(), key):
            law = f"`{path}.addresses` are of servers that run already, with a {key} of their own"
            binder.problem("addresses", law, tree.at(("serve", key)).key, remedy=f"leave out {key}")
    for key in WITHIN:
        if serve.tensor_parallel % getattr(serve, key):
            law = f"the {serve.tensor_parallel} devices of a server can't be shared out by {path}.{key}: "
            law += f"{getattr(serve, key)}"
            remedy = f"let `{path}.tensor_parallel` be a multiple of it"
            binder.problem("tensor-parallel", law, tree.at(("serve", key)).key, remedy=remedy)
    if serve.addresses and engine.paths and (spec.config or spec.trust_remote_code):
        key = "config" if spec.config else "trust_remote_code"
        law = f"`{path}.addresses` are of servers that run already: `models.{name}.{key}` can't reach them"
        remedy = f"let the run start its servers, or leave out {key}"
        binder.problem("addresses", law, tree.at((key,)).key, remedy=remedy)
    if serve.lora:
        law = f"model `{name}` trains no adapter (models.{name}.train.lora)"
        if spec.train.lora and not spec.frozen:
            beside = serve.lora == "adapter"
            law = no_adapter(serve, spec.train.lora) if beside else ""
        if law:
            law = f"`{path}.lora` is {serve.lora}, but {law}"
            mark = tree.at(("serve", "lora")).key
            remedy = f"set {path}.lora=merged: a sync then sends all weights, with what trains in them"
            if not spec.train.lora or spec.frozen:
                remedy = f"leave out {path}.lora"
            binder.problem("serve-lora", law, mark, remedy=remedy)
    _options(path, serve, tree, binder)


def _options(path: str, serve: Serve, tree: Tree, binder: Binder) -> None:
    """Check that a graph gives an engine no setting that the run decides, or that the engine can't take."""
    engine = SERVING[serve.engine]
    for option in serve.options:
        mark = tree.at(("serve", "options", option)).key
        if engine.own_servers and serve.addresses:
            law = f"`{path}.options.{option}` is of servers that the run starts; "
            law += "those of addresses run already"
            binder.problem("serve-option", law, mark, remedy="start them with it, and leave it out here")
        elif option in engine.owned:
            law = f"`{path}.options.{option}` is not the graph's to give: {engine.owned[option]}"
            binder.problem("serve-option", law, mark, remedy=f"leave out {option}")


def reads_own_weights(nodes: Iterable[Node], models: Mapping[str, Model], binder: Binder) -> None:
    """Check that nothing scores with a model whose serve engine has weights that the run does not hold."""
    for node in nodes:
        model = models.get(node.model or "")
        if model and node.call and node.op.engine == "train" and not SERVING[model.spec.serve.engine].paths:
            law = f"node `{node.name}` reads the weights of `{model.name}`; the engine "
            law += f"{model.spec.serve.engine} generates with weights of its own, which the run does not hold"
            remedy = f"choose another models.{model.name}.serve.engine, or generate with another model"
            binder.problem("engine-frozen", law, node.mark, remedy=remedy)


def reads_alike(models: Mapping[str, Model], binder: Binder) -> None:
    """Check that models of one path, such as a policy and its reference, are read in one way."""
    first: dict[str, Model] = {}
    for model in models.values():
        other = first.setdefault(model.path, model)
        for key in ("config", "trust_remote_code"):
            if getattr(model.spec, key) != getattr(other.spec, key):
                law = f"`{model.name}` and `{other.name}` are of one path, and not alike in {key}: "
                law += "what one scores would be another model's"
                remedy = f"give models.{model.name}.{key} and models.{other.name}.{key} the same value"
                binder.problem("unlike-files", law, model.mark, remedy=remedy)
