"""Prints what the runs of a sweep reached: a table, the same as CSV, and a page with their curves."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.errors import RunError
from rlgraph.files import write
from rlgraph.reports.measured import read_metrics
from rlgraph.reports.outcome import REWARD, is_score
from rlgraph.sweep.combinations import Combination, shortened
from rlgraph.view.curves import curves
from rlgraph.view.page import sweep_page

SEED = "seed"  # runs that differ in it alone are one row
STAR = "*"
LEGEND = (
    "Each value was measured last: at the last evaluation, or in the last iteration if nothing is evaluated. "
    f"Several runs: mean ± standard deviation over seeds. {STAR} marks the highest mean of a column."
)

Curve = Sequence[tuple[int, float]]  # iterations done, value


@dataclass(frozen=True)
class SweepRow:
    """Runs that differ in the seed alone: their other settings, how many have begun, each metric of each."""

    values: list[str]
    runs: int
    metrics: list[list[float]]
    seeds: Sequence[Combination]

    def name(self, heads: Sequence[str]) -> str:
        """Return the settings, as ``clip=0.1, n=8``; ``all runs`` where only the seed is swept."""
        settings = [f"{head}={value}" for head, value in zip(heads, self.values, strict=True)]
        return ", ".join(settings) or "all runs"


@dataclass(frozen=True)
class Results:
    """The metrics that are compared, of each run that has begun.

    Attributes:
        graph: what was run.
        runs: all combinations.
        curves: a run's name -> metric -> its values over the iterations.
    """

    graph: str
    runs: Sequence[Combination]
    curves: Mapping[str, Mapping[str, Curve]]

    @property
    def metrics(self) -> list[str]:
        """The metrics that an evaluation reports, or the reward where there is none."""
        names = dict.fromkeys(name for curves in self.curves.values() for name in curves)
        evaluated = [name for name in names if name != REWARD]
        return evaluated or [*names]

    def summary(self, run: Combination) -> str:
        """Return what a run has reached, in words."""
        values = [f"{metric} {value:.3f}" for metric, value in self._latest(run).items()]
        return ", ".join(values) or "done"

    def _latest(self, run: Combination) -> dict[str, float]:
        """Return the latest value of each metric that a run has."""
        curves = self.curves.get(run.name, {})
        return {metric: curves[metric][-1][1] for metric in self.metrics if metric in curves}

    def rows(self) -> list[SweepRow]:
        """Return a row of all runs that differ in the seed alone."""
        seeds_of: dict[tuple[str, ...], list[Combination]] = {}
        for run in self.runs:
            values = tuple(value for name, value in run.values.items() if name != SEED)
            seeds_of.setdefault(values, []).append(run)
        rows = []
        for values, runs in seeds_of.items():
            begun_runs = [run for run in runs if run.name in self.curves]
            latest = [self._latest(run) for run in begun_runs]
            metrics = []
            for metric in self.metrics:
                metrics.append([of_run[metric] for of_run in latest if metric in of_run])
            rows.append(SweepRow([*values], len(begun_runs), metrics, runs))
        return rows

    @property
    def heads(self) -> list[str]:
        """The names of the settings in a row."""
        return shortened([name for name in self.runs[0].values if name != SEED])

    def text(self) -> str:
        """Return the table: means over seeds with their deviation; the highest of each metric has a star."""
        table = Table(*self.heads, "runs", *self.metrics, box=None, header_style="bold")
        for cells in self._cells():
            table.add_row(*cells)
        console = Console(width=200, record=True, file=io.StringIO(), highlight=False, markup=False)
        console.print(table)
        return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())

    def _cells(self) -> list[list[str]]:
        """Return the table as text, a list per row."""
        rows = self.rows()
        best = []
        for number in range(len(self.metrics)):
            means = [statistics.fmean(row.metrics[number]) for row in rows if row.metrics[number]]
            best.append(max(means, default=0.0))
        table = []
        for row in rows:
            metrics = [_cell(values, top) for values, top in zip(row.metrics, best, strict=True)]
            table.append([*row.values, str(row.runs), *metrics])
        return table

    def save(self, folder: Path) -> None:
        """Write ``table.csv``, a row per run, and ``sweep.html``."""
        file = io.StringIO()
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["run", *self.runs[0].values, *self.metrics])
        for run in self.runs:
            latest = self._latest(run)
            reached = [latest.get(metric, "") for metric in self.metrics]
            lines.writerow([run.name, *run.values.values(), *reached])
        write(folder / "table.csv", file.getvalue())
        write(folder / "sweep.html", sweep_page(self.contents(folder)))

    def contents(self, folder: Path) -> dict[str, Any]:
        """Return what the page of the sweep in a folder shows, as JSON values."""
        rows = self.rows()
        first_metric = len(self.heads) + 1  # behind the settings and the count of runs
        shown_rows = []
        for cells in self._cells():
            highest = [number for number, cell in enumerate(cells) if number >= first_metric and STAR in cell]
            shown_rows.append({"cells": cells, "highest": highest})
        lines = []
        for row in rows:
            lines.append((row.name(self.heads), [folder / run.name for run in row.seeds]))
        begun = sum(row.runs for row in rows)
        states = []
        for run in self.runs:
            state = self.summary(run) if run.name in self.curves else "has not begun"
            states.append((str(folder / run.name), state))
        return {
            "graph": self.graph,
            "folder": str(folder),
            "headline": [("runs begun", f"{begun} of {len(self.runs)}"), *self._highest(rows)],
            "heads": self.heads,
            "metrics": self.metrics,
            "rows": shown_rows,
            "legend": LEGEND,
            "curves": curves(lines),
            "runs": states,
        }

    def _highest(self, rows: Sequence[SweepRow]) -> Iterator[tuple[str, str]]:
        """Yield each metric, and the row whose mean is the highest."""
        for number, metric in enumerate(self.metrics):
            measured = [row for row in rows if row.metrics[number]]
            if measured:
                best = max(measured, key=lambda row: statistics.fmean(row.metrics[number]))
                text = f"{statistics.fmean(best.metrics[number]):.3f}"
                yield f"highest {metric}", f"{text} with {best.name(self.heads)}"


def _cell(values: Sequence[float], best: float) -> str:
    """Return the mean over seeds with its deviation, and a star if it is the best."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    text = f"{mean:.3f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.3f}"
    if mean == best:
        text += f" {STAR}"
    return text


def results(graph: str, runs: Sequence[Combination], folder: Path) -> Results:
    """Read what the runs of a sweep have measured so far."""
    curves: dict[str, Mapping[str, Curve]] = {}
    for run in runs:
        try:
            lines = read_metrics(folder / run.name)
        except RunError:  # it has not begun
            continue
        curves_of_run = _curves(lines)
        if curves_of_run:
            curves[run.name] = curves_of_run
    return Results(graph, runs, curves)


def _curves(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Curve]:
    """Return the metrics of a run that are compared, over its iterations."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name == REWARD or is_score(name):
                curves.setdefault(name, []).append((line["step"], value))
    return curves
