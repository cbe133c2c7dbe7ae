"""What a run reached and where its time went, beside what was predicted, from the files that it left."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.measured import Priced, counted, middle, read_metrics, response_tokens
from rlgraph.units import range_text

Seconds = tuple[float, float]  # at best, at worst
LAST = ("time/step", "time/eval")  # of the iteration, and of what comes behind it


def report_text(
    run_dir: Path, width: int = 100, cluster: str | None = None, prompt_tokens: float | None = None
) -> str:
    """A run directory as text: evaluations, and a table of steps.

    Where the run was planned for a cluster, predicted seconds stand beside the measured ones, and the step
    whose prediction is off by most seconds comes first; else the slowest does.

    Args:
        run_dir: the run's.
        width: characters of a line.
        cluster: predict for this one, with responses as long as they were, instead of as it was planned.
        prompt_tokens: the mean of a prompt, for ``cluster``.

    Raises:
        RunError: the folder holds no metrics, or ran on more devices than ``cluster`` has.
        GraphError: its plan can't be read, or ``cluster`` or a model is not known.
    """
    lines = read_metrics(run_dir)
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    console.print(f"{run_dir}: {sum('time/step' in line for line in lines)} iterations")
    for name, values in _evaluations(lines).items():
        console.print("  " + name + ": " + ", ".join(f"{value:.3f} after {step}" for step, value in values))
    if timed := counted(lines):
        predicted = (
            _predicted(Priced.of(run_dir, cluster, prompt_tokens), timed) if cluster else _planned(run_dir)
        )
        for words in _against(predicted, timed):
            console.print(words)
        console.print(_table(timed, predicted))
    return console.export_text()


def _evaluations(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/"):
                found.setdefault(name, []).append((line["step"], value))
    return found


@dataclass(frozen=True)
class Predicted:
    """Seconds of each step by its name in the metrics, of an iteration, and on what that rests."""

    seconds: Mapping[str, Seconds]
    cluster: str
    assumed: tuple[str, ...]


def _planned(run_dir: Path) -> Predicted | None:
    """As the plan of the run said; None where it was made for no cluster."""
    path = run_dir / "plan.json"
    plan = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not (predicted := plan.get("predicted")):
        return None
    steps = {f"time/{step['node']}": tuple(step["seconds"]) for step in plan["steps"]}
    whole = {"time/step": tuple(predicted["seconds"])}
    return Predicted({**steps, **whole}, predicted["cluster"], tuple(predicted["assumed"]))


def _predicted(priced: Priced, timed: list[Any]) -> Predicted:
    """As the model says of what these iterations worked on."""
    plan = priced.priced(timed)
    assert plan.predicted
    steps = {f"time/{step.node}": step.seconds for step in plan.steps if step.seconds}
    return Predicted(
        {**steps, "time/step": plan.predicted.seconds}, priced.cluster.cluster, plan.predicted.assumed
    )


def _against(predicted: Predicted | None, timed: list[Any]) -> Iterator[str]:
    """What predictions were made for, and what came."""
    if predicted is None:
        return
    yield f"predicted for {predicted.cluster}, assuming"
    yield from (f"  {assumed}" for assumed in predicted.assumed)
    if length := response_tokens(timed):
        yield f"responses had {length:,.1f} tokens; a ratio is measured over the middle of what was predicted"


def _table(timed: list[Any], predicted: Predicted | None) -> Table:
    """Seconds of each step, the mean over iterations after the first, which warms up."""
    names = [name for name in timed[-1] if name.startswith("time/") and name not in LAST]
    seconds: dict[str, float] = {name: sum(line[name] for line in timed) / len(timed) for name in names}
    whole = sum(line["time/step"] for line in timed) / len(timed)
    said = predicted.seconds if predicted else {}

    def off(name: str) -> float:
        return abs(seconds[name] - middle(said[name])) if name in said else seconds[name]

    more = ("predicted", "ratio") if predicted else ()
    table = Table("step", "ms", "share of the iteration", *more, box=None, header_style="bold")
    for name in sorted(names, key=off, reverse=True):
        share = f"{100 * seconds[name] / whole:.1f} %"
        table.add_row(
            name.removeprefix("time/"), _ms(seconds[name]), share, *_beside(seconds[name], said.get(name))
        )
    # steps of two pools may overlap, and then they add up to more than the iteration
    rest = max(whole - sum(seconds.values()), 0.0)
    table.add_row("outside the steps", _ms(rest), f"{100 * rest / whole:.1f} %")
    table.add_row("iteration", _ms(whole), "", *_beside(whole, said.get("time/step")))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _beside(measured: float, predicted: Seconds | None) -> tuple[str, ...]:
    """The prediction, and the ratio to its middle."""
    return (range_text(predicted), f"{measured / middle(predicted):.3g}") if predicted else ()
