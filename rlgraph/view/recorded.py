"""Reads a run directory for a view: metrics, measured steps, samples, facts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlgraph.ir.plan import Plan
from rlgraph.reports.measured import counted, mean_of, objects, read_metrics, whole_lines
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
    steps = [event for event in events if "part" not in event["args"]]
    first = _first(events)
    bars = [
        Measured(
            **{name: event["args"][name] for name in ("step", "phase", "iteration")},
            pool=event["pid"],
            device=event["tid"],
            start=(event["ts"] - first) / 1e6,
            end=(event["ts"] + event["dur"] - first) / 1e6,
        )
        for event in steps
    ]
    return sorted(bars, key=lambda bar: bar.start)


def _first(events: Sequence[Mapping[str, Any]]) -> float:
    return min((event["ts"] for event in events if "part" not in event["args"]), default=0)


def recorded(run_dir: Path) -> dict[str, Any]:
    """Return a run as JSON values.

    Raises:
        RunError: the folder holds no run.
        GraphError: its plan can't be read.
    """
    plan, lines = load(run_dir / "plan.json"), metrics_so_far(run_dir)
    events, environment = objects(run_dir / "timeline.json"), run_dir / "environment.json"
    bars, told = _bars(events), stages(plan, counted(lines))
    versions = environment.read_text(encoding="utf-8") if environment.is_file() else ""
    iterations = sorted({bar.iteration for bar in bars})
    shown = [*dict.fromkeys((*iterations[: ITERATIONS // 2], *iterations[-ITERATIONS // 2 :]))]
    return {
        "name": str(run_dir),
        "metrics": _series(_thinned(lines)),
        "bars": [vars(bar) for bar in bars if bar.iteration in shown],
        "iterations": shown,
        "stream": recorded_stream(plan, events, shown, _first(events)),
        "stages": [asdict(stage) for stage in told.values()],
        "bottleneck": bottleneck(plan, told),
        "beside": [*_beside(plan, lines)],
        "samples": _samples(run_dir),
        "facts": _facts(run_dir, plan, lines),
        "environment": _plain(json.loads(versions or "null")),
        "alarms": objects(run_dir / "alarms.jsonl"),
        "restarts": objects(run_dir / "restarts.jsonl"),
    }


def metrics_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Read the metrics as ``read_metrics`` does; none where the run has not come so far."""
    return read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []


def _thinned(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a limited number of lines, evenly spaced, and all lines of evaluations."""
    every = -(-len(lines) // POINTS) or 1
    kept = {*range(0, len(lines), every), len(lines) - 1}
    kept |= {n for n, line in enumerate(lines) if any(name.startswith("eval/") for name in line)}
    return [line for n, line in enumerate(lines) if n in kept]


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return name -> one value per line, null where the line has none."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_short(line.get(name)) for line in lines] for name in names}


def _short(value: Any) -> Any:
    """Round to six digits, as a chart shows no more; JSON has no infinities."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _beside(plan: Plan, lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each step, predicted and measured: mean seconds per iteration; the first warms up."""
    timed = counted(lines)
    for step in plan.steps:
        mean = mean_of(timed, f"time/{step.node}")
        if mean is not None:
            ratio = mean / middle(step.seconds) if step.seconds else None
            yield {"step": step.id, "measured": mean, "predicted": step.seconds, "ratio": _short(ratio)}


def _samples(run_dir: Path) -> dict[str, Any]:
    """Return rows of the newest files that fit, and of the first one; the names of the others."""
    files = sorted((run_dir / "samples").glob("*.jsonl"))
    room, omitted = SAMPLE_BYTES, []
    held: dict[str, Any] = {}
    for path in (*files[:1], *reversed(files[1:])):
        rows, count = _rows(path)
        room -= sum(map(len, rows))
        if room < 0 and held:
            omitted.append(path.stem)
        else:
            held[path.stem] = {"rows": [json.loads(row) for row in rows], "of": count}
    return {"files": dict(sorted(held.items())), "omitted": sorted(omitted)}


def _rows(path: Path) -> tuple[list[str], int]:
    """Return the first rows of a file that fit, in few digits, and how many it has."""
    lines = [*filter(None, whole_lines(path))]
    rows: list[str] = []
    room = FILE_BYTES
    for line in lines:
        row = json.dumps(_plain(json.loads(line)), separators=(",", ":"))
        room -= len(row)
        if room < 0 and rows:
            break
        rows.append(row)
    return rows, len(lines)


def _plain(value: Any) -> Any:
    """Return a sample's value, with numbers as ``_short`` has them."""
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list) else _short(value)


def _facts(run_dir: Path, plan: Plan, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return facts of the run: how it was made, and how far it came."""
    facts = [("graph", plan.graph), ("seed", str(plan.seed)), ("digest", plan.digest)]
    if origin := plan.origin:
        facts += [("made from", origin.graph), ("settings", " ".join(origin.overrides))]
        facts += [("devices", str(origin.devices)), ("rlgraph", origin.rlgraph)]
    facts.append(("planned for", plan.predicted.cluster if plan.predicted else ""))
    timed = [line for line in lines if "time/step" in line]
    facts.append(("iterations", f"{timed[-1]['step'] if timed else 0} of {plan.iterations}"))
    for kind in ("checkpoints", "models"):
        facts.append((kind, ", ".join(sorted(path.name for path in (run_dir / kind).glob("*")))))
    return [(name, value) for name, value in facts if value]
