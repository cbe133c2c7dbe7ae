"""Measures the stages of a region that streams: how long each worked, waited for rows, and was held back.

    generation ─> steps behind it, by pool ─> buffer ─> update

An iteration is measured from when the one before had its rows to when it has its own, its update from when
it asks for them. ``StreamClock`` notes what no report of a step says: when groups came and went, and when
nothing might begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.intake import IntakeTimes, StageSeconds
from rlgraph.runtime.driver.iteration import Execution, FinishedStep

TimeSpan = tuple[float, float]


def stages(execution: Execution) -> dict[str, float]:
    """Return the seconds of each stage of the regions that stream: see docs/metrics.md."""
    values: dict[str, float] = {}
    for name, stream in execution.streams.items():
        if window := stream.window:
            ran = [one.ran for one in execution.rounds[name]]
            rounds = [{item.step.id: _span(item) for item in each if item.reports} for each in ran]
            steps = [step for step in execution.steps if not step.facts.collects]
            own = [FinishedStep(step, made) for step in steps if (made := execution.rows.reports[step.id])]
            drawn = next(step.id for step in stream.steps if step.leaves)
            behind = [step for step in stream.steps if step.id > drawn]
            busy = covered(one[drawn] for one in rounds)
            whole = window.until - window.since
            told = {
                "generation": (busy, whole - busy - window.held, window.held),
                **{f"behind/{pool}": spent for pool, spent in _behind(behind, rounds, whole).items()},
                "buffer": window.buffer,
                "update": _update(window, own),
            }
            for stage, seconds in told.items():
                for what, took in zip(("busy", "starved", "held"), seconds, strict=True):
                    values[f"perf/stage/{stage}/{what}"] = max(took, 0.0)
    return values


def _behind(
    steps: Sequence[Step], rounds: Sequence[Mapping[int, TimeSpan]], whole: float
) -> dict[str, StageSeconds]:
    """Return those of each pool; one is held back that has rows, and whose devices or CPUs are not free."""
    spent = {}
    for pool in dict.fromkeys(step.pool for step in steps):
        pairs = [(step, one) for one in rounds for step in steps if step.pool == pool and step.id in one]
        busy = covered(one[step.id] for step, one in pairs)
        able = covered((_ready(step, one), one[step.id][1]) for step, one in pairs)
        spent[pool] = busy, whole - able, able - busy
    return spent


def _ready(step: Step, one: Mapping[int, TimeSpan]) -> float:
    """Return when a step of a round had what it reads."""
    start, _ = one[step.id]
    return min(start, max((one[number][1] for number in step.after if number in one), default=start))


def _update(window: IntakeTimes, own: Sequence[FinishedStep]) -> StageSeconds:
    """Return those of what is behind the buffer; weights that go wait for the pool that gets them."""
    syncs = [ran for ran in own if ran.step.facts.syncs]
    starts = [[report.start for report in ran.reports.values()] for ran in syncs]
    held = sum(max(each) - min(each) for each in starts)
    there = max((_span(ran)[1] for ran in syncs), default=window.asked)
    busy = covered(map(_span, own)) - held
    return busy, window.until - max(there, window.asked), held


def _span(ran: FinishedStep) -> TimeSpan:
    reports = ran.reports.values()
    return min(report.start for report in reports), max(report.end for report in reports)


def covered(spans: Iterable[TimeSpan]) -> float:
    """Return the seconds in which there is at least one span.

    Example:
        >>> covered([(3, 4), (0, 2), (1, 2.5)])
        3.5
    """
    seconds, last = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(end - max(start, last), 0.0)
        last = max(last, end)
    return seconds
