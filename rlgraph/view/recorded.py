"""What a run directory holds, for looking at: metrics, measured steps, samples, facts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.measured import counted, middle, read_metrics
from rlgraph.plan import Plan
from rlgraph.planfile import load

POINTS = 1500  # lines of metrics that a page draws
ITERATIONS = 8  # whose steps it draws
SAMPLE_BYTES = 3_000_000  # of samples that it holds
FILE_BYTES = 750_000  # of one file of them


@dataclass(frozen=True)
class Measured:
    """One step on one device. Seconds since the first step of the run."""

    step: int
    phase: str
    iteration: int
    pool: str
    device: int | str  # or what is beside it: ``0 beside``
    start: float
    end: float


def read_timeline(run_dir: Path) -> list[Measured]:
    """The steps of a run as they were measured, by start; none where it has no timeline yet."""
    path = run_dir / "timeline.json"
    found = [*_events(path.read_text(encoding="utf-8"))] if path.is_file() else []
    first = min((event["ts"] for event in found), default=0)
    bars = [
        Measured(
            step=event["args"]["step"],
            phase=event["args"]["phase"],
            iteration=event["args"]["iteration"],
            pool=event["pid"],
            device=event["tid"],
            start=(event["ts"] - first) / 1e6,
            end=(event["ts"] + event["dur"] - first) / 1e6,
        )
        for event in found
    ]
    return sorted(bars, key=lambda bar: bar.start)


def _events(text: str) -> Iterator[dict[str, Any]]:
    """A line each; the last one may be cut short, while the run writes it."""
    *lines, last = text.split("\n")
    for line in (*lines, last if last.endswith("}") else ""):
        if line.startswith("{"):
            yield json.loads(line.rstrip(","))


def recorded(run_dir: Path) -> dict[str, Any]:
    """A run as JSON holds it.

    Raises:
        RunError: the folder holds no run.
        GraphError: its plan can't be read.
    """
    plan, lines = load(run_dir / "plan.json"), metrics_so_far(run_dir)
    bars = read_timeline(run_dir)
    shown = _shown(sorted({bar.iteration for bar in bars}))
    return {
        "name": str(run_dir),
        "metrics": _series(_thinned(lines)),
        "bars": [vars(bar) for bar in bars if bar.iteration in shown],
        "iterations": shown,
        "beside": [*_beside(plan, lines)],
        "samples": _samples(run_dir),
        "facts": _facts(run_dir, plan, lines),
        "environment": _environment(run_dir),
        "restarts": _restarts(run_dir),
    }


def metrics_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """As ``read_metrics``; none where the run has not come so far."""
    return read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []


def _thinned(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most so many lines, evenly, and all that tell of an evaluation."""
    every = -(-len(lines) // POINTS) or 1
    return [line for n, line in enumerate(lines) if n % every == 0 or _evaluated(line) or line is lines[-1]]


def _evaluated(line: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in line)


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> a value a line, null where the line has none."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_short(line.get(name)) for line in lines] for name in names}


def _short(value: Any) -> Any:
    """Six digits are more than a chart shows; JSON has no infinities."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _shown(iterations: Sequence[int]) -> list[int]:
    """The first iterations and the last ones."""
    if len(iterations) <= ITERATIONS:
        return [*iterations]
    return [*iterations[: ITERATIONS // 2], *iterations[-ITERATIONS // 2 :]]


def _beside(plan: Plan, lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each step, predicted and measured: mean seconds of an iteration; the first warms up."""
    timed = counted(lines)
    for step in plan.steps:
        name = f"time/{step.node}"
        took = [line[name] for line in timed if name in line]
        if took:
            mean = sum(took) / len(took)
            ratio = mean / middle(step.seconds) if step.seconds else None
            yield {"step": step.id, "measured": mean, "predicted": step.seconds, "ratio": _short(ratio)}


def _samples(run_dir: Path) -> dict[str, Any]:
    """Rows of the newest files that fit, and of the first one; the names of the others."""
    files = sorted((run_dir / "samples").glob("*.jsonl"))
    room, omitted = SAMPLE_BYTES, []
    found: dict[str, Any] = {}
    for path in (*files[:1], *reversed(files[1:])):
        rows, count = _rows(path)
        room -= sum(map(len, rows))
        if room < 0 and found:
            omitted.append(path.stem)
        else:
            found[path.stem] = {"rows": [json.loads(row) for row in rows], "of": count}
    return {"files": {name: found[name] for name in sorted(found)}, "omitted": sorted(omitted)}


def _rows(path: Path) -> tuple[list[str], int]:
    """The first rows of a file that fit, in few digits, and how many it has."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
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
    """What a sample holds, with numbers as ``_short`` has them."""
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list) else _short(value)


def _environment(run_dir: Path) -> dict[str, Any] | None:
    """What the run ran on, as it wrote it down; None of a run that did not."""
    path = run_dir / "environment.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found: dict[str, Any] | None = _plain(json.loads(text)) if text else None
    return found


def _restarts(run_dir: Path) -> list[dict[str, Any]]:
    """When the run began anew, and why."""
    path = run_dir / "restarts.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _facts(run_dir: Path, plan: Plan, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What ran: how it was made, and how far it came."""
    origin = plan.origin
    made = [("graph", plan.graph), ("seed", str(plan.seed)), ("digest", plan.digest)]
    if origin:
        made += [("made from", origin.graph), ("settings", " ".join(origin.overrides))]
        made += [("devices", str(origin.devices)), ("rlgraph", origin.rlgraph)]
    made += [("planned for", plan.predicted.cluster if plan.predicted else "")]
    timed = [line for line in lines if "time/step" in line]
    last = timed[-1]["step"] if timed else 0
    made += [("iterations", f"{last} of {plan.iterations}")]
    made += [(kind, ", ".join(_names(run_dir / kind))) for kind in ("checkpoints", "models")]
    return [(name, value) for name, value in made if value]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
