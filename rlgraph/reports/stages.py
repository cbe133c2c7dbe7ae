"""The bottleneck of a region that streams, and the time of each of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlgraph.ir.actions import Kind
from rlgraph.ir.plan import Plan
from rlgraph.reports.measured import MetricsLine, mean_of

PREFIX = "perf/stage/"  # of metrics; then come a stage and one of STATES
BEHIND = "behind/"  # of stages: the steps of a pool between generation and the update
STATES = ("busy", "starved", "held")
LITTLE = 0.1  # share of an iteration; a stage that waits for less than that does not wait
MORE = "raise schedule.buffer.staleness, so that more groups are under way"


@dataclass(frozen=True)
class Stage:
    """A stage of a stream: its seconds per iteration, in which it worked, waited for input, was held back."""

    about: str
    busy: float
    starved: float
    held: float
    whole: float  # seconds of an iteration

    @property
    def has_rows(self) -> float:
        """Return the seconds in which it works, or can't hand on what it has made."""
        return self.busy + self.held

    def share(self, seconds: float) -> str:
        """Return some of its seconds as a share of an iteration."""
        return f"{seconds / self.whole:.0%}"


def stages(plan: Plan, timed: Sequence[MetricsLine]) -> dict[str, Stage]:
    """Return the stages of a run in their order, means over iterations; none where nothing streams."""
    metrics = dict.fromkeys(metric for line in timed for metric in line if metric.startswith(PREFIX))
    means = {metric.removeprefix(PREFIX): mean_of(timed, metric) or 0.0 for metric in metrics}
    iteration = sum(means.get(f"buffer/{state}", 0.0) for state in STATES)
    names = dict.fromkeys(metric.rpartition("/")[0] for metric in means)
    result: dict[str, Stage] = {}
    for name in names:
        busy = means[f"{name}/busy"]
        starved = means[f"{name}/starved"]
        held = means[f"{name}/held"]
        if name == "generation" or name.startswith(BEHIND):
            # a step counts in the iteration in which it ends: only over several do the states add up
            starved = max(iteration - busy - held, 0.0)
        result[name] = Stage(_description(plan, name), busy, starved, held, iteration)
    return result


def _description(plan: Plan, stage: str) -> str:
    """Return a stage in words: its steps and their pool, if it is behind generation; else its name."""
    if not stage.startswith(BEHIND):
        return stage
    pool = stage.removeprefix(BEHIND)
    in_region = [step for step in plan.steps if step.region and step.kind is not Kind.COLLECT]
    rollout = next(step for step in in_region if step.unfinished)
    steps = [step for step in in_region if step.pool == pool and step.id > rollout.id]
    # moves of columns, and the filter, take next to nothing
    working = [step for step in steps if not step.inserted and step.node != step.region]
    nodes = [step.node for step in working or steps]
    return f"{', '.join(nodes)} on {pool}"


def bottleneck(plan: Plan, by_name: Mapping[str, Stage]) -> str:
    """Return a sentence that names the stage that decides, and what to change; "" where nothing streams."""
    if not by_name:
        return ""
    generation, buffer, update = by_name["generation"], by_name["buffer"], by_name["update"]
    iteration = update.whole
    little = LITTLE * iteration
    if update.starved < little:
        return _update_decides(plan, update)
    # between generation and the update; of equals the last one holds back the others
    stages_between = [stage for name, stage in by_name.items() if name.startswith(BEHIND)]
    slowest = max(reversed(stages_between), key=lambda stage: stage.has_rows, default=None)
    if slowest and slowest.has_rows > max(generation.busy, update.busy):
        law = f"{slowest.about} decides: it has rows {update.share(slowest.has_rows)} of the time, "
        law += f"and works {update.share(slowest.busy)}"
        return f"{law}; make it faster, give it more room, or {MORE}"
    # there were enough rows at least so long, and those of older weights come first
    waited_for_old = buffer.held + update.starved - iteration
    if waited_for_old > little:
        law = f"groups that take long decide: {update.share(waited_for_old)} of the time there are enough "
        return f"{law}rows, and the update waits for groups of older weights, which come first; {MORE}"
    return _generation_decides(plan, generation, update)


def _update_decides(plan: Plan, update: Stage) -> str:
    pool = next(step.pool for step in plan.steps if step.updated)
    law = f"the update decides: it waits for rows {update.share(update.starved)} of the time"
    return f"{law}; give pool {pool} more devices: more staleness gains nothing"


def _generation_decides(plan: Plan, generation: Stage, update: Stage) -> str:
    pool = next(step.pool for step in plan.steps if step.unfinished)
    little = LITTLE * update.whole
    if generation.busy > update.whole - little:
        law = f"generation decides: it is busy {generation.share(generation.busy)} of the time"
        return f"{law}; give pool {pool} more devices or, where its slots are not full, {MORE}"
    if generation.held > little:
        law = f"generation may begin nothing {generation.share(generation.held)} of the time, "
        law += f"and the update has no rows {update.share(update.starved)}"
        return f"{law}: they wait for each other; {MORE}"
    law = f"generation decides: it waits {generation.share(generation.starved)} of the time for prompts, "
    return f"{law}weights or its devices; see which steps share pool {pool}"
