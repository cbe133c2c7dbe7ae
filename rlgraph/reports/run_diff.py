"""Compares two runs: what they were started with, their graphs, their plans, and what they measured last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlgraph.files import read_json
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.frontend.kept_graph import START
from rlgraph.printing.plan_diff import changed_values, differences, value_text
from rlgraph.reports.measured import metrics_so_far
from rlgraph.reports.plan_file import load
from rlgraph.syntax.source import Tree

OF_A_PLACE = ("folder", "folders")  # in start.json: where a run was started, not how
OF_SPEED = ("time/", "perf/")  # metrics that no two runs share
STEP_SECONDS = "time/step"


def run_diff(a: Path, b: Path) -> tuple[str, bool]:
    """Return how run ``b`` differs from run ``a`` as text, and whether it does in more than its speed.

    Raises:
        GraphError: the plan of a run can't be read.
        RunError: another file of a run can't be read.
    """
    plan_a, plan_b = load(a / "plan.json"), load(b / "plan.json")
    edits: list[str] = []
    if plan_a.origin and plan_b.origin:
        edits = diff_text(Tree.of(plan_a.origin.composed), Tree.of(plan_b.origin.composed)).splitlines()
    sections = {
        "started with": [*_changed_starts(a, b)],
        "graph": edits,
        "plan": differences(plan_a, plan_b),
    }
    lines = [f"{a} -> {b}"]
    for title, section in sections.items():
        lines.append(f"\n{title}" if section else f"\n{title}: the same")
        lines += [f"  {line}" for line in section]
    last_a, last_b = _last_values(a), _last_values(b)
    lines += ["\nmetrics, the last of each", *_table(a, b, last_a, last_b)]
    is_same = not any(sections.values()) and _without_speed(last_a) == _without_speed(last_b)
    return "\n".join(lines) + "\n", not is_same


def _changed_starts(a: Path, b: Path) -> Iterator[str]:
    """Yield what the two runs were started with that differs; nothing for runs that do not say so."""
    if not ((a / START).is_file() and (b / START).is_file()):
        return
    start_a, start_b = read_json(a / START), read_json(b / START)
    for overrides, others, sign in (
        (start_a["overrides"], start_b["overrides"], "-"),
        (start_b["overrides"], start_a["overrides"], "+"),
    ):
        for override in overrides:
            if override not in others:
                yield f"{sign} {override}"
    for name in (*OF_A_PLACE, "overrides"):
        start_a.pop(name)
        start_b.pop(name)
    for place, value_a, value_b in changed_values(start_a, start_b):
        yield f"{'.'.join(place)}: {value_text(value_a)} -> {value_text(value_b)}"


def _last_values(run: Path) -> dict[str, float]:
    """Return the last value of each metric; none where the run has not come so far."""
    values: dict[str, float] = {}
    for line in metrics_so_far(run):
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        values |= numbers
    return values


def _without_speed(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(OF_SPEED)}


def _table(a: Path, b: Path, last_a: Mapping[str, float], last_b: Mapping[str, float]) -> Iterator[str]:
    """Yield a line per metric: evaluations and rewards first, the seconds of an iteration last."""
    names = {**_without_speed(last_a), **_without_speed(last_b)}
    ordered = sorted(names, key=_rank)
    if STEP_SECONDS in last_a or STEP_SECONDS in last_b:
        ordered.append(STEP_SECONDS)
    rows = [("", str(a), str(b), "")]
    for name in ordered:
        value_a, value_b = last_a.get(name), last_b.get(name)
        change = ""
        if value_a is not None and value_b is not None and value_a != value_b:
            change = f"{value_b - value_a:+.4g}"
        rows.append((name, _number(value_a), _number(value_b), change))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, text_a, text_b, change in rows:
        line = f"  {name:<{widths[0]}}  {text_a:>{widths[1]}}  {text_b:>{widths[2]}}  {change}"
        yield line.rstrip()


def _rank(name: str) -> tuple[int, str]:
    """Return the place of a metric in the table."""
    for rank, prefix in enumerate(("step", "eval/", "reward/")):
        if name.startswith(prefix):
            return rank, name
    return 3, name


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
