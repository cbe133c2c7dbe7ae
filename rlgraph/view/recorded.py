"""Reads a run directory for a view: metrics, measured steps, samples, facts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlgraph.ir.plan import Plan
from rlgraph.reports.measured import counted, mean_of, metrics_so_far, objects, whole_lines
from rlgraph.reports.outcome import outcome
from rlgraph.reports.plan_file import load
from rlgraph.reports.stages import bottleneck, stages
from rlgraph.units import middle
from rlgraph.view.stream import recorded_stream

POINTS = 1500  # lines of metrics that a page draws
ITERATIONS = 8  # iterations whose steps a page draws: the first and the last
SAMPLE_BYTES = 3_000_000  # bytes of samples that a page holds
FILE_BYTES = 750_000  # bytes of one samples file that a page holds


@dataclass(frozen=True)
class Measured:
    """One step on one device. Seconds count from the first step of the run."""

    step: int
    phase: str
    iteration: int
    pool: str
    device: int | str  # a device's number, or ``0 beside`` for the tasks beside it
    start: float
    end: float


def read_timeline(run_dir: Path) -> list[Measured]:
    """Read the steps of a run as they were measured, by start; none where it has no timeline yet."""
    return _bars(objects(run_dir / "timeline.json"))


def _bars(events: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Return the steps among the events of a timeline, by start; parts of steps are left out."""
    start = _start_of_run(events)
    bars = []
    for event in events:
        arguments = event["args"]
        if "part" in arguments:
            continue
        bar = Measured(
            step=arguments["step"],
            phase=arguments["phase"],
            iteration=arguments["iteration"],
            pool=event["pid"],
            device=event["tid"],
            start=(event["ts"] - start) / 1e6,
            end=(event["ts"] + event["dur"] - start) / 1e6,
        )
        bars.append(bar)
    return sorted(bars, key=lambda bar: bar.start)


def _start_of_run(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the microseconds at which the first step starts."""
    return min((event["ts"] for event in events if "part" not in event["args"]), default=0)


def recorded(run_dir: Path) -> dict[str, Any]:
    """Return a run as JSON values.

    Raises:
        RunError: the folder holds no run.
        GraphError: its plan can't be read.
    """
    plan = load(run_dir / "plan.json")
    lines = metrics_so_far(run_dir)
    events = objects(run_dir / "timeline.json")
    bars = _bars(events)
    busy = stages(plan, counted(lines))
    iterations = _drawn_iterations(bars)
    return {
        "name": str(run_dir),
        "outcome": outcome_of(run_dir),
        "metrics": thinned_series(lines),
        "bars": [vars(bar) for bar in bars if bar.iteration in iterations],
        "iterations": iterations,
        "stream": recorded_stream(plan, events, iterations, _start_of_run(events)),
        "stages": [asdict(stage) for stage in busy.values()],
        "bottleneck": bottleneck(plan, busy),
        "beside": [*_predicted_and_measured(plan, lines)],
        "samples": _samples(run_dir),
        "facts": _facts(run_dir, plan, lines),
        "environment": _environment(run_dir),
        "alarms": objects(run_dir / "alarms.jsonl"),
        "restarts": objects(run_dir / "restarts.jsonl"),
    }


def _drawn_iterations(bars: Sequence[Measured]) -> list[int]:
    """Return the iterations whose steps are drawn: the earliest and the latest of a long run."""
    iterations = sorted({bar.iteration for bar in bars})
    half = ITERATIONS // 2
    return [*dict.fromkeys((*iterations[:half], *iterations[-half:]))]


def _environment(run_dir: Path) -> Any:
    path = run_dir / "environment.json"
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    return _rounded(json.loads(text)) if text else None


def outcome_of(run_dir: Path) -> dict[str, str]:
    """Return what was measured of a run so far, as label -> text."""
    return outcome(metrics_so_far(run_dir), _environment(run_dir))


def thinned_series(lines: Sequence[Mapping[str, Any]], points: int = POINTS) -> dict[str, list[Any]]:
    """Return metric -> its values on about ``points`` lines, evenly spaced, and on all of evaluations."""
    return _series(_thinned(lines, points))


def _thinned(lines: Sequence[Mapping[str, Any]], points: int) -> list[Mapping[str, Any]]:
    """Return a limited number of lines, evenly spaced, and all lines of evaluations."""
    stride = -(-len(lines) // points) or 1
    thinned = []
    for number, line in enumerate(lines):
        is_regular = number % stride == 0 or number == len(lines) - 1
        if is_regular or any(name.startswith("eval/") for name in line):
            thinned.append(line)
    return thinned


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return name -> one value per line, null for a line that has none."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_rounded(line.get(name)) for line in lines] for name in names}


def _rounded(value: Any) -> Any:
    """Return a JSON value with numbers of six digits, as charts show no more. JSON has no infinities."""
    if isinstance(value, dict):
        return {name: _rounded(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_rounded(child) for child in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _predicted_and_measured(plan: Plan, lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each step's seconds, predicted and measured: the mean without the first, which warms up."""
    timed = counted(lines)
    for step in plan.steps:
        mean = mean_of(timed, f"time/{step.node}")
        if mean is not None:
            ratio = mean / middle(step.seconds) if step.seconds else None
            yield {"step": step.id, "measured": mean, "predicted": step.seconds, "ratio": _rounded(ratio)}


def _samples(run_dir: Path) -> dict[str, Any]:
    """Return rows of the first file and of the newest ones that fit, and the names of the others."""
    files = sorted((run_dir / "samples").glob("*.jsonl"))
    free_bytes = SAMPLE_BYTES
    omitted: list[str] = []
    included: dict[str, Any] = {}
    for path in (*files[:1], *reversed(files[1:])):
        rows, count = _rows(path)
        free_bytes -= sum(map(len, rows))
        if free_bytes < 0 and included:
            omitted.append(path.stem)
        else:
            included[path.stem] = {"rows": [json.loads(row) for row in rows], "of": count}
    return {"files": dict(sorted(included.items())), "omitted": sorted(omitted)}


def _rows(path: Path) -> tuple[list[str], int]:
    """Return the rows at the start of a file that fit, in few digits, and how many rows it has."""
    lines = [line for line in whole_lines(path) if line]
    rows: list[str] = []
    free_bytes = FILE_BYTES
    for line in lines:
        row = json.dumps(_rounded(json.loads(line)), separators=(",", ":"))
        free_bytes -= len(row)
        if free_bytes < 0 and rows:
            break
        rows.append(row)
    return rows, len(lines)


def _facts(run_dir: Path, plan: Plan, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return facts of the run: how it was made, and how far it came."""
    facts = [("graph", plan.graph), ("seed", str(plan.seed)), ("digest", plan.digest)]
    if plan.origin:
        facts += [
            ("made from", plan.origin.graph),
            ("settings", " ".join(plan.origin.overrides)),
            ("devices", str(plan.origin.devices)),
            ("rlgraph", plan.origin.rlgraph),
        ]
    facts.append(("planned for", plan.predicted.cluster if plan.predicted else ""))
    finished = [line["step"] for line in lines if "time/step" in line]
    count = finished[-1] if finished else 0
    facts.append(("iterations", f"{count} of {plan.iterations}"))
    for kind in ("checkpoints", "models"):
        names = sorted(path.name for path in (run_dir / kind).glob("*"))
        facts.append((kind, ", ".join(names)))
    return [(name, value) for name, value in facts if value]
