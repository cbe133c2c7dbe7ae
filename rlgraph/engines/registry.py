"""The serving and training engines: what each can do, what it needs, and where its code lies.

An engine is a package in `runtime/engines/` and a record here. No other file compares an engine's name: the
compiler asks the record, and a worker calls the builder that it names. Nothing here imports an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from typing import Protocol

from rlgraph.engines import sglang_options
from rlgraph.engines.serve_settings import OpenAISettings, SglangSettings
from rlgraph.records import dataclass
from rlgraph.section import Section

RUNTIME = "rlgraph.runtime.engines"
SIZES = {"dtype": "dtype", "max_rows": "max_rows"}
# keys of `models.NAME.serve` that an engine refuses if it does not take them; it ignores other keys
REFUSED = ("tensor_parallel",)


@dataclass(frozen=True)
class Serving:
    """An engine that generates.

    Attributes:
        builder: ``module:name`` of what makes the engine of one device, from the model's path, the parameters
            in ``options``, and what is named in ``offered``.
        offered: what a worker passes beside them: ``device``, ``pool`` (a process group), ``logs`` (a
            folder), ``keeps`` (whether a copy of the weights may stay on the host), ``transport`` (the path
            of its weight syncs, where it is the one that sends them to servers at addresses), ``adapter``
            (``models.NAME.train.lora``, where syncs bring it alone), ``base`` (the frozen weights beside it,
            where a train engine on the device holds them: the engine generates in the worker's process).
        sender: ``module:name`` of what brings weights to servers at addresses from a worker that trains, made
            of the addresses, the device, the path and ``sync_folder``.
        unfit: ``module:name`` of what says of a model's configuration why the engine can't run it.
        unfit_adapters: ``module:name`` of what says of it why the engine can't serve its adapters.
        paths: how a weight sync reaches it from a train engine on its own devices, and then from elsewhere;
            empty: it has weights of its own, so that its model is frozen and nothing else reads it.
    """

    about: str  # the words of ``serve.engine``'s description for it
    builder: str
    # keys of ``models.NAME.serve`` and of its own section that it takes -> the builder's parameters
    options: Mapping[str, str]
    settings: type[Section] | None = None  # its own section, ``models.NAME.serve.ENGINE``
    # keys of that section with which an engine that is ``auto`` is this one, and which another one refuses
    claims: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # settings that must be given
    offered: tuple[str, ...] = ("device",)
    sender: str = ""
    module: str = ""  # what must be importable for it; the extra of its name installs that
    preflight: str = ""  # ``module:name`` of what yields what is wrong with a section before a run
    unfit: str = ""
    unfit_adapters: str = ""
    paths: tuple[str, ...] = ()
    own_servers: bool = False  # its servers hold weights and cache from start to sleep
    paged: bool = True  # a sample takes the cache that it has so far; else each has room for the longest
    cuda_graphs: bool = True  # decoding is captured in CUDA graphs
    # ``options`` of which each turns CUDA graphs of decoding off
    without_graphs: Mapping[str, str | bool] = field(default_factory=dict)
    cached: int = 2**16  # tokens that one engine holds where memory is not planned
    owned: Callable[[], Mapping[str, str]] = dict  # settings that options may not give -> why
    # ``options`` with which it says which experts of a mixture it chose; None: it does not say
    routing: Mapping[str, bool] | None = None
    # ``options`` with which it draws texts of a regular expression or a JSON schema; None: it does not
    grammars: Mapping[str, str | int] | None = None
    # the linear layers whose adapters (LoRA) it serves beside weights, in groups that have them together
    adapters: tuple[frozenset[str], ...] = ()
    without_adapters: frozenset[str] = frozenset()  # settings of ``serve`` with which it loads none
    any_adapters: bool = False  # it serves adapters of any layers and experts


@dataclass(frozen=True)
class Training:
    """An engine that trains and scores: the ``module:name`` of its class, the keys of ``models.NAME.train``
    that it takes, and of what says of a model's files, a head and that section why it can't train the model.
    """

    builder: str
    options: tuple[str, ...]
    unfit: str


GRAMMARS = ("regex", "json_schema")  # attributes of an op that ask an engine for texts of a grammar
EMBEDDED, SERVERS = "transformers", "sglang"  # what ``engine: auto`` stands for
SERVING = {
    EMBEDDED: Serving(
        "in the worker",
        f"{RUNTIME}.transformers.engine:TransformersEngine",
        {**SIZES, "cache_tokens": "max_cached_tokens"},
        unfit=f"{RUNTIME}.transformers.load:unfit",
        paths=("memory", "broadcast", "disk"),
        paged=False,
        cuda_graphs=False,
        cached=2**19,
        routing={},
        offered=("device", "adapter", "base"),
        any_adapters=True,
    ),
    SERVERS: Serving(
        "in its own servers",
        f"{RUNTIME}.sglang.groups:sglang_engine",
        {
            **SIZES,
            "cache_tokens": "max_cached_tokens",
            "tensor_parallel": "group",
            "sync_folder": "sync_folder",
        }
        | {key: key for key in SglangSettings.model_fields},
        settings=SglangSettings,
        claims=(*sglang_options.WITHIN, "quantization", "addresses", "options"),
        offered=("device", "pool", "logs", "keeps", "transport", "adapter"),
        sender=f"{RUNTIME}.sglang.groups:sender",
        module="sglang",
        preflight=f"{RUNTIME}.sglang.preflight:problems",
        unfit=f"{RUNTIME}.sglang.preflight:unfit",
        unfit_adapters=f"{RUNTIME}.sglang.preflight:unfit_adapters",
        paths=("ipc", "broadcast", "disk"),
        own_servers=True,
        without_graphs={"disable_cuda_graph": True, "cuda_graph_backend_decode": "disabled"},
        owned=sglang_options.owned,
        routing={"enable_return_routed_experts": True},
        # else a model that likes blanks may fill a JSON text with them to its limit
        grammars={"grammar_backend": "xgrammar", "constrained_json_max_whitespace_cnt": 16},
        adapters=(
            frozenset({"q_proj", "k_proj", "v_proj"}),
            frozenset({"o_proj"}),
            frozenset({"gate_proj", "up_proj"}),
            frozenset({"down_proj"}),
        ),
        without_adapters=frozenset({"attention_replicas", "hosts", "quantization"}),
    ),
    "openai": Serving(
        "in servers that already run and return token ids and log-probs, for frozen models",
        f"{RUNTIME}.openai.engine:OpenAIEngine",
        {"max_rows": "max_rows"} | {key: key for key in OpenAISettings.model_fields},
        settings=OpenAISettings,
        claims=("addresses", "options"),
        needs=("addresses",),
        offered=("pool",),
        module="aiohttp",
        preflight=f"{RUNTIME}.openai.preflight:problems",
    ),
}
PASSES = (
    *("micro_tokens", "score_tokens", "reshard", "packing"),
    *("dtype", "head_dtype", "recompute", "lora", "compile"),
)
OFFLOADS = ("optimizer_offload", "activation_offload")  # what a train engine leaves to its host
BALANCED = ("router_aux_loss_coef", "router_bias_update_rate")  # what balances the experts of a mixture
TRAINING = {
    "fsdp": Training(
        f"{RUNTIME}.fsdp.engine:FsdpEngine.of",
        (*PASSES, *OFFLOADS, *BALANCED),
        f"{RUNTIME}.fsdp.preflight:unfit",
    ),
}


class ServeSection(Protocol):
    """The options of ``models.NAME.serve`` that choose its engine, and where that is."""

    @property
    def engine(self) -> str: ...
    @property
    def addresses(self) -> Sequence[str]: ...
    @property
    def options(self) -> Mapping[str, str | bool | int | float]: ...
    @property
    def dtype(self) -> str: ...


class TrainSection(Protocol):
    """The options of ``models.NAME.train`` by which it holds weights."""

    @property
    def dtype(self) -> str: ...


class AdapterSection(Protocol):
    """The options of ``models.NAME.train.lora`` that say which layers have adapters."""

    @property
    def targets(self) -> str | list[str]: ...


def no_adapter(serve: ServeSection, lora: AdapterSection) -> str:
    """Return why an engine can't serve adapters beside its weights, or nothing."""
    record = serving(serve)
    if record.any_adapters:
        return ""
    if not record.adapters:
        return f"the engine {serve.engine} has no adapters"
    if serve.addresses:
        return "servers at addresses hold weights that the run did not choose"
    conflicts = []
    for key in sorted(record.without_adapters):
        is_set = getattr(serve, key) not in (1, None)
        if is_set:
            conflicts.append(key)
    if conflicts:
        return f"the engine {serve.engine} loads no adapters where {' and '.join(conflicts)} is set"
    return _unserved_layers(serve.engine, record.adapters, lora.targets)


def _unserved_layers(engine: str, groups: Sequence[frozenset[str]], chosen: str | Sequence[str]) -> str:
    """Return why an engine can't serve adapters of the chosen layers, or nothing."""
    if chosen == "all-linear":
        return ""
    targets = {*chosen}
    unknown = sorted(targets.difference(*groups))
    if unknown:
        return f"the engine {engine} has no adapters of {', '.join(unknown)}"
    for group in groups:
        is_partial = bool(group & targets) and not group <= targets
        if is_partial:
            return f"adapters of {', '.join(sorted(group))} go together in the engine {engine}, all or none"
    return ""


def own_base(serve: ServeSection, train: TrainSection, shard: int) -> str:
    """Return why a serve engine can't read the frozen weights of a train engine on its device, or nothing.

    ``shard`` is how many devices share one copy of the weights in the train engine.
    """
    if "base" not in serving(serve).offered:
        return f"{serve.engine} has processes of its own"
    if serve.dtype != train.dtype:
        return f"train.dtype is {train.dtype} and serve.dtype {serve.dtype}"
    if shard > 1:
        return f"to train, {shard} devices share one copy (train.shard: 1 gives each a copy for both)"
    return ""


def serving(serve: ServeSection) -> Serving:
    """Return the record of the engine of a plan's serve section."""
    return SERVING[serve.engine]


def decodes_in_graphs(serve: ServeSection) -> bool:
    """Return whether an engine decodes by CUDA graphs, so that its kernels are not launched one by one."""
    engine = serving(serve)
    for option, value in engine.without_graphs.items():
        if serve.options.get(option) == value:
            return False
    return engine.cuda_graphs


def is_installed(name: str) -> bool:
    """Return whether what an engine needs is installed beside this rlgraph."""
    module = SERVING[name].module
    if not module:
        return True
    return find_spec(module) is not None


def takers(key: str) -> list[str]:
    """Return the engines that take a key of ``models.NAME.serve``."""
    return [name for name, engine in SERVING.items() if key in engine.options]


def has_own_setting(engine: str, key: str) -> bool:
    """Return whether a setting stands in an engine's own section."""
    settings = SERVING[engine].settings
    return settings is not None and key in settings.model_fields


def setting_path(engine: str, key: str) -> str:
    """Return where a setting of an engine stands below ``models.NAME.serve``.

    Example:
        >>> setting_path("sglang", "restarts"), setting_path("sglang", "max_rows")
        ('sglang.restarts', 'max_rows')
    """
    if has_own_setting(engine, key):
        return f"{engine}.{key}"
    return key
