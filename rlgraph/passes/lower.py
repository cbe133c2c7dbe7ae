"""Lower a graph that has passed all passes to the plan's records: steps, columns, functions and models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlgraph.engines.registry import SERVING, serving
from rlgraph.ir.actions import ON_COLUMNS, Action, Kind, RunOp, Sync
from rlgraph.ir.function import Function
from rlgraph.ir.graph import Column, Graph, Node
from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.ir.regions import collects, members
from rlgraph.ir.renumber import renumbered
from rlgraph.ir.steps import ONE, Version
from rlgraph.laws.views import is_changed
from rlgraph.passes.lower_models import plan_models

# settings of a serve engine that no price counts -> what a plan's time takes in their place
UNPRICED = {
    "expert_parallel": "layers were divided",
    "attention_replicas": "layers were divided",
    "quantization": "weights were in serve.dtype, and it took no time",
}


def make_plan(
    graph: Graph,
    evaluation: Graph | None,
    digest: str,
    device: str = "cpu",
) -> Plan:
    """Return the plan of a graph's iteration, and of an evaluation."""
    phases = {"train": graph}
    if evaluation:
        phases["eval"] = evaluation
    steps = {phase: _steps(lowered, phase) for phase, lowered in phases.items()}
    return Plan(
        graph=graph.name,
        about=graph.about,
        digest=digest,
        seed=graph.seed,
        device=device,
        pools=dict(graph.devices),
        schedule=graph.schedule,
        models=plan_models(graph, tuple(phases.values())),
        steps=steps["train"],
        slot=tuple(step.id for step in steps["train"]),
        away={},
        eval_steps=steps.get("eval", ()),
        eval_every=graph.eval_every,
        eval_before=graph.eval_before,
        report=dict(evaluation.report) if evaluation else {},
        domains={phase: dict(lowered.domains) for phase, lowered in phases.items()},
        columns={phase: _columns(lowered) for phase, lowered in phases.items()},
        functions={phase: _functions(lowered) for phase, lowered in phases.items()},
        regions=dict(graph.regions),
        notes=(*graph.notes, *_unpriced(graph)),
        open_values=graph.open_values,
    )


def _unpriced(graph: Graph) -> Iterator[str]:
    """Yield notes of the settings that no price counts."""
    for name, model in graph.models.items():
        serve = model.serve
        if serve.options:
            options = ", ".join(serve.options)
            path = serve.setting_name(name, "options")
            yield f"memory and time are planned without `{path}` ({options})"
        for key, assumed in UNPRICED.items():
            if is_changed(serve, key):
                path = serve.setting_name(name, key)
                yield f"time is planned without `{path}`, as if {assumed}"


def _steps(graph: Graph, phase: str) -> tuple[Step, ...]:
    numbers = {node.name: number for number, node in enumerate(graph.nodes, 1)}
    regions = _regions(graph)
    steps = []
    for node in graph.nodes:
        writers = {numbers[graph.writers[column].name] for column in node.reads}
        waits_for = {numbers[name] for name in node.after}
        devices = 1 if node.layout == ONE else graph.devices[node.pool]
        steps.append(
            Step(
                id=numbers[node.name],
                phase=phase,
                node=node.name,
                pool=node.pool,
                devices=tuple(range(devices)),
                reads=node.reads,
                writes=node.writes,
                frees=(),
                layout=node.layout,
                because=node.because,
                after=tuple(writers | waits_for),
                action=_action(node, graph),
                when=node.when,
                region=regions.get(node.name, ""),
            )
        )
    return renumbered(steps, graph.report.values())[0]


def _regions(graph: Graph) -> dict[str, str]:
    """Return the filter to whose region a node belongs, of the nodes that are repeated."""
    regions = {}
    for collect in collects(graph.nodes):
        for node in (*members(graph, collect), collect):
            regions[node.name] = collect.after[0]
    return regions


def _action(node: Node, graph: Graph) -> Action:
    """Return what the step of a node does. Planning inserts the kinds that no pass does."""
    match node.kind:
        case Kind.RUN:
            return _run(node)
        case Kind.SYNC:
            assert node.model is not None and node.version is not None
            return Sync(node.model, Version(node.version), _sync_path(node, graph), node.source)
        case _:
            return ON_COLUMNS[node.kind]


def _run(node: Node) -> RunOp:
    declared = node.op.declared
    return RunOp(
        op=node.op.name,
        models=_versions_read(node),
        engine=node.op.engine or "",
        filters=bool(declared.filters),
        updates=node.updates,
        joins=node.joins,
        on_host=declared.beside,
        unfinished=node.unfinished_columns,
    )


def _sync_path(node: Node, graph: Graph) -> str:
    """Return how a sync's weights travel: that follows from where the two engines are.

    To servers that run already they are broadcast, or go through files, wherever those are.
    """
    serve = graph.models[str(node.model)].serve
    if node.source or serve.addresses:
        return "disk" if serve.sync_folder else "broadcast"
    return SERVING[serve.engine].paths[0]


def in_one_process(plan: Plan) -> Plan:
    """Return the plan for pools that share a process: weights from pool to pool stay in it, as within one."""
    steps = tuple(_within_process(plan, step) for step in plan.steps)
    eval_steps = tuple(_within_process(plan, step) for step in plan.eval_steps)
    return replace(plan, steps=steps, eval_steps=eval_steps)


def _within_process(plan: Plan, step: Step) -> Step:
    action = step.action
    if not isinstance(action, Sync) or not action.source:
        return step
    serve = plan.models[action.model].serve
    if serve is None or serve.addresses:
        return step
    return replace(step, action=replace(action, path=serving(serve).paths[0]))


def _versions_read(node: Node) -> dict[str, Version]:
    """Return the models that an op works on, with the version of each that it reads."""
    if node.model is None or node.version is None:
        return {}
    if node.op.engine is None:
        return {}
    versions = {node.model: Version(node.version)}
    if node.of:
        versions[node.of] = Version(node.of_version or 0)
    return versions


def _functions(graph: Graph) -> dict[str, Function]:
    return {node.name: _function(node) for node in graph.nodes if node.call}


def _function(node: Node) -> Function:
    call = node.called
    hooks = {}
    for attribute, hook in node.hooks.items():
        hooks[attribute] = Function(hook.target, hook.attributes, courses=hook.courses)
    holds = []
    if call.op.declared.holds:
        holds = [name for name in call.ins if name in call.outs]
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
        holds=tuple(holds),
        courses=call.courses,
        roles=call.op.declared.roles,
        hooks=hooks,
    )


def _columns(graph: Graph) -> dict[str, ColumnPlan]:
    return {name: _column(column) for name, column in graph.columns.items()}


def _column(column: Column) -> ColumnPlan:
    return ColumnPlan(
        type=column.type,
        domain=column.domain,
        layout=column.layout,
        writer=column.writer,
        origin=column.copy_of or column.name,
        moved=column.moved,
    )
