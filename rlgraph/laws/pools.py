"""Laws of pools: what runs on them, and what may go from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlgraph.errors import Problem
from rlgraph.ir.graph import Graph, Node
from rlgraph.laws.streams import waits_on_another_pool
from rlgraph.laws.views import PlacedView


def _weights_are_copied_in_place(view: PlacedView) -> Iterator[Problem]:
    """Weights are copied from one train engine onto another of the same pool."""
    engines = view.graph.engines
    for node in view.graph.nodes:
        if not node.of:
            continue
        origin, target = engines[f"{node.of}.train"], engines[f"{node.model}.train"]
        if origin != target:
            law = f"node `{node.name}` copies `{node.of}`, which trains on pool {origin}, onto "
            law += f"`{node.model}`, which is on pool {target}"
            remedy = f"put both on one: models.{node.model}.train.pool={origin}"
            yield Problem("copy-between-pools", law, node.mark, (), remedy)


def _all_pools_are_used(view: PlacedView) -> Iterator[Problem]:
    graph = view.graph
    if graph.report or not graph.nodes:
        return
    used = set(view.pools.values())
    for pool in graph.devices:
        if pool not in used:
            law = f"nothing runs on pool `{pool}`"
            remedy = f"place an engine there, as models.NAME.train.pool={pool}, or remove it"
            yield Problem("idle-pool", law, None, (), remedy)


PLACE_LAWS: tuple[Callable[[PlacedView], Iterator[Problem]], ...] = (
    _weights_are_copied_in_place,
    _all_pools_are_used,
    waits_on_another_pool,
)


def delta_goes_between_pools(graph: Graph, reader: Node) -> Iterator[Problem]:
    """Yield a sync of what has changed, to an engine whose weights the run does not send to another pool."""
    model = graph.models[str(reader.model)]
    serve = model.serve
    if serve.sync != "delta":
        return
    law = f"`models.{reader.model}.serve.sync: delta` is for weights that go to another pool; these "
    if serve.addresses:
        law += "go to servers at addresses"
    elif graph.engines[f"{reader.model}.train"] == reader.pool:
        law += f"stay on {reader.pool}"
    else:
        return
    yield Problem("sync-delta", law, model.mark, (), f"set: {{models.{reader.model}.serve.sync: full}}")
