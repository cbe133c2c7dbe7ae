"""Says where a region that streams is held up: what each of its stages did, and which of them decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlgraph.ir.plan import Plan
from rlgraph.reports.measured import MetricsLine, mean_of

PREFIX, BEHIND = "perf/stage/", "behind/"
LITTLE = 0.1  # share of an iteration; a stage that waits for less than that does not wait
MORE = "raise schedule.stream.staleness, so that more groups are under way"


@dataclass(frozen=True)
class Stage:
    """A stage of a stream: its seconds per iteration, in which it worked, waited for input, was held back."""

    about: str
    busy: float
    starved: float
    held: float
    whole: float  # seconds of an iteration

    def share(self, seconds: float) -> str:
        """Return some of its seconds as a share of an iteration."""
        return f"{seconds / self.whole:.0%}"


def stages(plan: Plan, timed: Sequence[MetricsLine]) -> dict[str, Stage]:
    """Return the stages of a run in their order, means over iterations; none where nothing streams."""
    means = {name: mean_of(timed, name) or 0.0 for line in timed for name in line if name.startswith(PREFIX)}
    told: dict[str, Stage] = {}
    whole = sum(took for name, took in means.items() if name.startswith(f"{PREFIX}buffer/"))
    for name in dict.fromkeys(name.removeprefix(PREFIX).rpartition("/")[0] for name in means):
        busy, starved, held = (means[f"{PREFIX}{name}/{what}"] for what in ("busy", "starved", "held"))
        if name == "generation" or name.startswith(BEHIND):
            # a step counts in the iteration in which it ends: only over several do they add up
            starved = max(whole - busy - held, 0.0)
        told[name] = Stage(_about(plan, name), busy, starved, held, whole)
    return told


def _about(plan: Plan, name: str) -> str:
    if not name.startswith(BEHIND):
        return name
    pool, steps = name.removeprefix(BEHIND), [s for s in plan.steps if s.region and not s.facts.collects]
    drawn = next(step.id for step in steps if step.leaves)
    own = [step for step in steps if step.id > drawn and step.pool == pool]
    # moves of columns, and the filter, take next to nothing
    named = [step.node for step in own if not step.inserted and step.node != step.region]
    return f"{', '.join(named or (step.node for step in own))} on {pool}"


def bottleneck(plan: Plan, told: Mapping[str, Stage]) -> str:
    """Return a sentence that names the stage that decides, and what to change; "" where nothing streams."""
    if not told:
        return ""
    generation, buffer, update = (told[name] for name in ("generation", "buffer", "update"))
    whole, starved = update.whole, update.share(update.starved)
    serves, trains = (next(s.pool for s in plan.steps if getattr(s, has)) for has in ("leaves", "updated"))
    if update.starved < LITTLE * whole:
        law = f"the update decides: it waits for rows {starved} of the time"
        return f"{law}; give pool {trains} more devices: more staleness gains nothing"
    able = {stage.busy + stage.held: stage for name, stage in told.items() if name.startswith(BEHIND)}
    if (most := max(able, default=0.0)) > max(generation.busy, update.busy):
        law = f"{able[most].about} decides: it has rows {update.share(most)} of the time, "
        return f"{law}and works {update.share(able[most].busy)}; make it faster, give it more room, or {MORE}"
    # there were enough rows at least so long, and those of older weights come first
    if (waited := buffer.held + update.starved - whole) > LITTLE * whole:
        law = f"groups that take long decide: {update.share(waited)} of the time there are enough rows, and "
        return f"{law}the update waits for groups of older weights, which come first; {MORE}"
    if generation.busy > (1 - LITTLE) * whole:
        law = f"generation decides: it is busy {generation.share(generation.busy)} of the time"
        return f"{law}; give pool {serves} more devices or, where its slots are not full, {MORE}"
    if generation.held > LITTLE * whole:
        law = f"generation may begin nothing {generation.share(generation.held)} of the time, "
        return f"{law}and the update has no rows {starved}: they wait for each other; {MORE}"
    law = f"generation decides: it waits {generation.share(generation.starved)} of the time for prompts, "
    return f"{law}weights or its devices; see which steps share pool {serves}"
