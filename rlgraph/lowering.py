"""Take a composed graph through all passes, and make the plan that no cluster has been chosen for yet."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from rlgraph.engines.registry import OFFLOADS, SERVING
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
from rlgraph.records import dataclass
from rlgraph.syntax.model_settings import SERVE_AUTO, TRAIN_AUTO
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder

# what decides no number of a run: sections of a graph, settings of a model, and settings of its train engine
INDECISIVE_SECTIONS = ("about", "eval", "pools", "schedule")
INDECISIVE_OF_MODELS = ("vocabulary",)
INDECISIVE_OF_TRAINING = {*ON_ONE_DEVICE, *OFFLOADS}


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
        plan = make_plan(self.train, self.evaluation, digest(self.tree, self.device), self.device)
        for settle in (share_weights, lend_asked, with_axis_sizes, pipeline):
            plan = settle(plan)
        return plan


def plan_tree(tree: Tree, devices: int, device: str = "cpu") -> Plan:
    """Return the plan of a composed graph; what only a cluster can settle is still ``auto``."""
    return lower_tree(tree, devices, device).plan


def lower_tree(tree: Tree, devices: int, device: str = "cpu") -> Lowered:
    """Take the graph of training and that of evaluation through all passes."""
    train = bind(tree, devices, device)
    evaluation = bind_evaluation(tree, devices, device)
    if evaluation is None:
        (lowered,) = lower_all([train])
        return Lowered(tree, devices, device, lowered, None)
    lowered, lowered_evaluation = lower_all([train, evaluation])
    return Lowered(tree, devices, device, lowered, lowered_evaluation)


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
    decisive = {}
    for name, section in tree.items.items():
        if name not in INDECISIVE_SECTIONS:
            decisive[name] = section.plain()
    if "models" in decisive:
        models = decisive["models"].items()
        decisive["models"] = {name: _decisive_of_model(model) for name, model in models}
    buffer = tree.find(("schedule", "buffer"))
    if buffer and buffer.value is not None:
        if buffer.is_map:
            buffer = buffer.with_item("lend", None)
        decisive["buffer"] = buffer.plain()
    if device != "cpu":
        decisive["device"] = device  # it settles data types and engines
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _decisive_of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model that decide numbers."""
    decisive = {key: value for key, value in model.items() if key not in INDECISIVE_OF_MODELS}
    if isinstance(model.get("serve"), dict):
        decisive["serve"] = _given(_without_sections(model["serve"]), SERVE_AUTO)
    if isinstance(model.get("train"), dict):
        settings = _given(model["train"], TRAIN_AUTO)
        decisive["train"] = {k: value for k, value in settings.items() if k not in INDECISIVE_OF_TRAINING}
    for section in ("serve", "train"):  # one without settings that decide is as one that is not there
        if decisive.get(section) == {}:
            del decisive[section]
    return decisive


def _given(settings: Mapping[str, Any], may_be_auto: frozenset[str]) -> dict[str, Any]:
    """Return the settings of an engine without those that are ``auto``: so are those that are left out."""
    given = {}
    for key, value in settings.items():
        is_open = value == "auto" and key in may_be_auto
        if not is_open:
            given[key] = value
    return given


def _without_sections(serve: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a serve engine beside each other, as they were before engines had sections: a
    run from then has the same digest."""
    flat: dict[str, Any] = {}
    for key, value in serve.items():
        if key in SERVING and isinstance(value, dict):
            flat |= value
        else:
            flat[key] = value
    return flat


def lower(graph: Graph) -> Graph:
    """Take a bound graph through all passes, verified after each."""
    for apply in PASSES:
        graph = apply(graph)
        verify(graph, apply.__name__)
    return graph
