"""Prints what the runs of a sweep reached: a table, the same as CSV, and a page with a chart per metric."""

from __future__ import annotations

import csv
import html
import io
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlgraph.errors import RunError
from rlgraph.files import write
from rlgraph.reports.measured import read_metrics
from rlgraph.sweep.combinations import Combination, shortened

REWARD = "reward/mean"  # what is compared where nothing is evaluated
SEED = "seed"  # runs that differ in it alone are one row
WIDTH, HEIGHT = 640, 240  # pixels of a chart
COLOURS = 6  # lines of one colour differ in their dashes
STYLE = Path(__file__).with_name("page.css")

Curve = Sequence[tuple[int, float]]  # iterations done, value


@dataclass(frozen=True)
class SweepRow:
    """Runs that differ in the seed alone: their other settings, how many have begun, each metric of each."""

    values: list[str]
    runs: int
    metrics: list[list[float]]


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
            rows.append(SweepRow([*values], len(begun_runs), metrics))
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
        write(folder / "sweep.html", self.page())

    def page(self) -> str:
        """Return one HTML file that asks for nothing."""
        table = _table_row("th", [*self.heads, "runs", *self.metrics])
        for cells in self._cells():
            table += _table_row("td", cells)
        title = f"{html.escape(self.graph)}: {len(self.runs)} runs"
        charts = ""
        for metric in self.metrics:
            charts += f"<h2>{html.escape(metric)}</h2>\n{self._chart(metric)}\n"
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
            f"<body><h1>{title}</h1>\n<table>\n{table}</table>\n{charts}</body></html>\n"
        )

    def _chart(self, metric: str) -> str:
        """Return a metric over the iterations, a line for each run."""
        curves = {}
        for run in self.runs:
            curve = self.curves.get(run.name, {}).get(metric)
            if curve:
                curves[run.name] = curve
        axes = ChartAxes.of(curves.values())
        marks = axes.marks()
        legend = []
        for number, (name, curve) in enumerate(curves.items()):
            style = f"c{number % COLOURS}"
            repeats = number // COLOURS  # of the colours: their lines are dashed
            label = html.escape(f"{name}: {curve[-1][1]:.3f}")
            dashes = f' stroke-dasharray="{2 + 3 * repeats} 3"' if repeats else ""
            points = " ".join(axes.point(step, value) for step, value in curve)
            line = f'<polyline class="{style}"{dashes} points="{points}">'
            marks.append(f"{line}<title>{label}</title></polyline>")
            dash = "- " if repeats else ""
            legend.append(f'<span class="{style}">{dash}{label}</span>')
        label = html.escape(f"{metric} over the iterations, {len(curves)} runs")
        box = f"0 0 {WIDTH} {HEIGHT}"
        chart = f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(marks)}</svg>'
        return f"<figure>{chart}<figcaption>{' '.join(legend)}</figcaption></figure>"


@dataclass(frozen=True)
class ChartAxes:
    """Where iterations and values lie in a chart, in pixels."""

    iterations: int
    low: float
    high: float

    @staticmethod
    def of(curves: Iterable[Curve]) -> ChartAxes:
        """Return the axes on which all of some curves have room."""
        steps, values = zip(*itertools.chain.from_iterable(curves), strict=True)
        return ChartAxes(max(steps) or 1, min(values), max(values))

    def point(self, step: int, value: float) -> str:
        """Return a point of a curve, as SVG takes it."""
        across = 48 + (WIDTH - 60) * step / self.iterations
        return f"{across:.1f},{self.down(value):.1f}"

    def down(self, value: float) -> float:
        """Return how far below the upper edge a value lies."""
        span = (self.high - self.low) or 1
        return HEIGHT - 24 - (HEIGHT - 40) * (value - self.low) / span

    def marks(self) -> list[str]:
        """Return the labels of the axes: the lowest value, the highest, and the last iteration."""
        labels = []
        for value in dict.fromkeys((self.low, self.high)):
            labels.append(f'<text x="4" y="{self.down(value) + 4:.0f}">{value:.3g}</text>')
        labels.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 6}" text-anchor="end">{self.iterations}</text>')
        return labels


def _table_row(tag: str, cells: Sequence[str]) -> str:
    texts = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{texts}</tr>\n"


def _cell(values: Sequence[float], best: float) -> str:
    """Return the mean over seeds with its deviation, and a star if it is the best."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    text = f"{mean:.3f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.3f}"
    if mean == best:
        text += " *"
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
            if name == REWARD or _is_reported(name):
                curves.setdefault(name, []).append((line["step"], value))
    return curves


def _is_reported(name: str) -> bool:
    """Return whether an evaluation reports a metric; what its nodes record beside has one more word."""
    return name.startswith("eval/") and name.count("/") == 1
