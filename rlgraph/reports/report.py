"""Reports a run: what it reached and where its time went, beside predictions, from its files."""

from __future__ import annotations

import io
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.errors import GraphError, RlgraphError
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.ir.early_stop import EarlyStop
from rlgraph.ir.plan import Plan
from rlgraph.planning.headline import Seconds
from rlgraph.planning.simulate import CriticalStep, busy, critical_path
from rlgraph.printing.alarm import alarm_text
from rlgraph.printing.headline import LABEL, headline
from rlgraph.reports.measured import MetricsLine, Priced, counted, objects, read_metrics, response_tokens
from rlgraph.reports.plan_file import load
from rlgraph.reports.stages import Stage, bottleneck, stages
from rlgraph.reports.whatif import LEAST, Outlook, outlook
from rlgraph.units import middle, range_text, seconds_text, size_text

LAST = ("time/step", "time/eval", "time/save")  # phases of the iteration, and after it
TOLD = 3  # changes that are printed
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
        return self.measured / middle(self.predicted) if self.predicted else None

    @property
    def off(self) -> float:
        """Return the seconds between the two; without a prediction the seconds themselves."""
        return abs(self.measured - middle(self.predicted)) if self.predicted else self.measured


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
    plan, changes = None, None
    why = "the run was planned for no cluster: say with --cluster what it ran on"
    try:
        plan = load(run_dir / "plan.json")
    except GraphError as error:  # measurements can be reported without it
        why = str(error).splitlines()[0]
    if cluster and timed:
        plan = Priced.of(run_dir, cluster, prompt_tokens).priced(timed)
    rows, whole = _rows(plan, timed)
    seconds = {row.step: row.measured for row in rows}
    if timed and (cluster or (plan and plan.origin and plan.origin.target)):
        try:
            changes = outlook(Priced.of(run_dir, cluster, prompt_tokens), timed)
        except RlgraphError as error:
            why = str(error).splitlines()[0]
    told = stages(plan, timed) if plan else {}
    of_steps = {step.id: seconds.get(step.node, 0.0) for step in plan.steps} if plan else {}
    took = busy(plan, of_steps) if plan and whole else {}
    chain = critical_path(plan, of_steps) if plan and timed else []
    # steps of two pools, and those beside devices, overlap: together they may take more than the iteration
    inside = sum(link.seconds for link in chain) if plan else sum(seconds.values())
    rest = max(whole.measured - inside, 0.0) if whole else 0.0
    return RunReport(
        run=str(run_dir),
        iterations=sum("time/step" in line for line in lines),
        evaluations={
            name: [(line["step"], line[name]) for line in lines if name in line]
            for name in dict.fromkeys(itertools.chain(*lines))
            if name.startswith("eval/")
        },
        alarms=tuple(objects(run_dir / "alarms.jsonl")),
        ended=_ended(plan, lines),
        best=_best(run_dir, plan, lines),
        cluster=plan.predicted.cluster if plan and plan.predicted else None,
        assumed=plan.predicted.assumed if plan and plan.predicted else (),
        headline=headline(plan) if plan else {},
        response_tokens=response_tokens(timed),
        steps=tuple(sorted(rows, key=lambda row: -row.off)),
        outside=ReportRow("outside the steps", rest, rest / whole.measured) if whole else None,
        iteration=whole,
        critical_path=tuple(chain),
        idle={pool: max(1 - work / whole.measured, 0.0) for pool, work in took.items()} if whole else {},
        memory=tuple(_memory(plan, lines)),
        stages=tuple(told.values()),
        bottleneck=bottleneck(plan, told) if plan else "",
        outlook=changes,
        why_none="" if changes else why,
    )


def _ended(plan: Plan | None, lines: Sequence[MetricsLine]) -> str:
    early = EarlyStop(plan.schedule.stop if plan else None)
    for line in lines:
        early.add(line)
    return early.reached


def _best(run_dir: Path, plan: Plan | None, lines: Sequence[MetricsLine]) -> str:
    """Return which of the checkpoints that stay is best."""
    best = BestCheckpoints(plan.schedule.best if plan else None, lines)
    checkpoints = (run_dir / "checkpoints").glob("step-*")
    saved = (path.name.removeprefix("step-") for path in checkpoints)
    return best.text(best.among(int(number) for number in saved if number.isdigit()))


def _rows(plan: Plan | None, timed: Sequence[MetricsLine]) -> tuple[list[ReportRow], ReportRow | None]:
    """Return the steps and the iteration: means over those that count."""
    if not timed:
        return [], None
    timers = dict.fromkeys(name for line in timed for name in line if name.startswith("time/"))
    # a step that some iterations leave out takes nothing there
    means = {name: sum(line.get(name, 0.0) for line in timed) / len(timed) for name in timers}
    whole = means["time/step"]
    seconds = {name.removeprefix("time/"): took for name, took in means.items() if name not in LAST}
    said = {step.node: step.seconds for step in plan.steps} if plan and plan.predicted else {}
    rows = [ReportRow(node, took, took / whole, said.get(node)) for node, took in seconds.items()]
    predicted = plan.predicted.seconds if plan and plan.predicted else None
    return rows, ReportRow("iteration", whole, 1.0, predicted)


def _memory(plan: Plan | None, lines: Sequence[MetricsLine]) -> Iterator[Memory]:
    """Yield the memory of each pool, over its devices and over the run."""
    driver = _largest(lines, "perf/memory_used/")
    for pool, measured in _largest(lines, "perf/memory/").items():
        peak = (plan.peak or {}).get(pool) if plan else None
        planned, capacity = (peak.bytes, peak.capacity) if peak else (None, None)
        yield Memory(pool, measured, planned, capacity, driver.get(pool))


def _largest(lines: Sequence[MetricsLine], prefix: str) -> dict[str, float]:
    """Return the largest value per pool, of metrics that are named ``prefixPOOL-DEVICE``."""
    largest: dict[str, float] = {}
    for name, value in (item for line in lines for item in line.items() if item[0].startswith(prefix)):
        pool = name.removeprefix(prefix).rpartition("-")[0]
        largest[pool] = max(largest.get(pool, 0.0), value)
    return largest


def report_text(report: RunReport, width: int = 100) -> str:
    """Return evaluations, the table of steps, and conclusions from it."""
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False, markup=False)
    console.print(f"{report.run}: {report.iterations} iterations", soft_wrap=True)
    if report.ended:
        console.print(f"  it ended early: {report.ended}", soft_wrap=True)
    if report.best:
        console.print(f"  {report.best}", soft_wrap=True)
    for name, values in report.evaluations.items():
        said = ", ".join(f"{value:.3f} after {step}" for step, value in values)
        console.print(f"  {name}: {said}", soft_wrap=True)
    for alarm in report.alarms:
        console.print(f"  {alarm_text(alarm)}".replace("\n", "\n  "), soft_wrap=True)
    if report.iteration:
        for words in _against(report) if report.cluster else ():
            console.print(words, soft_wrap=True)
        console.print(_table(report))
        if report.stages:
            console.print("", _stage_table(report.stages), report.bottleneck, sep="\n", soft_wrap=True)
        for words in (*_where(report), *_helps(report)):
            console.print(words, soft_wrap=True)
    return console.export_text()


def _against(report: RunReport) -> Iterator[str]:
    """Yield the workload that predictions were made for, and the real one."""
    yield f"predicted for {report.cluster}"
    yield from (f"  {label:<{LABEL}}{said}" for label, said in report.headline.items())
    yield "assuming"
    yield from (f"  {assumed}" for assumed in report.assumed)
    if length := report.response_tokens:
        yield f"responses had {length:,.1f} tokens; a ratio is measured over the middle of what was predicted"


def _table(report: RunReport) -> Table:
    more = ("predicted", "ratio") if report.cluster else ()
    table = Table("step", "ms", "share of the iteration", *more, box=None, header_style="bold")
    for row in (*report.steps, report.outside, report.iteration):
        if row:
            share = f"{100 * row.share:.1f} %" if row is not report.iteration else ""
            beside = (range_text(row.predicted), f"{row.ratio:.3g}") if row.predicted else ()
            table.add_row(row.step, f"{1e3 * row.measured:.1f}", share, *beside)
    return table


def _stage_table(told: Sequence[Stage]) -> Table:
    table = Table("stage of the stream", "busy", "starved", "held back", box=None, header_style="bold")
    for stage in told:
        spent = (stage.busy, stage.starved, stage.held)
        table.add_row(stage.about, *(f"{seconds_text(took)}, {stage.share(took)}" for took in spent))
    return table


def _where(report: RunReport) -> Iterator[str]:
    """Yield what the iteration waits for, the idle pools, and the memory."""
    if report.critical_path:
        yield ""
        long = sum(link.seconds for link in report.critical_path) * SHORT
        told = [link for link in report.critical_path if link.seconds >= long]
        said = ", ".join(f"{link.step} {seconds_text(link.seconds)}" for link in told)
        rest = len(report.critical_path) - len(told)
        yield f"critical path: {said}" + (f"; {rest} shorter than {SHORT:.0%} of it left out" if rest else "")
    for pool, share in report.idle.items():
        yield f"pool {pool} is idle for {share:.0%} of an iteration"
    for one in report.memory:
        said = f"a device of {one.pool} has held {size_text(one.measured)} at most"
        if one.predicted is not None:
            said += f"; predicted {size_text(one.predicted)} of {size_text(one.capacity or 0)}"
        yield said + (f"; with caches and servers {size_text(one.driver)}" if one.driver is not None else "")


def _helps(report: RunReport) -> Iterator[str]:
    yield ""
    if report.outlook is None:
        yield f"what would help is not known: {report.why_none}"
        return
    told = report.outlook.changes[:TOLD]
    tried = f"of {report.outlook.tried} single changes"
    if not told:
        yield f"nothing would help: {tried}, none saves {LEAST:.0%} of an iteration by the cost model"
        return
    before = seconds_text(middle(report.outlook.seconds))
    yield f"what would help most, {tried}, by the cost model calibrated on this run ({before} an iteration)"
    for number, change in enumerate(told, 1):
        alters = f"; it alters results: {change.alters}" if change.alters else ""
        yield f"  {number}. {seconds_text(middle(change.seconds))}, {change.saves:.0%} less{alters}"
        yield "     " + shlex.join(change.edits)
