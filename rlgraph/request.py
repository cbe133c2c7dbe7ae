"""A request for a plan: a graph with its settings, and the devices that it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlgraph.ir.plan import Origin, Target
from rlgraph.records import dataclass
from rlgraph.syntax.source import Tree

if TYPE_CHECKING:
    from rlgraph.costs.hardware import Here


@dataclass(frozen=True)
class PlanRequest:
    """A graph and the devices to plan it for.

    Attributes:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` settings, applied last.
        devices: how many devices the pools have together, or 1, each; those of the target, or of this
            machine, unless given. 0: whatever machine this is, so many in each pool as its groups fit into.
        target: the cluster to plan for: with it the plan says what it takes there, and moves engines off
            their devices where it would not fit else.
        here: what `auto` stands for, both as a cluster and as a number of devices: this machine unless given.
        device: without a target, what the devices are, ``cuda`` or ``cpu``. GPUs are taken to be like those
            of ``here``, on as many hosts as they need, and ``--cluster auto`` is implied where it can be.
        edited: the graph as written, where it has edits that neither ``graph`` nor ``overrides`` have.
    """

    graph: str
    overrides: Sequence[str] = ()
    devices: int | None = None
    target: Target | None = None
    here: Here | None = None
    device: str = "cpu"
    edited: Tree | None = None

    @staticmethod
    def again(origin: Origin, device: str = "cpu", here: Here | None = None) -> PlanRequest:
        """Return the request that leads to the same plan as one that was made before."""
        return PlanRequest(origin.graph, origin.overrides, origin.devices, origin.target, here, device)

    def with_overrides(self, *overrides: str) -> PlanRequest:
        """Return the same request with further settings, which are applied after those that it has."""
        return replace(self, overrides=(*self.overrides, *overrides))
