"""Files of a run that grow by a line per iteration, and how they are cut when a run goes back."""

import json
from pathlib import Path

from rlgraph.files import write
from rlgraph.reports.measured import METRICS


def truncate(folder: Path, iteration: int) -> None:
    """Drop the lines of later iterations, which will be written again, and lines that are not complete."""
    for name, iteration_of in HISTORY.items():
        path = folder / name
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        earlier = [line for line in lines if iteration_of(line) <= iteration]
        write(path, "".join(f"{line}\n" for line in earlier))


def _step(line: str) -> float:
    """Return the step of a line of metrics, infinity for a line that a crash cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def _traced(line: str) -> float:
    """Return the iteration of a line of the timeline; the opening bracket is before all of them."""
    if line == "[":
        return -2
    try:
        return float(json.loads(line.rstrip().rstrip(","))["args"]["iteration"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


ALARMS = "alarms.jsonl"
HISTORY = {METRICS: _step, ALARMS: _step, "timeline.json": _traced}  # file -> the iteration of a line
