"""What a run reached and where its time went, from the files that it left."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.errors import RunError


def report_text(run_dir: Path, width: int = 100) -> str:
    """A run directory as text: evaluations, and a table of steps, the slowest first.

    Raises:
        RunError: the folder holds no metrics.
    """
    lines = _read(run_dir)
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    iterations = [line for line in lines if "time/step" in line]
    console.print(f"{run_dir}: {len(iterations)} iterations")
    for name, values in _evaluations(lines).items():
        console.print("  " + name + ": " + ", ".join(f"{value:.3f} after {step}" for step, value in values))
    if iterations:
        console.print(_table(iterations))
    return console.export_text()


def _read(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{run_dir} holds no run: there is no {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _evaluations(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                found.setdefault(name, []).append((line["step"], value))
    return found


def _table(iterations: list[dict[str, Any]]) -> Table:
    """Seconds of each step, the mean over iterations after the first, which warms up."""
    counted = iterations[1:] or iterations
    names = [n for n in counted[-1] if n.startswith("time/") and n not in ("time/step", "time/eval")]
    seconds = {name: sum(line[name] for line in counted) / len(counted) for name in names}
    whole = sum(line["time/step"] for line in counted) / len(counted)
    table = Table("step", "ms", "share of the iteration", box=None, header_style="bold")
    for name in sorted(names, key=lambda name: -seconds[name]):
        table.add_row(
            name.removeprefix("time/"), f"{1e3 * seconds[name]:.1f}", f"{100 * seconds[name] / whole:.1f} %"
        )
    table.add_row("outside the steps", *_rest(whole, sum(seconds.values())))
    table.add_row("iteration", f"{1e3 * whole:.1f}", "")
    return table


def _rest(whole: float, inside: float) -> tuple[str, str]:
    # steps of two devices may overlap, and then they add up to more than the iteration
    rest = max(whole - inside, 0.0)
    return f"{1e3 * rest:.1f}", f"{100 * rest / whole:.1f} %"
