"""The views that laws see: as much of the graph as is known where they are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import BaseModel

from rlgraph.errors import Mark
from rlgraph.ir.graph import Call, Graph, Model, Node, Region
from rlgraph.ir.intervals import Cadences
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan, TrainPlan
from rlgraph.records import dataclass
from rlgraph.syntax.model_settings import ModelSection, ServeSettings
from rlgraph.syntax.source import Tree

if TYPE_CHECKING:
    from rlgraph.costs.hardware import Cluster
    from rlgraph.costs.models.config import Config


@dataclass(frozen=True)
class ModelView:
    """A model's section, as it is bound."""

    name: str
    spec: ModelSection
    tree: Tree

    @property
    def path(self) -> str:
        """Return the graph's name for the section: ``models.policy``."""
        return f"models.{self.name}"

    @cached_property
    def serve(self) -> ServeSettings:
        """The settings of its serve engine."""
        return self.spec.serve.of_engine()

    def serve_key(self, setting: str, *path: str) -> Mark | None:
        """Return where the key of a setting of its serve engine is written."""
        _, _, *keys = self.serve_path(setting).split(".")
        return self.key(*keys, *path)

    def serve_path(self, setting: str) -> str:
        """Return the graph's name for a setting of its serve engine: ``models.policy.serve.sglang.hosts``."""
        return self.serve.setting_name(self.name, setting)

    def key(self, *path: str) -> Mark | None:
        """Return where the key of a setting is written, as ``key("train", "lora")``."""
        return self.tree.at(path).key

    def value(self, *path: str) -> Mark:
        """Return where the value of a setting is written."""
        return self.tree.at(path).mark


@dataclass(frozen=True)
class BoundView:
    """All models, nodes and pools of a graph, as they are bound; edges are still open."""

    models: Mapping[str, Model]
    nodes: Sequence[Node]
    sections: Mapping[str, Tree]  # of the models
    engines: Mapping[str, str]  # "policy.train", "policy.serve" -> its pool
    pools: Mapping[str, int]  # pool -> devices


@dataclass(frozen=True)
class NodeView:
    """A node in its graph."""

    graph: Graph
    node: Node


@dataclass(frozen=True)
class CadenceView:
    """A graph, and the iterations in which each node's rows are there; of one that holds rows, new ones."""

    graph: Graph
    available: Mapping[str, Cadences]


@dataclass(frozen=True)
class CallView:
    """A node's op, or one of its hooks, in the graph as the rows that the node sees have it."""

    graph: Graph
    node: Node
    call: Call


@dataclass(frozen=True)
class RegionView:
    """A region whose steps are repeated in rounds, and its nodes in order."""

    graph: Graph
    region: Region
    inside: Sequence[Node]


@dataclass(frozen=True)
class StreamView:
    """A graph whose generation streams, and the nodes that generate beside training with a trained model."""

    graph: Graph
    generating: Sequence[Node]


@dataclass(frozen=True)
class PlacedView:
    """A graph whose nodes have a pool each."""

    graph: Graph
    pools: Mapping[str, str]  # node -> pool


@dataclass(frozen=True)
class SizedView:
    """A model in a plan, with its configuration; None where it is not known."""

    plan: Plan
    name: str
    model: ModelPlan
    config: Config | None


@dataclass(frozen=True)
class TrainSizeView:
    """A model of known size in a plan, and its train engine."""

    plan: Plan
    name: str
    train: TrainPlan
    config: Config


@dataclass(frozen=True)
class ServeSizeView:
    """A model of known size in a plan, and its serve engine."""

    plan: Plan
    name: str
    serve: ServePlan
    config: Config


@dataclass(frozen=True)
class HostsView:
    """A pool that takes hosts whole: how many hosts and devices, from which device on."""

    pool: str
    hosts: int
    devices: int
    start: int
    group_sizes: Sequence[int]  # devices of one host that each of its servers spans
    cluster: Cluster | None  # None where it is not known


@dataclass(frozen=True)
class GroupView:
    """A model whose servers span several devices, and the numbers of its pool's devices."""

    name: str
    serve: ServePlan
    devices: range
    cluster: Cluster | None  # None where it is not known


@dataclass(frozen=True)
class RunView:
    """A graph behind all passes, with its plan: training, and evaluation if any."""

    tree: Tree
    train: Graph
    evaluation: Graph | None
    plan: Plan


@dataclass(frozen=True)
class PhaseView:
    """One phase of a run, training or evaluation."""

    graph: Graph
    plan: Plan
    tree: Tree


def is_changed(section: BaseModel, key: str) -> bool:
    """Return whether a setting of a section has another value than by default."""
    default = type(section).model_fields[key].get_default(call_default_factory=True)
    return bool(getattr(section, key) != default)
