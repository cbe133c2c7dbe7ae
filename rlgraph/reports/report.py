"""Reports a run: what it reached and where its time went, beside predictions, from its files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.errors import GraphError, RlgraphError, fail
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.ir.early_stop import EarlyStop
from rlgraph.ir.plan import Plan
from rlgraph.ir.prediction import Peak
from rlgraph.planning.headline import Seconds
from rlgraph.planning.simulate import CriticalStep, busy, critical_path
from rlgraph.printing.alarm import alarm_text
from rlgraph.printing.headline import LABEL, headline
from rlgraph.reports.measured import MetricsLine, Priced, counted, objects, read_metrics, response_tokens
from rlgraph.reports.plan_file import load
from rlgraph.reports.stages import Stage, bottleneck, stages
from rlgraph.search.faster import LEAST_SAVING, Outlook, single_changes
from rlgraph.search.text import outlook_lines
from rlgraph.units import middle, range_text, seconds_text, size_text

LAST = ("time/step", "time/eval", "time/save")  # phases of the iteration, and after it
SHORT = 0.01  # share of the critical path; shorter steps are left out


@dataclass(frozen=True)
class ReportRow:
    """Seconds of a step per iteration, measured and predicted, and its share of the iteration's time."""

    step: str
    measured: float
    share: float
    predicted: Seconds | None = None

    @property
    def ratio(self) -> float | None:
        """Return measured over the middle of the predicted seconds."""
        if self.predicted is None:
            return None
        return self.measured / middle(self.predicted)

    @property
    def off(self) -> float:
        """Return the seconds between the two; without a prediction the seconds themselves."""
        if self.predicted is None:
            return self.measured
        return abs(self.measured - middle(self.predicted))


@dataclass(frozen=True)
class Memory:
    """The most bytes that a device of a pool has held, and the predicted peak.

    ``driver`` is what the device's driver counts, other processes such as servers among it; None on CPUs.
    """

    pool: str
    measured: float
    predicted: int | None = None
    capacity: int | None = None
    driver: float | None = None


@dataclass(frozen=True)
class RunReport:
    """A report of a run, measured and predicted. ``evaluations``: name -> (iterations done, value)."""

    run: str
    iterations: int
    evaluations: Mapping[str, Sequence[tuple[int, float]]]
    alarms: tuple[Mapping[str, Any], ...]  # what the watchdog has said
    ended: str  # what made it end before its last iteration; "" where nothing did
    best: str  # which of its checkpoints is best; "" where `schedule.best` does not say
    cluster: str | None  # the predictions' cluster
    assumed: tuple[str, ...]
    headline: Mapping[str, str]  # what was planned, as the plan says it
    response_tokens: float | None
    steps: tuple[ReportRow, ...]  # the worst prediction first
    outside: ReportRow | None
    iteration: ReportRow | None
    critical_path: tuple[CriticalStep, ...]
    idle: Mapping[str, float]  # pool -> the share of an iteration in which none of its steps runs
    memory: tuple[Memory, ...]
    stages: tuple[Stage, ...]  # of a region that streams
    bottleneck: str  # the one that decides, in a sentence
    outlook: Outlook | None
    why_none: str  # reason if there is no outlook

    def json(self) -> str:
        """Return JSON for tools: the fields, and of each row its ratio."""
        steps = [{**asdict(row), "ratio": row.ratio} for row in self.steps]
        return json.dumps({**asdict(self), "steps": steps}, indent=1)


def make_report(run_dir: Path, cluster: str | None = None, prompt_tokens: float | None = None) -> RunReport:
    """Return the report of a run directory.

    Where the run was planned for a cluster, predicted seconds stand beside the measured ones, and the step
    whose prediction is off by most seconds comes first; else the slowest does.

    Args:
        run_dir: of the run.
        cluster: predict for this one, with responses as long as they were, instead of as it was planned.
        prompt_tokens: the mean of a prompt, for ``cluster``.

    Raises:
        RunError: the folder holds no metrics, or ran on more devices than ``cluster`` has.
        GraphError: its plan can't be read, or ``cluster`` or a model is not known.
    """
    lines = read_metrics(run_dir)
    timed = counted(lines)
    plan, why_no_plan = _plan_of(run_dir, cluster, prompt_tokens, timed)
    predicted = plan.predicted if plan else None
    rows, iteration = _rows(plan, timed)
    timing = _timing(plan, rows, iteration)
    stages_by_name = stages(plan, timed) if plan else {}
    outlook, why_none = _outlook_of(run_dir, plan, cluster, prompt_tokens, timed)
    return RunReport(
        run=str(run_dir),
        iterations=sum("time/step" in line for line in lines),
        evaluations=_evaluations(lines),
        alarms=tuple(objects(run_dir / "alarms.jsonl")),
        ended=_ended(plan, lines),
        best=_best(run_dir, plan, lines),
        cluster=predicted.cluster if predicted else None,
        assumed=predicted.assumed if predicted else (),
        headline=headline(plan) if plan else {},
        response_tokens=response_tokens(timed),
        steps=tuple(sorted(rows, key=lambda row: -row.off)),
        outside=timing.outside,
        iteration=iteration,
        critical_path=timing.critical_path,
        idle=timing.idle,
        memory=tuple(_memory(plan, lines)),
        stages=tuple(stages_by_name.values()),
        bottleneck=bottleneck(plan, stages_by_name) if plan else "",
        outlook=outlook,
        why_none="" if outlook else why_no_plan or why_none,
    )


def _plan_of(
    run_dir: Path, cluster: str | None, prompt_tokens: float | None, timed: Sequence[MetricsLine]
) -> tuple[Plan | None, str]:
    """Return a run's plan, predicted for a cluster if one is given; or None and why it can't be read."""
    if cluster and timed:
        return Priced.of(run_dir, cluster, prompt_tokens).priced(timed), ""
    try:
        return load(run_dir / "plan.json"), ""
    except GraphError as error:  # measurements can be reported without it
        return None, str(error).splitlines()[0]


def _outlook_of(
    run_dir: Path,
    plan: Plan | None,
    cluster: str | None,
    prompt_tokens: float | None,
    timed: Sequence[MetricsLine],
) -> tuple[Outlook | None, str]:
    """Return what would help a run, or None and why that is not known."""
    was_planned_for_one = plan is not None and plan.origin is not None and plan.origin.target is not None
    if not timed or not (cluster or was_planned_for_one):
        return None, "the run was planned for no cluster: say with --cluster what it ran on"
    try:
        return single_changes_of(Priced.of(run_dir, cluster, prompt_tokens), timed), ""
    except RlgraphError as error:
        return None, str(error).splitlines()[0]


def _evaluations(lines: Sequence[MetricsLine]) -> dict[str, list[tuple[int, float]]]:
    """Return the metrics of evaluations: name -> (iterations done, value)."""
    evaluations: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                evaluations.setdefault(name, []).append((line["step"], value))
    return evaluations


@dataclass(frozen=True)
class Timing:
    """The time of an iteration, apart from its single steps."""

    outside: ReportRow | None = None
    critical_path: tuple[CriticalStep, ...] = ()
    idle: Mapping[str, float] = field(default_factory=dict)


def _timing(plan: Plan | None, rows: Sequence[ReportRow], iteration: ReportRow | None) -> Timing:
    """Return the critical path, idle pools, and the time outside of steps; of no iteration nothing."""
    if iteration is None:
        return Timing()
    seconds = {row.step: row.measured for row in rows}
    critical: list[CriticalStep] = []
    idle: dict[str, float] = {}
    inside = sum(seconds.values())
    if plan:
        by_id = {step.id: seconds.get(step.node, 0.0) for step in plan.steps}
        critical = critical_path(plan, by_id)
        for pool, work in busy(plan, by_id).items():
            idle[pool] = max(1 - work / iteration.measured, 0.0)
        # steps of two pools, and those on the host, overlap: together they may take more than the iteration
        inside = sum(link.seconds for link in critical)
    remaining = max(iteration.measured - inside, 0.0)
    outside = ReportRow("outside the steps", remaining, remaining / iteration.measured)
    return Timing(outside, tuple(critical), idle)


def single_changes_of(priced: Priced, lines: Sequence[MetricsLine]) -> Outlook:
    """Return the changes that shorten an iteration of a run, as the cost model has it from timed iterations.

    The cost model is calibrated on the run first, so that a gain is one of its machine. The graph is planned
    again for each change, from the files that the run was made from.

    Raises:
        GraphError: the run's own graph can't be planned here any more.
    """
    evaluator = priced.evaluator(lines)
    as_written = replace(evaluator, chosen={})
    if as_written.plan({}).digest != priced.plan.digest:
        raise fail("changed", f"{evaluator.request.graph} has changed since the run", None)
    return single_changes(evaluator, priced.plan)


def _ended(plan: Plan | None, lines: Sequence[MetricsLine]) -> str:
    early = EarlyStop(plan.schedule.stop if plan else None)
    for line in lines:
        early.add(line)
    return early.reached


def _best(run_dir: Path, plan: Plan | None, lines: Sequence[MetricsLine]) -> str:
    """Return which of the checkpoints that stay is best."""
    best = BestCheckpoints(plan.schedule.best if plan else None, lines)
    saved = []
    for path in (run_dir / "checkpoints").glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            saved.append(int(number))
    return best.text(best.among(saved))


def _rows(plan: Plan | None, timed: Sequence[MetricsLine]) -> tuple[list[ReportRow], ReportRow | None]:
    """Return the steps and the iteration: means over those that count."""
    if not timed:
        return [], None
    timers = dict.fromkeys(name for line in timed for name in line if name.startswith("time/"))
    # a step that some iterations leave out takes nothing there
    means = {name: sum(line.get(name, 0.0) for line in timed) / len(timed) for name in timers}
    iteration = means["time/step"]
    predicted: dict[str, Seconds | None] = {}
    predicted_iteration = None
    if plan and plan.predicted:
        predicted = {step.node: step.seconds for step in plan.steps}
        predicted_iteration = plan.predicted.seconds
    rows = []
    for name, seconds in means.items():
        if name not in LAST:
            node = name.removeprefix("time/")
            rows.append(ReportRow(node, seconds, seconds / iteration, predicted.get(node)))
    return rows, ReportRow("iteration", iteration, 1.0, predicted_iteration)


def _memory(plan: Plan | None, lines: Sequence[MetricsLine]) -> Iterator[Memory]:
    """Yield the memory of each pool, over its devices and over the run."""
    peaks: Mapping[str, Peak] = {}
    if plan and plan.peak:
        peaks = plan.peak
    driver = _largest(lines, "perf/memory_used/")
    for pool, measured in _largest(lines, "perf/memory/").items():
        memory = Memory(pool, measured, driver=driver.get(pool))
        peak = peaks.get(pool)
        if peak:
            memory = replace(memory, predicted=peak.bytes, capacity=peak.capacity)
        yield memory


def _largest(lines: Sequence[MetricsLine], prefix: str) -> dict[str, float]:
    """Return the largest value per pool, of metrics that are named ``prefixPOOL-DEVICE``."""
    largest: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(prefix):
                pool = name.removeprefix(prefix).rpartition("-")[0]
                largest[pool] = max(largest.get(pool, 0.0), value)
    return largest


def report_text(report: RunReport, width: int = 100) -> str:
    """Return evaluations, the table of steps, and conclusions from it."""
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False, markup=False)
    for line in _outcome_lines(report):
        console.print(line, soft_wrap=True)
    if report.iteration is None:
        return console.export_text()
    if report.cluster:
        for line in _prediction_lines(report):
            console.print(line, soft_wrap=True)
    console.print(_step_table(report))
    if report.stages:
        console.print("", _stage_table(report.stages), report.bottleneck, sep="\n", soft_wrap=True)
    for line in (*_path_lines(report), *_memory_lines(report), "", *_outlook_lines(report)):
        console.print(line, soft_wrap=True)
    return console.export_text()


def _outcome_lines(report: RunReport) -> Iterator[str]:
    """Yield what the run reached."""
    yield f"{report.run}: {report.iterations} iterations"
    if report.ended:
        yield f"  it ended early: {report.ended}"
    if report.best:
        yield f"  {report.best}"
    for name, values in report.evaluations.items():
        values_text = ", ".join(f"{value:.3f} after {step}" for step, value in values)
        yield f"  {name}: {values_text}"
    for alarm in report.alarms:
        yield f"  {alarm_text(alarm)}".replace("\n", "\n  ")


def _prediction_lines(report: RunReport) -> Iterator[str]:
    """Yield the workload that predictions were made for, and the real one."""
    yield f"predicted for {report.cluster}"
    for label, text in report.headline.items():
        yield f"  {label:<{LABEL}}{text}"
    yield "assuming"
    for assumption in report.assumed:
        yield f"  {assumption}"
    if length := report.response_tokens:
        yield f"responses had {length:,.1f} tokens; a ratio is measured over the middle of what was predicted"


def _step_table(report: RunReport) -> Table:
    columns = ["step", "ms", "share of the iteration"]
    if report.cluster:
        columns += ["predicted", "ratio"]
    table = Table(*columns, box=None, header_style="bold")
    for row in (*report.steps, report.outside, report.iteration):
        if row is None:
            continue
        share = "" if row is report.iteration else f"{100 * row.share:.1f} %"
        cells = [row.step, f"{1e3 * row.measured:.1f}", share]
        if row.predicted:
            cells += [range_text(row.predicted), f"{row.ratio:.3g}"]
        table.add_row(*cells)
    return table


def _stage_table(by_stage: Sequence[Stage]) -> Table:
    table = Table("stage of the stream", "busy", "starved", "held back", box=None, header_style="bold")
    for stage in by_stage:
        states = (stage.busy, stage.starved, stage.held)
        table.add_row(stage.about, *(f"{seconds_text(state)}, {stage.share(state)}" for state in states))
    return table


def _path_lines(report: RunReport) -> Iterator[str]:
    """Yield the steps that an iteration waits for, and the idle pools."""
    path = report.critical_path
    if path:
        yield ""
        shortest = SHORT * sum(link.seconds for link in path)
        links = [link for link in path if link.seconds >= shortest]
        text = ", ".join(f"{link.step} {seconds_text(link.seconds)}" for link in links)
        left_out = len(path) - len(links)
        if left_out:
            text += f"; {left_out} shorter than {SHORT:.0%} of it left out"
        yield f"critical path: {text}"
    for pool, share in report.idle.items():
        yield f"pool {pool} is idle for {share:.0%} of an iteration"


def _memory_lines(report: RunReport) -> Iterator[str]:
    for memory in report.memory:
        text = f"a device of {memory.pool} has held {size_text(memory.measured)} at most"
        if memory.predicted is not None:
            text += f"; predicted {size_text(memory.predicted)} of {size_text(memory.capacity or 0)}"
        if memory.driver is not None:
            text += f"; with caches and servers {size_text(memory.driver)}"
        yield text


def _outlook_lines(report: RunReport) -> Iterator[str]:
    if report.outlook is None:
        yield f"what would help is not known: {report.why_none}"
    else:
        yield from outlook_lines(report.outlook, LEAST_SAVING)
