"""When each step of a plan is expected to run, on which devices, and what they hold then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlgraph import __version__
from rlgraph.cluster import load_cluster
from rlgraph.errors import GraphError
from rlgraph.memory import PARTS, Footprint, away_items
from rlgraph.pipeline import guess
from rlgraph.plan import Plan, Step
from rlgraph.predict import sizes_of
from rlgraph.simulate import Event, period, simulate, steady
from rlgraph.workload import workload

Place = tuple[str, int]  # a pool, and a device's number in it
Parts = dict[str, int]  # what a device holds: part -> bytes


@dataclass(frozen=True)
class Arrow:
    """From a step of one iteration to a step of another or the same: what goes along."""

    source: tuple[int, int]  # the step's number, its iteration
    target: tuple[int, int]
    name: str


@dataclass(frozen=True)
class Lane:
    """Devices of a pool that do the same all the time, from the first to the last."""

    pool: str
    first: int
    last: int
    steps: frozenset[int]


def seconds_of(plan: Plan) -> dict[int, float]:
    """Step -> seconds: between best and worst where they are predicted, else a rough relative guess."""
    return {s.id: math.sqrt(s.seconds[0] * s.seconds[1]) if s.seconds else guess(s) for s in plan.steps}


def depth(plan: Plan) -> int:
    """How many iterations generation runs ahead."""
    return max((step.lead for step in plan.steps), default=0)


def expected(plan: Plan) -> tuple[list[Event], float]:
    """The events of some iterations, from an empty pipeline to an empty one, and the seconds of one.

    Every step is shown in each, those too that some iterations leave out.
    """
    ahead = depth(plan)
    count = 4 * (ahead + 1) if ahead else 3
    events = simulate(steady(plan), seconds_of(plan), count)
    return events, period(events, count)


def places(plan: Plan, step: Step) -> Iterator[Place]:
    """The devices that are busy with a step; those of a sync between pools on both sides."""
    yield from ((step.pool, device) for device in step.devices)
    if step.source:
        yield from ((step.source, device) for device in range(plan.pools[step.source]))


def lanes(plan: Plan) -> list[Lane]:
    """The devices of all pools; neighbours that do the same share a lane.

    Example:
        >>> from rlgraph.compiler import compile_graph
        >>> [(lane.first, lane.last) for lane in lanes(compile_graph("grpo", devices=8))]
        [(0, 0), (1, 7)]
    """
    busy: dict[Place, set[int]] = {(p, d): set() for p, count in plan.pools.items() for d in range(count)}
    for step in plan.steps:
        for place in places(plan, step):
            busy[place].add(step.id)
    found: list[Lane] = []
    for (pool, device), steps in busy.items():
        last = found[-1] if found else None
        if last and last.pool == pool and last.steps == steps:
            found[-1] = Lane(pool, last.first, device, last.steps)
        else:
            found.append(Lane(pool, device, device, frozenset(steps)))
    return found


def arrows(plan: Plan, iterations: int) -> list[Arrow]:
    """What goes from step to step in some iterations: columns, and weights, also to the next iteration."""
    found = []
    by_id = {step.id: step for step in plan.steps}
    for iteration in range(iterations):
        for step in plan.steps:
            for number in step.after:
                name = _carried(by_id[number], step)
                if name:
                    found.append(Arrow((number, iteration), (step.id, iteration), name))
            found += [a for a in _synced(plan, step, iteration) if a.source[1] >= 0]
    return found


def _carried(source: Step, target: Step) -> str:
    """The columns or the weights that one step has of another; nothing where it only waits."""
    columns = [column for column in target.reads if column in source.writes]
    same = [f"{name}@{label}" for name, label in target.models.items() if label and name in source.models]
    return ", ".join(columns) or (", ".join(same) if source.updates or source.kind == "sync" else "")


def _synced(plan: Plan, step: Step, iteration: int) -> Iterator[Arrow]:
    """From the update of an earlier iteration to the sync that hands its weights to the serve engine."""
    if step.kind != "sync":
        return
    for model, version in step.models.items():
        updates = [s.id for s in plan.steps if s.updated == model]
        behind = int(version[1:] or 0)
        if updates and behind <= 0:
            source = iteration - 1 + behind
            yield Arrow((updates[-1], source), (step.id, iteration), f"{model}@{version}")


def footprint(plan: Plan) -> Footprint | None:
    """What the steps hold on the cluster that a plan was made for; None where none is known here."""
    origin = plan.origin
    target = origin.target if origin else None
    if origin is None or target is None or plan.predicted is None or origin.rlgraph != __version__:
        return None  # another version may count otherwise than the plan says
    try:
        cluster, sizes = load_cluster(target.cluster), sizes_of(plan)
    except GraphError:  # a saved plan may be looked at where its cluster's file and its models are not
        return None
    if cluster.cluster != plan.predicted.cluster:
        return None
    return Footprint(plan, cluster, workload(plan, target.prompt_tokens, target.response_tokens), sizes)


def memory(found: Footprint, pool: str) -> dict[int, Parts]:
    """What a device of a pool holds in each training step, part by part; 0: between two iterations."""
    moments = {step.id: parts for step, parts in found.moments(pool, found.in_order())}
    moments[0] = found.resident(pool, set(away_items(found.plan)))
    return {n: {part: parts[part] for part in PARTS if parts[part]} for n, parts in moments.items()}


def engines(plan: Plan) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Engine, as ``policy.train`` -> its pool, and the parts of it that may leave the device."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, model in plan.models.items():
        if model.train:
            parts = ("parameters",) if model.frozen else ("parameters", "optimizer")
            found[f"{name}.train"] = (str(model.train["pool"]), parts)
        if model.serve:
            found[f"{name}.serve"] = (str(model.serve["pool"]), ("weights",))
    return found
