"""One function leads from a graph's name to its plan."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from rlgraph.costs.detect import local_devices
from rlgraph.costs.hardware import Here
from rlgraph.engines.registry import OFFLOADS, SERVERS, is_installed
from rlgraph.errors import GraphError, Problem, fail
from rlgraph.frontend.bind import bind, bind_evaluation
from rlgraph.frontend.compose import compose
from rlgraph.ir.graph import Graph
from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import Origin, Plan, Target
from rlgraph.passes import PASSES
from rlgraph.passes.lower import make_plan
from rlgraph.passes.verify import verify
from rlgraph.planning.auto_settings import embedded, fixed
from rlgraph.planning.device_groups import aligned, on_whole_hosts
from rlgraph.planning.lending import lend_asked
from rlgraph.planning.model_limits import suit_models, with_axis_sizes
from rlgraph.planning.overlap import pipeline
from rlgraph.planning.predict import Scenario, predict
from rlgraph.planning.shared_weights import share_weights
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder
from rlgraph.version import VERSION

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


@uncollected()
def compile_graph(
    graph: str,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    target: Target | None = None,
    here: Here | None = None,
    device: str = "cpu",
    tree: Tree | None = None,
    seen: Callable[[Lowered], None] | None = None,
) -> Plan:
    """Check a graph and return its plan, which remembers what it was made from.

    Args:
        graph: a path, or the name of a shipped graph.
        overrides: ``key=value`` settings, applied last.
        devices: how many devices the pools have together, or 1, each; those of the target, or of this
            machine, unless given. 0: whatever machine this is, so many in each pool as its groups fit into.
        target: the cluster to plan for: with it the plan says what it takes there, and moves engines off
            their devices where it would not fit else.
        here: what `auto` stands for, both as a cluster and as a number of devices: this machine unless given.
        device: without a target, what the devices are, ``cuda`` or ``cpu``. GPUs are taken to be like those
            of ``here``, on as many hosts as they need, and ``--cluster auto`` is implied where it can be.
        tree: the composed graph, where it has edits that neither ``graph`` nor ``overrides`` have.
        seen: called with the graph behind all passes, in which warnings are looked for.

    Raises:
        GraphError: with every problem found.
    """
    try:
        tree = tree or compose(graph, overrides)
    except GraphError as error:
        raise GraphError(
            dict.fromkeys([*error.problems, *_further(error.rest, devices or 0, device)])
        ) from None
    scenario = _scenario(target, here, devices) if target else None
    if scenario:
        count, device = devices or scenario.cluster.total, scenario.cluster.device
    elif devices is None:
        count = here().total if here else local_devices()
    else:
        count = devices
    own = target is None or target.cluster == "auto"  # SGLang may be missing where the run is planned
    bare = own and device == "cuda" and not is_installed(SERVERS)
    lowered = lower_tree(embedded(tree) if bare else tree, count, device)
    if seen:
        seen(lowered)
    plan = lowered.plan
    if devices and not target:
        _as_asked(plan, tree, devices)
    suit_models(plan)
    if scenario:
        plan = predict(plan, scenario)
    elif device == "cuda":
        plan, target = _for_gpus(plan, here, count)
    else:
        plan = aligned(fixed(plan))
    origin = Origin(
        graph, tuple(overrides), sum(plan.pools.values()), VERSION, tree.written().plain(), target
    )
    return on_whole_hosts(replace(plan, origin=origin), scenario.cluster if scenario else None)


def _as_asked(plan: Plan, tree: Tree, devices: int) -> None:
    """Check that the pools have so many devices together, or one each."""
    total = sum(plan.pools.values())
    if total == devices or total == len(plan.pools) > devices == 1:
        return
    sizes = ", ".join(f"pools.{name}.devices: {size}" for name, size in plan.pools.items())
    asked = (
        f"{devices} are asked for (--devices)" if devices > 1 else "1 is asked for (--devices, or --inline)"
    )
    largest = max(plan.pools, key=lambda name: plan.pools[name])
    remedy = f"give --devices {total}, or pools.{largest}.devices=auto, which takes what others leave"
    mark = tree.at(("pools", largest, "devices")).mark
    raise fail("pool-size", f"the graph's pools have {total} devices ({sizes}); {asked}", mark, remedy=remedy)


def _further(rest: Tree | None, devices: int, device: str) -> Sequence[Problem]:
    """Return the problems of a graph some of whose settings could not be made."""
    try:
        if rest:
            plan_tree(interpolate(rest), devices, device)
    except GraphError as error:
        return error.problems
    return ()


def _scenario(target: Target, here: Here | None, devices: int | None) -> Scenario:
    """Return a target's scenario; of ``auto``, with as many hosts like ``here`` as its GPUs take."""
    scenario = Scenario.of(target, here)
    cluster = scenario.cluster
    hosts = -(-(devices or 0) // cluster.devices)
    if target.cluster != "auto" or cluster.device != "cuda" or hosts <= cluster.hosts:
        return scenario
    return replace(scenario, cluster=cluster.model_copy(update={"hosts": hosts}))


def _for_gpus(plan: Plan, here: Here | None, devices: int) -> tuple[Plan, Target | None]:
    """Return the plan for ``--cluster auto``; where that can't tell what devices hold, a note says so."""
    target = Target("auto")
    try:
        scenario = _scenario(target, here, devices)
        if scenario.cluster.device != "cuda":
            raise fail("auto-cluster", "this machine has no GPUs to ask what they hold", None)
        return predict(plan, scenario), target
    except GraphError as error:
        if {problem.kind for problem in error.problems} - {"auto-cluster", "unknown-size"}:
            raise
        law = f"memory is not planned, and all engines stay on their devices: {error.problems[0].law}"
        plan = aligned(fixed(plan))
        return replace(plan, notes=(*plan.notes, f"{law} (--cluster says what the devices are)")), None


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
