"""Laws of ``schedule.buffer``: generation that runs ahead of training, by batch or by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rlgraph.errors import Problem
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.regions import FINISHED, collects, members
from rlgraph.laws.views import PlacedView, StreamView
from rlgraph.nodes import OPS
from rlgraph.ops.registry import load

TWO_POOLS = "set: {pools: {train: {devices: auto}, gen: {devices: auto}}}"
NO_STREAM = "set: {schedule.buffer: null}"


def trained_models(graph: Graph) -> set[str | None]:
    """Return the models of which a graph writes a next version."""
    return {node.model for node in graph.nodes if node.updates}


def serving_trained(graph: Graph) -> list[Node]:
    """Return the nodes that generate with a model that is trained."""
    trained = trained_models(graph)
    return [node for node in _generating(graph) if node.model in trained]


def _generating(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.call and node.op.engine == "serve"]


def runs_ahead(graph: Graph) -> Iterator[Problem]:
    """Yield a problem where generation is to run iterations ahead, and no node generates beside training."""
    staleness = graph.schedule.ahead
    if not staleness or graph.report:
        return
    trained = serving_trained(graph)
    if any(is_on_separate_pool(graph, node) for node in trained):
        return
    law = f"`schedule.buffer` is {{staleness: {staleness}, by: batch}}: "
    law += "generation is to run ahead of training; "
    if trained:
        node = trained[0]
        pool = graph.engines[f"{node.model}.serve"]
        law += f"`{node.model}` generates and trains on one pool, {pool}"
        remedy = f"{_apart(graph, node)}, or schedule.buffer=null"
        yield Problem("no-overlap", law, node.mark, (), remedy)
        return
    law += "nothing generates with a model that is trained"
    nodes = [*_generating(graph), *graph.nodes]
    mark = nodes[0].mark if nodes else None
    yield Problem("no-overlap", law, mark, (), NO_STREAM)


def _apart(graph: Graph, node: Node) -> str:
    """Return the edit that lets a node generate on a pool that does not train its model.

    Models that name no pool are placed by the compiler once there are two.
    """
    is_placed = graph.models[str(node.model)].serve.pool is not None
    if is_placed:
        training_pool = graph.engines[f"{node.model}.train"]
        for name in graph.devices:
            if name != training_pool:
                return f"set: {{models.{node.model}.serve.pool: {name}}}"
    return TWO_POOLS


def is_on_separate_pool(graph: Graph, node: Node) -> bool:
    """Return whether a node's model generates on another pool than it trains on."""
    return graph.engines[f"{node.model}.serve"] != graph.engines[f"{node.model}.train"]


def _generates_beside_training(view: StreamView) -> Iterator[Problem]:
    if view.generating:
        return
    law = "`schedule.buffer`: generation is to stream beside training; "
    serving = serving_trained(view.graph)
    if not serving:
        law += "nothing generates with a model that is trained"
        yield Problem("no-stream", law, None, (), NO_STREAM)
        return
    node = serving[0]
    law += f"`{node.model}` generates and trains on one pool"
    remedy = f"{_apart(view.graph, node)}, or schedule.buffer=null"
    yield Problem("no-stream", law, node.mark, (), remedy)


def _rollout_goes_on_later(view: StreamView) -> Iterator[Problem]:
    """A rollout can leave samples for later, with all that the graph asks of it."""
    for node in view.generating:
        declared = node.op.declared
        if declared.leaves:
            continue
        if not declared.streams:
            law = f"`{node.name}` ({node.op.name}) is to stream, and leaves no sample for later"
            yield Problem("no-stream", law, node.mark, (), f"replace it by rollout, or {NO_STREAM}")
            continue
        key = _attribute_against_streaming(node)
        if key:
            law = f"`{node.name}` is to stream, and `{key}` does not hold for a sample that is taken up "
            law += "again"
            remedy = f"remove: [{node.name}.{key}], or {NO_STREAM}"
            yield Problem("no-stream", law, node.mark, (), remedy)


def _attribute_against_streaming(node: Node) -> str:
    """Return the first attribute of a rollout that its streaming op lacks, and that is not as by default."""
    streaming_op = node.op.declared.streams
    streaming = load(OPS[streaming_op], streaming_op).attributes.model_fields
    fields = node.op.attributes.model_fields
    for key, value in node.called.attributes.items():
        if key not in streaming and value != fields[key].default:
            return key
    return ""


def _kept_rows_are_read(view: StreamView) -> Iterator[Problem]:
    """Some node reads the rows that a filter with ``refill`` keeps."""
    nodes = view.graph.nodes
    refills = {node.name: node for node in nodes if node.refill}
    if not refills:
        return
    for node in nodes:
        reads_kept_rows = not refills.keys().isdisjoint(node.rows)
        if reads_kept_rows:
            return
    name, refill = next(iter(refills.items()))
    law = f"`schedule.buffer`: `{name}` refills, and nothing reads the rows that it keeps"
    updates = [node for node in nodes if node.updates]
    remedy = f"make a node behind it read the rows that it keeps: set: {{{updates[0].name}.rows: {name}}}"
    yield Problem("no-stream", law, refill.mark, (), remedy)


def _stream_has_the_surplus(view: StreamView) -> Iterator[Problem]:
    """No filter asks for more than it needs: the buffer says how many groups are under way."""
    for node in view.graph.nodes:
        if node.refill is None or node.refill.over_sample <= 1:
            continue
        law = f"`{node.name}` asks for more than it needs (`over_sample`); where generation streams, "
        law += "`schedule.buffer.staleness` says how much is begun"
        remedy = f"set: {{{node.name}.refill.over_sample: 1}}"
        yield Problem("stream-over-sample", law, node.mark, (), remedy)
        return


def _one_rollout_streams(view: StreamView) -> Iterator[Problem]:
    """One rollout alone streams, unless a filter with ``refill`` says which."""
    if len(view.generating) < 2:
        return
    if any(node.refill for node in view.graph.nodes):
        return
    names = " and ".join(f"`{node.name}`" for node in view.generating)
    law = f"`schedule.buffer`: {names} generate with a model that is trained, and one alone can stream"
    yield Problem("no-stream", law, view.generating[1].mark, (), NO_STREAM)


STREAM_LAWS: tuple[Callable[[StreamView], Iterator[Problem]], ...] = (
    _generates_beside_training,
    _rollout_goes_on_later,
    _kept_rows_are_read,
    _stream_has_the_surplus,
    _one_rollout_streams,
)


def _source_goes_on_by_groups(view: StreamView) -> Iterator[Problem]:
    """All that a rollout needs can go on one group after the other, as the rollout does."""
    graph, rollout = view.graph, view.generating[0]
    needed = reached(graph.needs, [node.name for node in view.generating], waits=lambda *_: True)
    for node in graph.in_order:
        if not node.call or node.name not in needed:
            continue
        reason = more_than_a_group(graph, node)
        if reason:
            subject = f"`{node.name}`"
            if node.name != rollout.name:
                subject += f" comes before `{rollout.name}`, which"
            law = f"{subject} streams, one group after the other, and {reason}"
            yield Problem("no-stream", law, node.mark, (), NO_STREAM)
            return


def _name_is_free(view: StreamView) -> Iterator[Problem]:
    for node in view.graph.nodes:
        if node.name == FINISHED:
            law = f"where generation streams, the rows that have finished are called `{FINISHED}`, "
            law += "and a node has that name"
            yield Problem("stream-name", law, node.mark, (), "give the node another")


# once the rows of nodes are known
TYPED_STREAM_LAWS: tuple[Callable[[StreamView], Iterator[Problem]], ...] = (
    _source_goes_on_by_groups,
    _name_is_free,
)


def more_than_a_group(graph: Graph, node: Node) -> str:
    """Return why a node can't run on one group at a time, on devices that train nothing; "" where it can."""
    declared = node.op.declared
    if node.op.source:
        return ""
    training_pools = {graph.engines[f"{model}.train"] for model in trained_models(graph)}
    pool = graph.engines[f"{node.model}.{node.op.engine}"] if node.op.engine else ""
    reasons = {
        "it runs in some iterations only": node.when,
        "it drops rows": declared.filters,
        "the number of its rows varies": declared.counts,
        "it sees all rows of an iteration": declared.rows == "all",
        "it keeps something from one iteration for the next": declared.state == "keeps" or declared.holds,
        "it changes weights": node.trains or node.of,
        "it reads weights that an update of the iteration makes": node.reads_next,
        f"it is on pool `{pool}`, which trains": pool in training_pools,
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    return ""


def waits_on_another_pool(view: PlacedView) -> Iterator[Problem]:
    """Yield what waits for rows that stream, and is on a pool of what draws and measures them.

    A pool takes its steps in order: behind one that waits for the rows, they would never come.
    """
    for collect in collects(view.graph.nodes):
        region = view.graph.regions[collect.after[0]]
        if not region.streams:
            continue
        problem = _wait_behind_stream(view, collect)
        if problem:
            yield problem
            return


def _wait_behind_stream(view: PlacedView, collect: Node) -> Problem | None:
    """Return the problem of the first node that shares a pool with what it waits for, or with what waits."""
    graph, pools = view.graph, view.pools
    names = {collect.name, *graph.needs.ancestors(collect.name)}
    waiting = [node for node in graph.in_order if node.name in names]
    inside = members(graph, collect)
    drawing_pool = _drawing_pool(inside, view)
    for node in waiting:
        if pools[node.name] == drawing_pool:
            law = f"`{node.name}` is on pool `{drawing_pool}`, where "
            law += "it waits for rows that stream: they are drawn there, and would wait behind it"
            return _stream_waits(node, law, pools[collect.name])
    waiting_pools = {pools[node.name] for node in waiting}
    for node in inside:
        pool = pools[node.name]
        if pool in waiting_pools:
            law = f"`{node.name}` is on pool `{pool}`, where steps wait for the rows that it makes or "
            law += "measures as they stream"
            return _stream_waits(node, law, drawing_pool)
    return None


def _drawing_pool(inside: Sequence[Node], view: PlacedView) -> str:
    for node in inside:
        if node.unfinished_columns:
            return view.pools[node.name]
    return view.pools[inside[0].name]


def _stream_waits(node: Node, law: str, pool: str) -> Problem:
    setting = f"{node.name}.pool"
    if node.call and node.op.engine:
        setting = f"models.{node.model}.{node.op.engine}.pool"
    return Problem("stream-waits", law, node.mark, (), f"set: {{{setting}: {pool}}}")
