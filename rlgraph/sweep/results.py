"""What the runs of a sweep reached: a table, the same as CSV, and a page with a chart of each metric."""

import csv
import html
import io
import statistics
from collections.abc import Mapping, Sequence
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

    def said(self, run: Combination) -> str:
        """Return what a run has reached, in words."""
        curves = self.curves.get(run.name, {})
        told = [f"{name} {curves[name][-1][1]:.3f}" for name in self.metrics if name in curves]
        return ", ".join(told) or "done"

    def rows(self) -> list[tuple[list[str], int, list[list[float]]]]:
        """Return a row of all runs that differ in the seed alone: values, how many, each metric of each."""
        groups: dict[tuple[str, ...], list[Combination]] = {}
        for run in self.runs:
            groups.setdefault(tuple(v for name, v in run.values.items() if name != SEED), []).append(run)
        reached = {key: [self.curves.get(run.name, {}) for run in runs] for key, runs in groups.items()}
        return [
            ([*key], sum(map(bool, every)), [[c[m][-1][1] for c in every if m in c] for m in self.metrics])
            for key, every in reached.items()
        ]

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
        rows = self.rows()
        reached_by = zip(*(reached for _, _, reached in rows), strict=True)  # of each metric, by all rows
        best = [max((statistics.fmean(every) for every in of if every), default=0.0) for of in reached_by]
        return [
            [*values, str(count), *(_cell(every, top) for every, top in zip(reached, best, strict=True))]
            for values, count, reached in rows
        ]

    def save(self, folder: Path) -> None:
        """Write ``table.csv``, a row per run, and ``sweep.html``."""
        file = io.StringIO()
        names = [*self.runs[0].values]
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["run", *names, *self.metrics])
        for run in self.runs:
            curves = self.curves.get(run.name, {})
            reached = (curves[metric][-1][1] if metric in curves else "" for metric in self.metrics)
            lines.writerow([run.name, *run.values.values(), *reached])
        write(folder / "table.csv", file.getvalue())
        write(folder / "sweep.html", self.page())

    def page(self) -> str:
        """Return one HTML file that asks for nothing."""
        rows = [[*self.heads, "runs", *self.metrics], *self._cells()]
        tags = ["th", *("td" for _ in rows[1:])]
        table = "".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>\n"
            for tag, cells in zip(tags, rows, strict=True)
        )
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
        lines = {run.name: self.curves.get(run.name, {}).get(metric) for run in self.runs}
        drawn = {name: curve for name, curve in lines.items() if curve}
        steps, values = ([point[i] for curve in drawn.values() for point in curve] for i in (0, 1))
        last, low, high = max(steps) or 1, min(values), max(values)

        def across(step: int) -> float:
            return 48 + (WIDTH - 60) * step / last

        def down(value: float) -> float:
            return HEIGHT - 24 - (HEIGHT - 40) * (value - low) / ((high - low) or 1)

        marks = [f'<text x="4" y="{down(at) + 4:.0f}">{at:.3g}</text>' for at in dict.fromkeys((low, high))]
        marks.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 6}" text-anchor="end">{last}</text>')
        names = []
        for number, (name, curve) in enumerate(drawn.items()):
            colour, turn = f"c{number % COLOURS}", number // COLOURS
            dashes = f' stroke-dasharray="{2 + 3 * turn} 3"' if turn else ""
            at = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in curve)
            label = html.escape(f"{name}: {curve[-1][1]:.3f}")
            line = f'<polyline class="{colour}"{dashes} points="{at}">'
            marks.append(f"{line}<title>{label}</title></polyline>")
            names.append(f'<span class="{colour}">{"- " * bool(turn)}{label}</span>')
        told = html.escape(f"{metric} over the iterations, {len(drawn)} runs")
        chart = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}">{"".join(marks)}</svg>'
        return f"<figure>{chart}<figcaption>{' '.join(names)}</figcaption></figure>"


def _cell(every: Sequence[float], best: float) -> str:
    if not every:
        return ""
    mean = statistics.fmean(every)
    spread = f" ± {statistics.stdev(every):.3f}" if len(every) > 1 else ""
    return f"{mean:.3f}{spread}{' *' if mean == best else ''}"


def results(graph: str, runs: Sequence[Combination], folder: Path) -> Results:
    """Read what the runs of a sweep have measured so far."""
    curves: dict[str, dict[str, Any]] = {}
    for run in runs:
        try:
            lines = read_metrics(folder / run.name)
        except RunError:  # it has not begun
            continue
        own: dict[str, list[tuple[int, float]]] = {}
        for line in lines:
            for name in (name for name in line if name == REWARD or _reported(name)):
                own.setdefault(name, []).append((line["step"], line[name]))
        if own:
            curves[run.name] = own
    return Results(graph, runs, curves)


def _reported(name: str) -> bool:
    """Return whether an evaluation reports a metric; what its nodes record beside has one more word."""
    return name.startswith("eval/") and name.count("/") == 1
