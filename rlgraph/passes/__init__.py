"""The compiler on one page: from a bound graph to one whose nodes are the steps of an iteration."""

from __future__ import annotations

from collections.abc import Callable

from rlgraph.graph import Graph
from rlgraph.passes.assume import assume
from rlgraph.passes.elide import elide
from rlgraph.passes.infer import infer
from rlgraph.passes.order import order
from rlgraph.passes.partition import partition
from rlgraph.passes.place import place
from rlgraph.passes.prune import prune
from rlgraph.passes.refill import refill
from rlgraph.passes.resolve import resolve
from rlgraph.passes.skip import skip
from rlgraph.passes.sync import sync
from rlgraph.passes.version import version

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    infer,
    version,
    prune,  # before anything is inserted for nodes that go
    refill,
    assume,
    resolve,
    elide,  # after resolve: what is left out must score at the temperature of its reader
    place,
    partition,
    sync,
    skip,  # after all that is inserted for a node, which is left out with it
    order,
)
