"""Take a composed graph through all passes, and make the plan that no cluster has been chosen for yet."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from rlgraph.engines.registry import OFFLOADS
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind, bind_evaluation
from rlgraph.ir.graph import Graph
from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import Plan
from rlgraph.passes import PASSES
from rlgraph.passes.lower import make_plan
from rlgraph.passes.verify import verify
from rlgraph.planning.lending import lend_asked
from rlgraph.planning.model_limits import with_axis_sizes
from rlgraph.planning.overlap import pipeline
from rlgraph.planning.shared_weights import share_weights
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder

INDECISIVE = ("about", "eval", "pools", "schedule")
# settings of a train engine that decide no number of a run
OF_DEVICES = {*ON_ONE_DEVICE, *OFFLOADS}


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage collection out of a block that makes many objects and few cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Lowered:
    """A composed graph behind all passes, for so many devices of a kind: training, and evaluation if any."""

    tree: Tree
    devices: int
    device: str
    train: Graph
    evaluation: Graph | None

    @cached_property
    def plan(self) -> Plan:
        """Its plan; what only a cluster can settle is still ``auto``."""
        made_of = digest(self.tree, self.device)
        plan = share_weights(make_plan(self.train, self.evaluation, made_of, self.device))
        return pipeline(with_axis_sizes(lend_asked(plan)))


def plan_tree(tree: Tree, devices: int, device: str = "cpu") -> Plan:
    """Return the plan of a composed graph; what only a cluster can settle is still ``auto``."""
    return lower_tree(tree, devices, device).plan


def lower_tree(tree: Tree, devices: int, device: str = "cpu") -> Lowered:
    """Take the graph of training and that of evaluation through all passes."""
    train, evaluation = bind(tree, devices, device), bind_evaluation(tree, devices, device)
    lowered, *rest = lower_all([train, *([evaluation] if evaluation else ())])
    return Lowered(tree, devices, device, lowered, rest[0] if rest else None)


def lower_all(graphs: Sequence[Graph]) -> list[Graph]:
    """Take each graph through all passes.

    Raises:
        GraphError: with the problems of all of them together, each once.
    """
    binder = Binder()
    lowered = [binder.attempt(lower, graph) for graph in graphs]
    if binder.problems:
        raise GraphError(dict.fromkeys(binder.problems))
    return [graph for graph in lowered if graph]


def digest(tree: Tree, device: str = "cpu") -> str:
    """Return a digest of all that decides the numbers of a run: not its length, its number of devices, or
    how many of them share a copy of a model or the tokens of a row, which are lent, or what is on hosts."""
    decisive = {name: child.plain() for name, child in tree.items.items() if name not in INDECISIVE}
    for model in decisive.get("models", {}).values():
        model.pop("vocabulary", None)
        if OF_DEVICES & (train := model.get("train") or {}).keys():
            model["train"] = {key: value for key, value in train.items() if key not in OF_DEVICES}
            if not model["train"]:
                del model["train"]
    schedule = tree.get("schedule")
    for key in ("staleness", "stream"):
        if schedule and (ahead := schedule.get(key)):
            decisive[key] = ahead.plain()
            if isinstance(decisive[key], dict):
                decisive[key].pop("lend", None)
    if device != "cpu":
        decisive["device"] = device  # it settles data types and engines
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def lower(graph: Graph) -> Graph:
    """Take a bound graph through all passes, verified after each."""
    for apply in PASSES:
        graph = apply(graph)
        verify(graph, apply.__name__)
    return graph
