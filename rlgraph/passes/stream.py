"""Makes generation for training a region that streams: ``schedule.stream``.

    prompts ─> rollout ─> rewards ─┐                              groups, each as it finishes
                  └── tokens ──────┴─> finished ─> collect ─> advantages ─> update

The region is a filter's with ``refill`` (see refill.py), the graph's own or one that keeps all rows, behind
all that needs no weights of a model that is trained, and sees rows or groups alone. The rollout is replaced
by the op that leaves what has not ended for later (``@op(streams=...)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.infer import infer
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.trace import writer
from rlgraph.nodes import OPS
from rlgraph.ops.registry import load
from rlgraph.syntax.settings import Refill

FINISHED, KEEPS_ALL = "finished", "filter.all"


def stream(graph: Graph) -> Graph:
    """Give a graph with ``schedule.stream`` the filter behind which its rows are collected as they finish.

    Raises:
        GraphError: nothing generates on a pool of its own, a node before the rollout can't be repeated, or a
            rollout can't leave what has not ended.
    """
    settings = graph.schedule.stream
    if settings is None or graph.report:
        return graph
    drawing, staleness = _drawing(graph), settings.staleness or 0
    names = {node.name for node in drawing}
    nodes = [_leaving(graph, node) if node.name in names else node for node in graph.nodes]
    refills = [node for node in nodes if node.refill]
    if refills:
        if not any(node.name in other.rows for node in refills for other in nodes):
            law = f"`schedule.stream`: `{refills[0].name}` refills, and nothing reads the rows that it keeps"
            updates = [node for node in nodes if node.updates]
            remedy = f"let what is behind it do so, as set: {{{updates[0].name}.rows: {refills[0].name}}}"
            raise GraphError([Problem("no-stream", law, refills[0].mark, (), remedy)])
        if asked := next((node for node in refills if node.refill and node.refill.policy), None):
            law = f"`{asked.name}` has a policy for groups that wait; where generation streams, "
            law += "`schedule.stream.order` says which come next"
            remedy = f"set: {{{asked.name}.refill.policy: null, schedule.stream.order: FILE.py:NAME}}"
            raise GraphError([Problem("stream-policy", law, asked.mark, (), remedy)])
        if asked := next((node for node in refills if node.refill and node.refill.over_sample > 1), None):
            law = f"`{asked.name}` asks for more than it needs (`over_sample`); where generation streams, "
            law += "`schedule.stream.staleness` says how much is begun"
            remedy = f"set: {{{asked.name}.refill.over_sample: 1}}"
            raise GraphError([Problem("stream-over-sample", law, asked.mark, (), remedy)])
        kept = {"keep": staleness}
        nodes = [replace(n, refill=n.refill.model_copy(update=kept)) if n.refill else n for n in nodes]
        return replace(graph, nodes=tuple(nodes))
    if len(drawing) > 1:
        both = " and ".join(f"`{node.name}`" for node in drawing)
        law = f"`schedule.stream`: {both} generate with a model that is trained, and one alone can stream"
        raise GraphError([Problem("no-stream", law, drawing[1].mark, (), "set: {schedule.stream: null}")])
    typed = infer(replace(graph, nodes=tuple(nodes)))
    inside = _inside(typed, drawing)
    if clash := [node for node in nodes if node.name == FINISHED]:
        law = f"`schedule.stream` names the rows that have finished `{FINISHED}`, and a node has that name"
        raise GraphError([Problem("stream-name", law, clash[0].mark, (), "give the node another")])
    read = {
        node.name
        for node in typed.nodes
        if node.call and node.name not in inside and any(writer(typed, c).name in inside for c in node.reads)
    }
    behind = [replace(n, rows=_finished_rows(n, names)) if n.name in read else n for n in nodes]
    return replace(graph, nodes=(*behind, _finished(drawing[0], staleness)))


def _drawing(graph: Graph) -> list[Node]:
    """Return the nodes that generate, on a pool of its own, with a model that is trained."""
    trained = {node.model for node in graph.nodes if node.updates}
    serves = [node for node in graph.nodes if node.call and node.op.engine == "serve"]
    serving = [node for node in serves if node.model in trained]
    apart = [n for n in serving if graph.engines[f"{n.model}.serve"] != graph.engines[f"{n.model}.train"]]
    if apart:
        return apart
    law, mark = "`schedule.stream`: generation is to stream beside training; ", None
    if serving:
        law += f"`{serving[0].model}` generates and trains on one pool"
        remedy = "set: {pools: {train: {devices: auto}, gen: {devices: auto}}}, or schedule.stream=null"
        mark = serving[0].mark
    else:
        law += "nothing generates with a model that is trained"
        remedy = "set: {schedule.stream: null}"
    raise GraphError([Problem("no-stream", law, mark, (), remedy)])


def _leaving(graph: Graph, node: Node) -> Node:
    """Return a rollout as the op that leaves what has not ended, every ``stream.chunk`` tokens."""
    assert graph.schedule.stream
    chunk, name, given = graph.schedule.stream.chunk, node.op.declared.streams, node.called.attributes
    if node.op.declared.leaves:
        return replace(node, call=_with_outputs(replace(node.called, attributes=_going_on(given, chunk))))
    if not name:
        law = f"`{node.name}` ({node.op.name}) is to stream, and leaves no sample for later"
        remedy = "replace it by rollout, or set: {schedule.stream: null}"
        raise GraphError([Problem("no-stream", law, node.mark, (), remedy)])
    op = load(OPS[name], name)
    fields, own = op.attributes.model_fields, node.op.attributes.model_fields
    lost = [key for key, value in given.items() if key not in fields and value != own[key].default]
    if lost:
        law = f"`{node.name}` is to stream, and `{lost[0]}` does not hold for a sample that is taken up again"
        remedy = f"remove: [{node.name}.{lost[0]}], or set: {{schedule.stream: null}}"
        raise GraphError([Problem("no-stream", law, node.mark, (), remedy)])
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    kept = {key: value for key, value in given.items() if key in fields}
    call = replace(node.called, op=op, target=OPS[name], attributes=_going_on({**defaults, **kept}, chunk))
    return replace(node, call=call)


def _with_outputs(call: Call) -> Call:
    """Return a call with the columns that its op writes only with attributes that it has by now."""
    declared, known = load(call.target, call.op.name), {port.name for port in call.op.outputs}
    further = [port for port in declared.written(call.attributes) if port.name not in known]
    return replace(call, op=replace(call.op, outputs=(*call.op.outputs, *further)))


def _going_on(given: Mapping[str, Any], chunk: int) -> dict[str, Any]:
    """Return attributes with which a rollout leaves what has not ended, and engines go on with that."""
    own = {"chunk": given.get("chunk") or chunk, "stays": True}
    return {**given, **{name: value for name, value in own.items() if name in given}}


def _finished_rows(node: Node, drawing: set[str]) -> tuple[str, ...]:
    """Return the rows of a node behind the filter: where it says which, what has finished is drawn."""
    return tuple(FINISHED if name in drawing else name for name in node.rows) or (FINISHED,)


def _inside(graph: Graph, drawing: list[Node]) -> set[str]:
    """Return the nodes whose rows go on one group after the other: up to the rollout, and behind it."""
    trained = {node.model for node in graph.nodes if node.updates}
    pools = {graph.engines[f"{model}.train"] for model in trained}
    before = reached(graph.needs, [node.name for node in drawing], waits=lambda *_: True)
    inside: set[str] = set()
    for node in graph.in_order:
        if not node.call:
            continue
        makers = {writer(graph, column).name for column in node.reads}
        needs = _needs(graph, node, pools)
        if node.name in before and needs:
            comes = "" if node.name == drawing[0].name else f"comes before `{drawing[0].name}`, which "
            law = f"`{node.name}` {comes}streams, one group after the other, and {needs}"
            raise GraphError([Problem("no-stream", law, node.mark, (), "set: {schedule.stream: null}")])
        if node.name in before or (not needs and makers and makers <= inside):
            inside.add(node.name)
    return inside


def _needs(graph: Graph, node: Node, pools: set[str]) -> str:
    """Return what a node needs beside a group at a time, and devices that train nothing; "" where no more."""
    declared = node.op.declared
    if node.op.source:
        return ""
    pool = graph.engines[f"{node.model}.{node.op.engine}"] if node.op.engine else ""
    reasons = {
        "it runs in some iterations only": node.when,
        "it drops rows": declared.filters,
        "the number of its rows varies": declared.counts,
        "it sees all rows of an iteration": declared.rows == "all",
        "it keeps something from one iteration for the next": declared.state == "keeps" or declared.holds,
        "it changes weights": node.trains or node.of,
        "it reads weights that an update of the iteration makes": node.reads_next,
        f"it is on pool `{pool}`, which trains": pool in pools,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _finished(drawing: Node, staleness: int) -> Node:
    """Return the filter that keeps all rows of what has ended."""
    ins = {"group": drawing.called.outs.get("group", "group")}
    call = Call(load(OPS[KEEPS_ALL], KEEPS_ALL), OPS[KEEPS_ALL], {}, ins)
    return Node(name=FINISHED, call=call, refill=Refill(keep=staleness), mark=drawing.mark)
