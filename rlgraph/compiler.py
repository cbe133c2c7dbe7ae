"""From a request to its plan: a graph, its settings, and what to plan it for, compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlgraph.engines.registry import SERVERS, is_installed
from rlgraph.errors import GraphError, Problem, fail
from rlgraph.frontend.compose import as_written
from rlgraph.ir.chosen import open_settings
from rlgraph.ir.plan import Origin, Plan, Target
from rlgraph.lowering import Lowered, lower_tree, plan_tree, uncollected
from rlgraph.planning.auto_settings import embedded, fixed
from rlgraph.planning.device_groups import aligned, on_whole_hosts
from rlgraph.planning.model_limits import suit_models
from rlgraph.request import PlanRequest
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import Tree
from rlgraph.version import VERSION
from rlgraph.warnings.find import find_warnings

if TYPE_CHECKING:
    from rlgraph.costs.hardware import Here
    from rlgraph.planning.predict import Scenario
    from rlgraph.search.evaluate import Evaluator


class Compilation:
    """The stages between a request and its plan. Each is made when it is first asked for, and only once.

    Invariants:
        - ``plan`` and ``warnings`` are of the same lowered graph, which is of the same tree.
        - Every stage raises a GraphError with all the problems that can be found by then.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request

    @cached_property
    def written(self) -> Tree:
        """The graph after all edits, with its ``${...}`` still in place."""
        return self.request.edited or as_written(self.request.graph, self.request.overrides)

    @cached_property
    def tree(self) -> Tree:
        """The composed graph, with ``${...}`` filled in."""
        try:
            return interpolate(self.written)
        except GraphError as error:
            problems = [*error.problems, *self._problems_beside(error.valid_tree)]
            raise GraphError(dict.fromkeys(problems)) from None

    @cached_property
    def lowered(self) -> Lowered:
        """The graphs of training and evaluation after all passes."""
        return self._lower(self.tree, self._devices)

    @cached_property
    @uncollected()
    def plan(self) -> Plan:
        """The plan, with everything settled that the request allows to settle. It remembers its origin."""
        request = self.request
        target, cluster = request.target, None
        plan = self.lowered.plan
        if request.devices and not target:
            _check_pool_sizes(plan, self.tree, request.devices)
        suit_models(plan)
        if self._devices:
            _check_four_bits(plan, self.tree)
        if self._scenario:
            cluster = self._scenario.cluster
            plan = self._predicted(plan, self._scenario)
        elif self._device == "cuda":
            plan, target = self._for_gpus(plan)
        else:
            plan = aligned(fixed(plan))
        composed = self.tree.written().plain()
        devices = sum(plan.pools.values())
        origin = Origin(request.graph, tuple(request.overrides), devices, VERSION, composed, target)
        return on_whole_hosts(replace(plan, origin=origin), cluster)

    @cached_property
    @uncollected()
    def warnings(self) -> Sequence[Problem]:
        """Warnings of what the graph likely does not mean, each with its place and an edit that mends it."""
        return find_warnings(self.written, self.lowered)

    def warn(self, strict: bool) -> Sequence[Problem]:
        """Return the warnings; where ``strict``, raise them.

        Raises:
            GraphError: there are warnings, and ``strict`` makes errors of them.
        """
        if strict and self.warnings:
            raise GraphError(replace(problem, grade="error") for problem in self.warnings)
        return self.warnings

    def evaluator(self, scenario: Scenario) -> Evaluator:
        """Return what plans and predicts this graph with other settings, in a scenario."""
        from rlgraph.search.evaluate import Evaluator

        def make_plan(tree: Tree, devices: int) -> Plan:
            return self._lower(tree, devices).plan

        return Evaluator(self.request, self.written, make_plan, self._devices, scenario)

    def _lower(self, tree: Tree, devices: int) -> Lowered:
        target = self.request.target
        runs_here = target is None or target.cluster == "auto"
        # a named cluster is another machine: there SGLang may be installed that is missing here
        if runs_here and self._device == "cuda" and not is_installed(SERVERS):
            tree = embedded(tree)
        return lower_tree(tree, devices, self._device)

    def _predicted(self, plan: Plan, scenario: Scenario) -> Plan:
        """Return the plan as predicted. If it does not fit, settings are chosen that the graph leaves open;
        if it does not fit with any, the error has the changes that would help."""
        # a third of rlgraph, which only plans for a cluster need
        from rlgraph.planning.predict import DoesNotFitError, predict

        try:
            return predict(plan, scenario)
        except DoesNotFitError as error:
            from rlgraph.search.fit import choose, with_remedies
            from rlgraph.search.text import choice_text

            evaluator = self.evaluator(scenario)
            paths = open_settings(plan, self.tree.written().plain())
            choice = choose(error, evaluator, paths)
            if choice is None:
                raise with_remedies(error, evaluator, paths) from None
            assert choice.plan
            note = choice_text(choice, error)
            # the same run, whatever was chosen on this cluster
            return replace(choice.plan, digest=plan.digest, notes=(*choice.plan.notes, note))

    def _for_gpus(self, plan: Plan) -> tuple[Plan, Target | None]:
        """Return the plan for ``--cluster auto``; where that can't tell what devices hold, a note says so."""
        target = Target("auto")
        try:
            scenario = _scenario_of(target, self.request.here, self._devices)
            if scenario.cluster.device != "cuda":
                raise fail("auto-cluster", "this machine has no GPUs to ask what they hold", None)
            return self._predicted(plan, scenario), target
        except GraphError as error:
            kinds = {problem.kind for problem in error.problems}
            if not kinds <= {"auto-cluster", "unknown-size"}:
                raise
            law = f"memory is not planned, and all engines stay on their devices: {error.problems[0].law}"
            note = f"{law} (--cluster says what the devices are)"
            plan = aligned(fixed(plan))
            return replace(plan, notes=(*plan.notes, note)), None

    @cached_property
    def _scenario(self) -> Scenario | None:
        request = self.request
        if request.target is None:
            return None
        return _scenario_of(request.target, request.here, request.devices)

    @cached_property
    def _device(self) -> str:
        if self._scenario:
            return self._scenario.cluster.device
        return self.request.device

    @cached_property
    def _devices(self) -> int:
        """The number of devices that ``auto`` stands for in pools."""
        request = self.request
        if self._scenario:
            return request.devices or self._scenario.cluster.total
        if request.devices is not None:
            return request.devices
        if request.here:
            return request.here().total
        from rlgraph.costs.detect import local_devices

        return local_devices()

    def _problems_beside(self, rest: Tree | None) -> Sequence[Problem]:
        """Return the problems in the rest of a graph some of whose settings could not be made."""
        if rest is None:
            return ()
        try:
            plan_tree(interpolate(rest), self.request.devices or 0, self.request.device)
        except GraphError as error:
            return error.problems
        return ()


def compile_graph(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    target: Target | None = None,
    here: Here | None = None,
    device: str = "cpu",
) -> Plan:
    """Check a graph and return its plan. The arguments are those of ``PlanRequest``.

    Raises:
        GraphError: with every problem found.
    """
    return Compilation(PlanRequest(graph, overrides, devices, target, here, device)).plan


def _check_four_bits(plan: Plan, tree: Tree) -> None:
    """Check that models with weights in 4 bits train on one device: these are not sharded."""
    for name, model in plan.models.items():
        if not model.train or not model.train.lora or not model.train.lora.quantize:
            continue
        pool = model.train.pool
        if plan.pools[pool] == 1:
            continue
        law = f"weights in 4 bits are held by one device (models.{name}.train.lora.quantize), "
        law += f"and pool {pool} has {plan.pools[pool]}"
        remedy = f"set pools.{pool}.devices=1, or leave out models.{name}.train.lora.quantize"
        mark = tree.at(("models", name, "train", "lora", "quantize")).mark
        raise fail("four-bits", law, mark, remedy=remedy)


def _check_pool_sizes(plan: Plan, tree: Tree, devices: int) -> None:
    """Check that the pools have so many devices together, or one each."""
    total = sum(plan.pools.values())
    has_one_each = devices == 1 and total == len(plan.pools)
    if total == devices or has_one_each:
        return
    sizes = ", ".join(f"pools.{name}.devices: {size}" for name, size in plan.pools.items())
    requested = f"{devices} are asked for (--devices)"
    if devices == 1:
        requested = "1 is asked for (--devices, or --inline)"
    largest = max(plan.pools, key=lambda name: plan.pools[name])
    law = f"the graph's pools have {total} devices ({sizes}); {requested}"
    remedy = f"give --devices {total}, or pools.{largest}.devices=auto, which takes what others leave"
    raise fail("pool-size", law, tree.at(("pools", largest, "devices")).mark, remedy=remedy)


def _scenario_of(target: Target, here: Here | None, devices: int | None) -> Scenario:
    """Return a target's scenario; of ``auto``, with as many hosts like ``here`` as its GPUs take."""
    from rlgraph.planning.predict import Scenario

    scenario = Scenario.of(target, here)
    cluster = scenario.cluster
    hosts = -(-(devices or 0) // cluster.devices)
    is_of_gpus_here = target.cluster == "auto" and cluster.device == "cuda"
    if not is_of_gpus_here or hosts <= cluster.hosts:
        return scenario
    return replace(scenario, cluster=cluster.model_copy(update={"hosts": hosts}))
