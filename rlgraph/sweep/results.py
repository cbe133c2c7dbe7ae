"""What the runs of a sweep reached: a table, the same as CSV, and a page with a chart of each metric."""

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
        """What an evaluation reports, or the reward where there is none."""
        names = dict.fromkeys(name for curves in self.curves.values() for name in curves)
        return [name for name in names if name != REWARD] or [*names]

    def summary(self, run: Combination) -> str:
        """Return what a run has reached, in words."""
        curves = self.curves.get(run.name, {})
        values = [f"{name} {curves[name][-1][1]:.3f}" for name in self.metrics if name in curves]
        return ", ".join(values) or "done"

    def rows(self) -> list[SweepRow]:
        """Return a row of all runs that differ in the seed alone."""
        seeds_of: dict[tuple[str, ...], list[Combination]] = {}
        for run in self.runs:
            values = tuple(value for name, value in run.values.items() if name != SEED)
            seeds_of.setdefault(values, []).append(run)
        return [self._row(values, runs) for values, runs in seeds_of.items()]

    def _row(self, values: Sequence[str], runs: Sequence[Combination]) -> SweepRow:
        curves_of_runs = [self.curves[run.name] for run in runs if run.name in self.curves]
        last_values = []
        for metric in self.metrics:
            curves = [curves[metric] for curves in curves_of_runs if metric in curves]
            last_values.append([curve[-1][1] for curve in curves])
        return SweepRow(list(values), len(curves_of_runs), last_values)

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
        names = [*self.runs[0].values]
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["run", *names, *self.metrics])
        for run in self.runs:
            curves = self.curves.get(run.name, {})
            reached = [curves[metric][-1][1] if metric in curves else "" for metric in self.metrics]
            lines.writerow([run.name, *run.values.values(), *reached])
        write(folder / "table.csv", file.getvalue())
        write(folder / "sweep.html", self.page())

    def page(self) -> str:
        """Return one HTML file that asks for nothing."""
        heads = _table_row("th", [*self.heads, "runs", *self.metrics])
        rows = [_table_row("td", cells) for cells in self._cells()]
        table = "".join([heads, *rows])
        title = f"{html.escape(self.graph)}: {len(self.runs)} runs"
        charts = "".join(f"<h2>{html.escape(name)}</h2>\n{self._chart(name)}\n" for name in self.metrics)
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
            if curve := self.curves.get(run.name, {}).get(metric):
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

    last: int  # iteration
    low: float
    high: float

    @staticmethod
    def of(curves: Iterable[Curve]) -> ChartAxes:
        """Return the axes on which all of some curves have room."""
        points = list(itertools.chain.from_iterable(curves))
        values = [value for _, value in points]
        return ChartAxes(max(step for step, _ in points) or 1, min(values), max(values))

    def point(self, step: int, value: float) -> str:
        """Return a point of a curve, as SVG takes it."""
        across = 48 + (WIDTH - 60) * step / self.last
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
        labels.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 6}" text-anchor="end">{self.last}</text>')
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
        if of_run := _curves(lines):
            curves[run.name] = of_run
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
