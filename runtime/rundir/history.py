"""Files of a run that grow by lines, one for each iteration; what a run that is cut short leaves there."""

import json
from pathlib import Path

from rlgraph.files import write


def truncate(folder: Path, iteration: int) -> None:
    """Drop the lines of later iterations, which come again, and those that were cut short."""
    for name, step in HISTORY.items():
        path = folder / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            write(path, "".join(f"{line}\n" for line in lines if step(line) <= iteration))


def _step(line: str) -> float:
    """Return the step of a metrics line; a line cut short by a crash is after everything."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")


def _traced(line: str) -> float:
    """Return the iteration of a line of the timeline; its opening bracket is before everything."""
    try:
        return float(json.loads(line.rstrip().rstrip(","))["args"]["iteration"])
    except (ValueError, TypeError, KeyError):
        return -2 if line == "[" else float("inf")


ALARMS = "alarms.jsonl"
HISTORY = {
    "metrics.jsonl": _step,
    ALARMS: _step,
    "timeline.json": _traced,
}  # files of lines, and the iteration of a line
