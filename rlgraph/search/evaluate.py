"""Plan and predict a graph with other settings: the one way in which searches judge a candidate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rlgraph.errors import GraphError
from rlgraph.frontend.compose import overridden
from rlgraph.ir.plan import Origin, Plan
from rlgraph.planning.device_groups import on_whole_hosts
from rlgraph.planning.predict import Scenario, predict
from rlgraph.request import PlanRequest
from rlgraph.search.candidate import Candidate
from rlgraph.search.moves import Settings
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import overrides
from rlgraph.version import VERSION

MakePlan = Callable[[Tree, int], Plan]  # the plan of a composed graph for so many devices, without prices


@dataclass(frozen=True)
class Evaluator:
    """Judges settings of one graph on one cluster.

    Invariants:
        - A candidate's plan is the one that a user gets who types its settings.
        - The same settings are planned and predicted once.
        - Settings that the compiler refuses give a candidate without a plan, never an exception.

    Attributes:
        request: the graph, as it was asked for.
        written: the graph with its overrides, and its ``${...}`` still in place.
        make_plan: takes a composed graph through the passes.
        devices: how many ``auto`` stands for.
        scenario: the cluster, the work and the calibration of predictions.
        chosen: settings that the planner chose for the graph, beside those that are tried.
    """

    request: PlanRequest
    written: Tree
    make_plan: MakePlan
    devices: int
    scenario: Scenario
    chosen: Settings = field(default_factory=dict)
    cache: dict[tuple[str, ...], Candidate] = field(default_factory=dict)

    def plan(self, settings: Settings) -> Plan:
        """Return the plan with these settings, without prices.

        Raises:
            GraphError: the graph is wrong with them.
        """
        edits = overrides({**self.chosen, **settings})
        tree = interpolate(overridden(self.written, edits))
        plan = self.make_plan(tree, self.devices)
        settled = (*self.request.overrides, *edits)
        composed = tree.written().plain()
        target = self.request.target
        origin = Origin(self.request.graph, settled, self.devices, VERSION, composed, target)
        return replace(plan, origin=origin)

    def candidate(self, settings: Settings) -> Candidate:
        """Return these settings with their plan and its prediction."""
        key = tuple(overrides(settings))
        if key not in self.cache:
            self.cache[key] = self._evaluated(settings)
        return self.cache[key]

    def _evaluated(self, settings: Settings) -> Candidate:
        try:
            plan = predict(self.plan(settings), self.scenario, must_fit=False)
            plan = on_whole_hosts(plan, self.scenario.cluster)
        except GraphError as error:
            return Candidate(settings, None, error.problems[0].law)
        return Candidate(settings, plan)

    def on(self, devices: int) -> Evaluator:
        """Return an evaluator of the same graph on more devices, with as many more hosts as they take."""
        cluster = self.scenario.cluster
        hosts = max(-(-devices // cluster.devices), cluster.hosts)
        return self._of_size(hosts, devices)

    def on_hosts(self, hosts: int) -> Evaluator:
        """Return an evaluator of the same graph on all devices of so many hosts."""
        return self._of_size(hosts, hosts * self.scenario.cluster.devices)

    def _of_size(self, hosts: int, devices: int) -> Evaluator:
        cluster = self.scenario.cluster.model_copy(update={"hosts": hosts})
        scenario = replace(self.scenario, cluster=cluster)
        return replace(self, devices=devices, scenario=scenario, cache={})
