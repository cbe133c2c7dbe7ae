"""Lower a graph that has passed all passes to the plan's records: steps, columns, functions and models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from rlgraph.engines.registry import GRAMMARS, SERVING, no_adapter
from rlgraph.ir.function import Function
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.intervals import count
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Plan, ServePlan, Step, TrainPlan
from rlgraph.ir.renumber import renumbered
from rlgraph.ir.steps import ONE, Version
from rlgraph.passes.refill import collects, members
from rlgraph.syntax.model_settings import Optimizer, Serve, Train

Engine = TypeVar("Engine", TrainPlan, ServePlan)


def make_plan(
    graph: Graph,
    evaluation: Graph | None,
    digest: str,
    device: str = "cpu",
) -> Plan:
    """Return the plan of a graph's iteration, and of an evaluation."""
    phases = {"train": graph} | ({"eval": evaluation} if evaluation else {})
    steps = {phase: _steps(g, phase) for phase, g in phases.items()}
    return Plan(
        graph=graph.name,
        about=graph.about,
        digest=digest,
        seed=graph.seed,
        device=device,
        pools=dict(graph.devices),
        schedule=graph.schedule,
        models=_models(graph, tuple(phases.values())),
        steps=steps["train"],
        slot=tuple(step.id for step in steps["train"]),
        away={},
        eval_steps=steps.get("eval", ()),
        eval_every=graph.eval_every,
        eval_before=graph.eval_before,
        report=dict(evaluation.report) if evaluation else {},
        domains={phase: dict(g.domains) for phase, g in phases.items()},
        columns={phase: _columns(g) for phase, g in phases.items()},
        functions={phase: {n.name: _function(n) for n in g.nodes if n.call} for phase, g in phases.items()},
        regions=dict(graph.regions),
        notes=(*graph.notes, *_unpriced(graph)),
        open_values=graph.open_values,
    )


UNPRICED = {
    "expert_parallel": "layers were divided",
    "attention_replicas": "layers were divided",
    "quantization": "weights were in serve.dtype, and it took no time",
}


def _unpriced(graph: Graph) -> Iterator[str]:
    """Yield notes of the settings that no price counts."""
    for name, model in graph.models.items():
        if options := model.spec.serve.options:
            yield f"memory and time are planned without `models.{name}.serve.options` ({', '.join(options)})"
        serve, default = model.spec.serve, Serve()
        for key, instead in UNPRICED.items():
            if getattr(serve, key) != getattr(default, key):
                yield f"time is planned without `models.{name}.serve.{key}`, as if {instead}"


def _steps(graph: Graph, phase: str) -> tuple[Step, ...]:
    numbers = {node.name: number for number, node in enumerate(graph.nodes, 1)}
    writer = {column: numbers[node.name] for node in graph.nodes for column in node.writes}
    ends = collects(graph.nodes)
    regions = {node.name: end.after[0] for end in ends for node in (*members(graph, end), end)}
    steps = []
    for node in graph.nodes:
        needs = {writer[c] for c in node.reads} | {numbers[name] for name in node.after}
        steps.append(
            Step(
                id=numbers[node.name],
                phase=phase,
                kind=node.kind,
                node=node.name,
                pool=node.pool,
                devices=(0,) if node.layout == ONE else tuple(range(graph.devices[node.pool])),
                reads=node.reads,
                writes=node.writes,
                frees=(),
                models=_version(node),
                layout=node.layout,
                inserted=node.inserted,
                because=node.because,
                after=tuple(needs),
                op=node.op.name if node.call else "",
                filters=node.call is not None and node.op.declared.filters,
                updates=node.updates,
                joins=node.joins,
                beside=node.call is not None and node.op.declared.beside,
                leaves=node.leaves,
                when=node.when,
                region=regions.get(node.name, ""),
                source=node.source,
                path=_path(node, graph),
                engine=(node.op.engine or "") if node.call else "".join(node.kind.facts.engines[-1:]),
            )
        )
    return renumbered(steps, graph.report.values())[0]


def _path(node: Node, graph: Graph) -> str:
    """Return how a sync's weights travel: that follows from where the two engines are.

    To servers that run already they are broadcast, or go through files, wherever those are.
    """
    if not node.kind.facts.syncs:
        return ""
    serve = graph.models[str(node.model)].spec.serve
    if node.source or serve.addresses:
        return "disk" if serve.sync_folder else "broadcast"
    return SERVING[serve.engine].paths[0]


def in_one_process(plan: Plan) -> Plan:
    """Return the plan for pools that share a process: weights from pool to pool stay in it, as within one."""

    def handed(step: Step) -> Step:
        serve = plan.models[next(iter(step.models))].serve if step.source else None
        if serve is None or serve.addresses:
            return step
        return replace(step, path=SERVING[serve.engine].paths[0])

    return replace(plan, steps=tuple(map(handed, plan.steps)), eval_steps=tuple(map(handed, plan.eval_steps)))


def _version(node: Node) -> dict[str, Version | None]:
    if node.model is None or node.version is None or (node.call and node.op.engine is None):
        return {}
    read: dict[str, Version | None] = {node.model: Version(node.version)}
    return {**read, node.of: Version(node.of_version or 0)} if node.of else read


def _function(node: Node) -> Function:
    call = node.called
    hooks = {n: Function(h.target, h.attributes, courses=h.courses) for n, h in node.hooks.items()}
    return Function(
        target=call.target,
        attributes=call.attributes,
        ins=call.ins,
        outs=call.outs,
        handles=call.op.handles,
        model=node.model,
        of=node.of,
        tokenizer=node.tokenizer,
        state=node.state,
        joins=node.joins,
        holds=tuple(name for name in call.ins if call.op.declared.holds and name in call.outs),
        courses=call.courses,
        roles=call.op.declared.roles,
        hooks=hooks,
    )


def _columns(graph: Graph) -> dict[str, ColumnPlan]:
    return {
        name: ColumnPlan(c.type, c.domain, c.layout, c.writer, c.copy_of or name, c.moved)
        for name, c in graph.columns.items()
    }


def _models(graph: Graph, phases: tuple[Graph, ...]) -> dict[str, ModelPlan]:
    """Return the models that some step needs, with the engines that hold them."""
    nodes = [node for phase in phases for node in phase.nodes]
    used = [node for node in nodes if node.call and node.op.engine]
    engines = {name: {n.op.engine for n in used if name in (n.model, n.of)} for name in graph.models}
    tokenizers = {node.tokenizer for node in nodes}
    models = {}
    for name, model in graph.models.items():
        if engines[name] or name in tokenizers:
            spec, serves = model.spec, "serve" in engines[name]
            optimizer = None if spec.frozen else _optimizer(spec.optimizer, name, graph)
            trains = "train" in engines[name] or (engines[name] and SERVING[spec.serve.engine].paths)
            train = _held(TrainPlan, spec.train, graph.engines[f"{name}.train"]) if trains else None
            serve = _held(ServePlan, spec.serve, graph.engines[f"{name}.serve"]) if serves else None
            if serve and "request_timeout" in SERVING[serve.engine].options and serve.request_timeout is None:
                serve = serve.model_copy(update={"request_timeout": graph.schedule.timeout / 2})
            calls = [n.called for n in used if n.model == name]
            if serve and any(call.value("routing") for call in calls):
                options = {**(serve.options or {}), **(SERVING[serve.engine].routing or {})}
                serve = serve.model_copy(update={"options": options})
            if serve and any(call.attributes.get(key) is not None for call in calls for key in GRAMMARS):
                options = {**(SERVING[serve.engine].grammars or {}), **(serve.options or {})}
                serve = serve.model_copy(update={"options": options})
            if serve and train and train.lora and not spec.frozen:
                beside = SERVING[serve.engine].adapters and not no_adapter(serve, train.lora)
                fits = train.pool != serve.pool and beside
                chosen = serve.lora or ("adapter" if fits else "merged")
                serve = serve.model_copy(update={"lora": chosen})
            held = (model.path, spec.head, spec.frozen, optimizer, train, serve, model.rate)
            models[name] = ModelPlan(*held, config=spec.config, trust_remote_code=spec.trust_remote_code)
    return models


def _held(kind: type[Engine], spec: Train | Serve, pool: str) -> Engine:
    """Return an engine with its pool; not validated again, since a value may still be open."""
    return kind.model_construct(**{**dict(spec), "pool": pool})


def _optimizer(spec: Optimizer | None, model: str, graph: Graph) -> Optimizer | None:
    """Return an optimizer's settings; a schedule without an end ends with the run."""
    steps = optimizer_steps(graph, model)
    if spec is None or spec.total_steps or steps is None:
        return spec
    if spec.schedule == "constant" and not isinstance(spec.warmup_steps, float):
        return spec
    return spec.model_copy(update={"total_steps": steps})


def optimizer_steps(graph: Graph, model: str) -> int | None:
    """Return the optimizer steps of a model in all of a run; None where its length is not known."""
    if (last := graph.schedule.iterations) is None:
        return None
    updates = [node for node in graph.nodes if node.updates and node.model == model]
    return sum(node.optimizer_steps * count(node.when, last) for node in updates)
