"""What a run reached and where its time went, beside what was predicted, from the files that it left."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlgraph.critical import Link, critical_path
from rlgraph.errors import GraphError, RlgraphError
from rlgraph.measured import Line, Priced, counted, middle, read_metrics, response_tokens
from rlgraph.plan import Plan
from rlgraph.planfile import load
from rlgraph.simulate import busy
from rlgraph.units import range_text, seconds_text, size_text
from rlgraph.whatif import LEAST, Outlook, outlook

Seconds = tuple[float, float]  # at best, at worst
LAST = ("time/step", "time/eval")  # of the iteration, and of what comes behind it
TOLD = 3  # changes that are printed
SHORT = 0.01  # of the critical path: steps that are not worth a word


@dataclass(frozen=True)
class Row:
    """A step: seconds of an iteration, measured and predicted, and the share of the iteration's time."""

    step: str
    measured: float
    share: float
    predicted: Seconds | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over the middle of what was predicted."""
        return self.measured / middle(self.predicted) if self.predicted else None

    @property
    def off(self) -> float:
        """Seconds between the two; without a prediction the seconds themselves."""
        return abs(self.measured - middle(self.predicted)) if self.predicted else self.measured


@dataclass(frozen=True)
class Memory:
    """The most bytes that a device of a pool has held, and of how many it was predicted to hold at most."""

    pool: str
    measured: float
    predicted: int | None = None
    capacity: int | None = None


@dataclass(frozen=True)
class Report:
    """A run, measured and predicted. ``evaluations``: name -> (iterations done, value)."""

    run: str
    iterations: int
    evaluations: Mapping[str, Sequence[tuple[int, float]]]
    cluster: str | None  # that predictions are for
    assumed: tuple[str, ...]
    response_tokens: float | None
    steps: tuple[Row, ...]  # the worst prediction first
    outside: Row | None
    iteration: Row | None
    critical_path: tuple[Link, ...]
    idle: Mapping[str, float]  # pool -> the share of an iteration in which none of its steps runs
    memory: tuple[Memory, ...]
    outlook: Outlook | None
    why_none: str  # why there is no outlook

    def json(self) -> str:
        """For tools: the fields, and of each row its ratio."""
        found = asdict(self)
        for row, plain in zip(self.steps, found["steps"], strict=True):
            plain["ratio"] = row.ratio
        return json.dumps(found, indent=1)


def make_report(run_dir: Path, cluster: str | None = None, prompt_tokens: float | None = None) -> Report:
    """What a run directory says.

    Where the run was planned for a cluster, predicted seconds stand beside the measured ones, and the step
    whose prediction is off by most seconds comes first; else the slowest does.

    Args:
        run_dir: the run's.
        cluster: predict for this one, with responses as long as they were, instead of as it was planned.
        prompt_tokens: the mean of a prompt, for ``cluster``.

    Raises:
        RunError: the folder holds no metrics, or ran on more devices than ``cluster`` has.
        GraphError: its plan can't be read, or ``cluster`` or a model is not known.
    """
    lines = read_metrics(run_dir)
    timed = counted(lines)
    plan, unread = _plan(run_dir)
    if cluster and timed:
        plan = Priced.of(run_dir, cluster, prompt_tokens).priced(timed)
    rows, outside, whole = _rows(plan, timed)
    seconds = {row.step: row.measured for row in rows}
    found, why = _outlook(run_dir, plan, timed, cluster, prompt_tokens)
    of_steps = {step.id: seconds.get(step.node, 0.0) for step in plan.steps} if plan else {}
    return Report(
        run=str(run_dir),
        iterations=sum("time/step" in line for line in lines),
        evaluations=_evaluations(lines),
        cluster=plan.predicted.cluster if plan and plan.predicted else None,
        assumed=plan.predicted.assumed if plan and plan.predicted else (),
        response_tokens=response_tokens(timed),
        steps=tuple(sorted(rows, key=lambda row: -row.off)),
        outside=outside,
        iteration=whole,
        critical_path=tuple(critical_path(plan, of_steps)) if plan and timed else (),
        idle=_idle(plan, of_steps, whole.measured) if plan and whole else {},
        memory=tuple(_memory(plan, lines)),
        outlook=found,
        why_none=unread or why,
    )


def _plan(run_dir: Path) -> tuple[Plan | None, str]:
    """A run's plan, or why there is none to look at: what was measured can be told without it."""
    try:
        return load(run_dir / "plan.json"), ""
    except GraphError as error:
        return None, str(error).splitlines()[0]


def _evaluations(lines: Sequence[Line]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                found.setdefault(name, []).append((line["step"], value))
    return found


def _rows(plan: Plan | None, timed: Sequence[Line]) -> tuple[list[Row], Row | None, Row | None]:
    """The steps, what lies outside of them, and the iteration: means over those that count."""
    if not timed:
        return [], None, None
    names = dict.fromkeys(
        name for line in timed for name in line if name.startswith("time/") and name not in LAST
    )
    # a step that some iterations leave out takes nothing there
    seconds = {name: sum(line.get(name, 0.0) for line in timed) / len(timed) for name in names}
    whole = sum(line["time/step"] for line in timed) / len(timed)
    said = {f"time/{step.node}": step.seconds for step in plan.steps} if plan and plan.predicted else {}
    rows = [Row(name[len("time/") :], took, took / whole, said.get(name)) for name, took in seconds.items()]
    # steps of two pools may overlap, and then they add up to more than the iteration
    rest = max(whole - sum(seconds.values()), 0.0)
    predicted = plan.predicted.seconds if plan and plan.predicted else None
    return rows, Row("outside the steps", rest, rest / whole), Row("iteration", whole, 1.0, predicted)


def _idle(plan: Plan, seconds: Mapping[int, float], whole: float) -> dict[str, float]:
    return {pool: max(1 - took / whole, 0.0) for pool, took in busy(plan, seconds).items()}


def _memory(plan: Plan | None, lines: Sequence[Line]) -> Iterator[Memory]:
    """Of each pool, over its devices and over the run."""
    found: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("perf/memory/"):
                pool = name[len("perf/memory/") :].rpartition("-")[0]
                found[pool] = max(found.get(pool, 0.0), value)
    for pool, measured in found.items():
        peak = (plan.peak or {}).get(pool) if plan else None
        yield Memory(pool, measured, peak.bytes if peak else None, peak.capacity if peak else None)


def _outlook(
    run_dir: Path, plan: Plan | None, timed: Sequence[Line], cluster: str | None, prompt_tokens: float | None
) -> tuple[Outlook | None, str]:
    """What would help, or why that is not known."""
    target = plan.origin.target if plan and plan.origin else None
    if not timed or not (cluster or target):
        return None, "the run was planned for no cluster: say with --cluster what it ran on"
    try:
        return outlook(Priced.of(run_dir, cluster, prompt_tokens), timed), ""
    except RlgraphError as error:
        return None, str(error).splitlines()[0]


def report_text(
    run_dir: Path, width: int = 100, cluster: str | None = None, prompt_tokens: float | None = None
) -> str:
    """A run directory as text; arguments and errors as ``make_report``."""
    return as_text(make_report(run_dir, cluster, prompt_tokens), width)


def as_text(report: Report, width: int = 100) -> str:
    """Evaluations, the table of steps, and what follows from it."""
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False, markup=False)
    console.print(f"{report.run}: {report.iterations} iterations", soft_wrap=True)
    for name, values in report.evaluations.items():
        said = ", ".join(f"{value:.3f} after {step}" for step, value in values)
        console.print(f"  {name}: {said}", soft_wrap=True)
    if report.iteration:
        for words in _against(report):
            console.print(words)
        console.print(_table(report))
        for words in (*_where(report), *_helps(report)):
            console.print(words, soft_wrap=True)
    return console.export_text()


def _against(report: Report) -> Iterator[str]:
    """What predictions were made for, and what came."""
    if report.cluster is None:
        return
    yield f"predicted for {report.cluster}, assuming"
    yield from (f"  {assumed}" for assumed in report.assumed)
    if length := report.response_tokens:
        yield f"responses had {length:,.1f} tokens; a ratio is measured over the middle of what was predicted"


def _table(report: Report) -> Table:
    more = ("predicted", "ratio") if report.cluster else ()
    table = Table("step", "ms", "share of the iteration", *more, box=None, header_style="bold")
    for row in (*report.steps, report.outside, report.iteration):
        if row:
            share = f"{100 * row.share:.1f} %" if row is not report.iteration else ""
            beside = (range_text(row.predicted), f"{row.ratio:.3g}") if row.predicted else ()
            table.add_row(row.step, f"{1e3 * row.measured:.1f}", share, *beside)
    return table


def _where(report: Report) -> Iterator[str]:
    """What the iteration waits for, what waits, and what is held."""
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
        beside = ""
        if one.predicted is not None:
            beside = f"; predicted {size_text(one.predicted)} of {size_text(one.capacity or 0)}"
        yield f"a device of {one.pool} has held {size_text(one.measured)} at most{beside}"


def _helps(report: Report) -> Iterator[str]:
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
        yield "     " + " ".join(change.typed)
