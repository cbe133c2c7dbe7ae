"""The compiler's passes on one page: from a bound graph to one whose nodes are an iteration's steps."""

from __future__ import annotations

from collections.abc import Callable

from rlgraph.frontend.infer import infer
from rlgraph.ir.graph import Graph
from rlgraph.passes.check_laws import assume
from rlgraph.passes.defaults import resolve
from rlgraph.passes.elide import elide
from rlgraph.passes.intervals import skip
from rlgraph.passes.order import order
from rlgraph.passes.partition import partition
from rlgraph.passes.place import place
from rlgraph.passes.prune import prune
from rlgraph.passes.refill import refill
from rlgraph.passes.stream import stream
from rlgraph.passes.versions import version
from rlgraph.passes.weight_sync import sync

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    stream,
    infer,
    version,
    prune,  # nothing must have been inserted for nodes that go
    refill,
    assume,
    resolve,
    elide,  # comes after resolve: a node left out must score at its reader's temperature
    place,
    partition,
    sync,
    skip,  # comes after all insertions for a node, which is left out with them
    order,
)
