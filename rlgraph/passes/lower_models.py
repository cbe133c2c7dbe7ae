"""Lower the models of a graph: those that some step needs, with their engines' settings settled.

What the graph leaves open of a serve engine is settled by ``SERVE_RULES``, one after the other:

    request_timeout     half of the schedule's timeout, so that a second try has as long
    options             those with which the engine says which experts it chose, or draws by a grammar
    lora                an adapter where the engine computes with one on another pool, or reads the frozen
                        weights of the train engine beside it; else merged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from rlgraph.engines.registry import GRAMMARS, SERVING, no_adapter, own_base, serving
from rlgraph.ir.graph import Call, Graph, Model, Node
from rlgraph.ir.plan import ModelPlan, ServePlan, TrainPlan
from rlgraph.records import dataclass
from rlgraph.syntax.model_settings import Optimizer, ServeSettings, Train

Engine = TypeVar("Engine", TrainPlan, ServePlan)


@dataclass(frozen=True)
class ServeUse:
    """The use of a model's serve engine: the calls on it, its train engine, and the timeout."""

    model: Model
    calls: Sequence[Call]  # of the nodes that run on the model
    train: TrainPlan | None
    shard: int  # devices that share one copy of the weights in the train engine
    timeout: float  # seconds that a step may take


def plan_models(graph: Graph, phases: Sequence[Graph]) -> dict[str, ModelPlan]:
    """Return the models that some step of training or evaluation needs, with the engines that hold them."""
    nodes: list[Node] = []
    for phase in phases:
        nodes += phase.nodes
    tokenizers = {node.tokenizer for node in nodes}
    on_engines = [node for node in nodes if node.call and node.op.engine]
    models = {}
    for name, model in graph.models.items():
        users = [node for node in on_engines if name in (node.model, node.of)]
        if users or name in tokenizers:
            models[name] = _plan_model(graph, model, users)
    return models


def _plan_model(graph: Graph, model: Model, users: Sequence[Node]) -> ModelPlan:
    """Return the plan of a model; ``users`` are the nodes that run on one of its engines."""
    engines = {node.op.engine for node in users}
    train = None
    if _needs_train_engine(model, engines):
        train = _on_pool(TrainPlan, model.spec.train, graph.engines[f"{model.name}.train"])
    serve = None
    if "serve" in engines:
        calls = [node.called for node in users if node.model == model.name]
        serve = _plan_serve(graph, model, train, calls)
    return ModelPlan(
        path=model.path,
        head=model.spec.head,
        frozen=model.spec.frozen,
        optimizer=_optimizer(graph, model),
        train=train,
        serve=serve,
        rate=model.rate,
        config=model.spec.config,
        trust_remote_code=model.spec.trust_remote_code,
    )


def _plan_serve(graph: Graph, model: Model, train: TrainPlan | None, calls: Sequence[Call]) -> ServePlan:
    """Return the serve engine of a model with what the graph leaves open settled."""
    shard = 1
    if train:
        shard = train.shard or graph.devices[train.pool]
    use = ServeUse(model, calls, train, shard, graph.schedule.timeout)
    serve = _on_pool(ServePlan, model.serve, graph.engines[f"{model.name}.serve"])
    for rule in SERVE_RULES:
        serve = rule(serve, use)
    return serve


def _needs_train_engine(model: Model, engines: Set[str | None]) -> bool:
    """Return whether a model needs a train engine: to train, to score, or to give a serve engine weights."""
    if "train" in engines:
        return True
    takes_weights = bool(SERVING[model.spec.serve.engine].paths)
    return "serve" in engines and takes_weights


def _on_pool(kind: type[Engine], spec: Train | ServeSettings, pool: str) -> Engine:
    """Return an engine with its pool; not validated again, since a value may still be open."""
    return kind.model_construct(**{**dict(spec), "pool": pool})


def with_timeout(serve: ServePlan, use: ServeUse) -> ServePlan:
    """Return a serve engine whose requests have half as long as a step, unless the graph says how long."""
    takes_timeout = "request_timeout" in serving(serve).options
    if not takes_timeout or serve.request_timeout is not None:
        return serve
    return serve.model_copy(update={"request_timeout": use.timeout / 2})


def with_routing(serve: ServePlan, use: ServeUse) -> ServePlan:
    """Return a serve engine that says which experts it chose, where a node writes them."""
    writes_experts = any(call.value("routing") for call in use.calls)
    if not writes_experts:
        return serve
    needed = serving(serve).routing or {}
    return serve.model_copy(update={"options": {**serve.options, **needed}})


def with_grammar(serve: ServePlan, use: ServeUse) -> ServePlan:
    """Return a serve engine that draws texts of a grammar, where a node asks for such.

    The graph's options go before the engine's.
    """
    asks_for_grammar = any(_has_grammar(call) for call in use.calls)
    if not asks_for_grammar:
        return serve
    needed = serving(serve).grammars or {}
    return serve.model_copy(update={"options": {**needed, **serve.options}})


def _has_grammar(call: Call) -> bool:
    return any(call.attributes.get(key) is not None for key in GRAMMARS)


def with_adapter(serve: ServePlan, use: ServeUse) -> ServePlan:
    """Return a serve engine that says how it gets an adapter that trains: merged, or beside its weights."""
    train = use.train
    if train is None or train.lora is None:
        return serve
    if use.model.spec.frozen or serve.lora:  # nothing trains, or the graph says it
        return serve
    if train.pool == serve.pool:
        takes_adapter = not own_base(serve, train, use.shard)
    elif train.lora.quantize:
        takes_adapter = False  # the weights that it reads from files are not those in 4 bits
    else:
        takes_adapter = bool(serving(serve).adapters) and not no_adapter(serve, train.lora)
    return serve.model_copy(update={"lora": "adapter" if takes_adapter else "merged"})


SERVE_RULES: tuple[Callable[[ServePlan, ServeUse], ServePlan], ...] = (
    with_timeout,
    with_routing,
    with_grammar,
    with_adapter,
)


def _optimizer(graph: Graph, model: Model) -> Optimizer | None:
    """Return an optimizer's settings; a schedule without an end ends with the run."""
    spec = model.spec.optimizer
    if spec is None or model.spec.frozen:
        return None
    if spec.total_steps:
        return spec
    warms_up_by_share = isinstance(spec.warmup_steps, float)
    if spec.schedule == "constant" and not warms_up_by_share:
        return spec  # it depends on no end
    steps = graph.optimizer_steps(model.name)
    if steps is None:
        return spec
    return spec.model_copy(update={"total_steps": steps})
