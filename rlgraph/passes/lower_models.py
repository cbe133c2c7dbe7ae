"""Lower the models of a graph: those that some step needs, with their engines' settings settled.

What the graph leaves open of a serve engine is settled by ``SERVE_RULES``, one after the other:

    request_timeout     half of the schedule's timeout, so that a second try has as long
    options             those with which the engine says which experts it chose, or draws by a grammar
    lora                an adapter where the engine computes with one on another pool, else merged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlgraph.engines.registry import GRAMMARS, SERVING, no_adapter, serving
from rlgraph.ir.graph import Call, Graph, Model, Node
from rlgraph.ir.plan import ModelPlan, ServePlan, TrainPlan
from rlgraph.syntax.model_settings import Optimizer, ServeSettings, Train

Engine = TypeVar("Engine", TrainPlan, ServePlan)


@dataclass(frozen=True)
class ServeUse:
    """How a model is served: by which calls, beside which train engine, within which timeout."""

    model: Model
    calls: Sequence[Call]  # of the nodes that run on the model
    train: TrainPlan | None
    timeout: float  # seconds that a step may take


def plan_models(graph: Graph, phases: Sequence[Graph]) -> dict[str, ModelPlan]:
    """Return the models that some step of training or evaluation needs, with the engines that hold them."""
    nodes = [node for phase in phases for node in phase.nodes]
    tokenizers = {node.tokenizer for node in nodes}
    models = {}
    for name, model in graph.models.items():
        engines = _engines_used(name, nodes)
        if not engines and name not in tokenizers:
            continue
        train = _train_engine(graph, model) if _needs_train_engine(model, engines) else None
        serve = None
        if "serve" in engines:
            calls = [node.called for node in nodes if node.model == name and _engine_of(node)]
            use = ServeUse(model, calls, train, graph.schedule.timeout)
            serve = _serve_engine(graph, use)
        models[name] = ModelPlan(
            path=model.path,
            head=model.spec.head,
            frozen=model.spec.frozen,
            optimizer=None if model.spec.frozen else _optimizer(graph, model),
            train=train,
            serve=serve,
            rate=model.rate,
            config=model.spec.config,
            trust_remote_code=model.spec.trust_remote_code,
        )
    return models


def _engine_of(node: Node) -> str:
    """Return the engine that a node of the user runs on; "" where it needs none."""
    return (node.op.engine or "") if node.call else ""


def _engines_used(model: str, nodes: Sequence[Node]) -> set[str]:
    """Return the engines of a model that nodes run on."""
    users = [node for node in nodes if model in (node.model, node.of)]
    return {_engine_of(node) for node in users} - {""}


def _needs_train_engine(model: Model, engines: set[str]) -> bool:
    """Return whether a model needs a train engine: to train, to score, or to give a serve engine weights."""
    if "train" in engines:
        return True
    return bool(engines) and bool(SERVING[model.spec.serve.engine].paths)


def _train_engine(graph: Graph, model: Model) -> TrainPlan:
    return _on_pool(TrainPlan, model.spec.train, graph.engines[f"{model.name}.train"])


def _serve_engine(graph: Graph, use: ServeUse) -> ServePlan:
    serve = _on_pool(ServePlan, use.model.serve, graph.engines[f"{use.model.name}.serve"])
    for rule in SERVE_RULES:
        serve = rule(serve, use)
    return serve


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
    if not any(call.value("routing") for call in use.calls):
        return serve
    return _with_options(serve, {**serve.options, **(serving(serve).routing or {})})


def with_grammar(serve: ServePlan, use: ServeUse) -> ServePlan:
    """Return a serve engine that draws texts of a grammar, where a node asks for such; the graph's options
    go before the engine's."""
    if not any(_has_grammar(call) for call in use.calls):
        return serve
    return _with_options(serve, {**(serving(serve).grammars or {}), **serve.options})


def _has_grammar(call: Call) -> bool:
    return any(call.attributes.get(key) is not None for key in GRAMMARS)


def _with_options(serve: ServePlan, options: Mapping[str, str | bool | int | float]) -> ServePlan:
    return serve.model_copy(update={"options": options})


def with_adapter(serve: ServePlan, use: ServeUse) -> ServePlan:
    """Return a serve engine that says how it gets an adapter that trains: merged, or beside its weights."""
    train = use.train
    if train is None or train.lora is None or use.model.spec.frozen or serve.lora:
        return serve
    keeps_adapter = bool(serving(serve).adapters) and not no_adapter(serve, train.lora)
    is_elsewhere = train.pool != serve.pool
    return serve.model_copy(update={"lora": "adapter" if keeps_adapter and is_elsewhere else "merged"})


SERVE_RULES: tuple[Callable[[ServePlan, ServeUse], ServePlan], ...] = (
    with_timeout,
    with_routing,
    with_grammar,
    with_adapter,
)


def _optimizer(graph: Graph, model: Model) -> Optimizer | None:
    """Return an optimizer's settings; a schedule without an end ends with the run."""
    spec, steps = model.spec.optimizer, graph.optimizer_steps(model.name)
    if spec is None or spec.total_steps or steps is None:
        return spec
    warms_up_by_share = isinstance(spec.warmup_steps, float)
    if spec.schedule == "constant" and not warms_up_by_share:
        return spec
    return spec.model_copy(update={"total_steps": steps})
