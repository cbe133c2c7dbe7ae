"""Measures the stages of a region that streams: how long each worked, waited for rows, and was blocked.

    generation ─> steps behind it, by pool ─> buffer ─> update

An iteration is measured from when the one before had its rows to when it has them, and its update from when
it asks for them. ``StreamClock`` notes what no report of a step says: when groups came and went, and when no
round might begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlgraph.ir.actions import Collect, Sync
from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.intake import Intake, IntakeTimes, StageSeconds
from rlgraph.runtime.driver.iteration import Execution, FinishedStep

TimeSpan = tuple[float, float]
RoundSpans = Mapping[int, TimeSpan]  # number of a step -> when it ran in a round


def stages(execution: Execution) -> dict[str, float]:
    """Return the seconds of each stage of the regions that stream: see docs/metrics.md."""
    values: dict[str, float] = {}
    for name, intake in execution.streams.items():
        if intake.times is None:
            continue
        stage_seconds = _stages(execution, intake, intake.times, execution.rounds[name])
        for stage, seconds in stage_seconds.items():
            values[f"perf/stage/{stage}/busy"] = max(seconds.busy, 0.0)
            values[f"perf/stage/{stage}/starved"] = max(seconds.starved, 0.0)
            values[f"perf/stage/{stage}/held"] = max(seconds.blocked, 0.0)
    return values


def _stages(
    execution: Execution, intake: Intake, times: IntakeTimes, rounds: Sequence[Execution]
) -> dict[str, StageSeconds]:
    spans = [_spans(round) for round in rounds]
    rollout = next(step.id for step in intake.steps if step.unfinished)
    total = times.end - times.start
    drawing = covered(round[rollout] for round in spans)
    seconds = {
        "generation": StageSeconds(
            busy=drawing, starved=total - drawing - times.blocked_seconds, blocked=times.blocked_seconds
        )
    }
    steps_behind = [step for step in intake.steps if step.id > rollout]
    for pool in dict.fromkeys(step.pool for step in steps_behind):
        steps = [step for step in steps_behind if step.pool == pool]
        seconds[f"behind/{pool}"] = _measuring(steps, spans, total)
    seconds["buffer"] = times.buffer
    seconds["update"] = _update(execution, times)
    return seconds


def _spans(execution: Execution) -> RoundSpans:
    return {item.step.id: _span(item) for item in execution.finished_steps if item.reports}


def _measuring(steps: Sequence[Step], rounds: Sequence[RoundSpans], total: float) -> StageSeconds:
    """Return the seconds of a pool's steps behind the samples.

    A step is held back from when it has rows until its devices or CPUs are free.
    """
    running: list[TimeSpan] = []
    with_rows: list[TimeSpan] = []  # from when a step has its rows until it ends
    for round in rounds:
        for step in steps:
            if step.id in round:
                _, end = round[step.id]
                running.append(round[step.id])
                with_rows.append((_ready(step, round), end))
    busy = covered(running)
    with_rows_seconds = covered(with_rows)
    return StageSeconds(busy=busy, starved=total - with_rows_seconds, blocked=with_rows_seconds - busy)


def _ready(step: Step, round: RoundSpans) -> float:
    """Return when a step of a round had the columns that it reads."""
    start, _ = round[step.id]
    input_ends = [round[number][1] for number in step.after if number in round]
    return min(start, max(input_ends, default=start))


def _update(execution: Execution, times: IntakeTimes) -> StageSeconds:
    """Return the seconds of the steps behind the buffer; weights that go wait for the pool that gets them."""
    finished = list[FinishedStep]()
    for step in execution.steps:
        reports = execution.rows.reports[step.id]
        if reports and not isinstance(step.action, Collect):
            finished.append(FinishedStep(step, reports))
    blocked = 0.0
    free = times.request
    syncs = [item for item in finished if isinstance(item.step.action, Sync)]
    if syncs:
        free = max(_span(item)[1] for item in syncs)
    for item in syncs:
        starts = [report.start for report in item.reports.values()]
        blocked += max(starts) - min(starts)
    busy = covered(_span(item) for item in finished) - blocked
    return StageSeconds(busy=busy, starved=times.end - max(free, times.request), blocked=blocked)


def _span(item: FinishedStep) -> TimeSpan:
    reports = item.reports.values()
    start = min(report.start for report in reports)
    end = max(report.end for report in reports)
    return start, end


def covered(spans: Iterable[TimeSpan]) -> float:
    """Return the seconds in which there is at least one span.

    Example:
        >>> covered([(3, 4), (0, 2), (1, 2.5)])
        3.5
    """
    seconds = 0.0
    covered_until = 0.0
    for start, end in sorted(spans):
        seconds += max(end - max(start, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return seconds
