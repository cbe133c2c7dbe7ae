"""Prints the results of a layout search: the best few, and why the others lost."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from rlgraph.reports.layout_search import Candidate, overrides
from rlgraph.units import middle, range_text, size_text

BEST = 5  # rows of the table


def contest_text(found: Sequence[Candidate], width: int = 100) -> str:
    """Return a table of the best layouts, a line per other division of the devices, and settings."""
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    fit = [candidate for candidate in found if candidate.fits]
    console.print(f"{len(found)} layouts tried, {len(fit)} of them fit")
    if fit:
        console.print(_table(fit[:BEST]))
    lines = [*_lost(found, fit[:BEST])]
    if lines:
        console.print("\nwhy the others lost")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
    if fit and fit[0].layout:
        console.print("\nthe first, as settings")
        for setting in overrides(fit[0].settings):
            console.print(f"  {shlex.quote(setting)}", soft_wrap=True)
    return console.export_text()


def _table(best: Sequence[Candidate]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("", "devices", "groups", "micro-batch", "moves", "an iteration", "peak"):
        table.add_column(head, justify="right" if head in ("groups", "micro-batch", "moves") else "left")
    for number, candidate in enumerate(best, 1):
        plan, layout = candidate.plan, candidate.layout
        assert plan and plan.predicted and plan.peak
        micro = f"{layout.micro}{', again' if layout.recompute else ''}" if layout else "as is"
        table.add_row(
            f"{number}.",
            ", ".join(f"{pool} {count}" for pool, count in plan.pools.items()) + _beside(candidate),
            str(layout.group) if layout else "",
            micro,
            str(sum(step.facts.moves == "off" for step in plan.steps)),
            range_text(plan.predicted.seconds),
            ", ".join(size_text(peak.bytes) for peak in plan.peak.values()),
        )
    return table


def _beside(candidate: Candidate) -> str:
    names = sorted(candidate.layout.beside) if candidate.layout else ()
    return f" (+ {', '.join(names)})" if names else ""


def _lost(found: Sequence[Candidate], shown: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each division of the devices without a row, its best layout and why it lost."""
    families: dict[str, Candidate] = {}
    for candidate in found:
        families.setdefault(candidate.family, candidate)
    for family, best in families.items():
        if family not in {candidate.family for candidate in shown}:
            yield f"{family}: {_why(best, shown)}"
    short = [candidate for candidate in found if not candidate.fits]
    if short:
        yield f"{len(short)} do not fit, as: {short[0].why_not}"


def _why(candidate: Candidate, shown: Sequence[Candidate]) -> str:
    if not candidate.fits or candidate.plan is None or candidate.plan.predicted is None:
        return candidate.why_not
    plan, took = candidate.plan, candidate.plan.predicted
    busiest = max(took.pools, key=lambda pool: middle(took.pools[pool]))
    slowest = max(
        (s for s in plan.steps if s.seconds and busiest in (s.pool, s.source)),
        key=lambda s: math.prod(s.seconds or ()),
    )
    factor = candidate.seconds / shown[0].seconds if shown else 1.0
    return (
        f"{factor:.2f} x the time of the first; {busiest} is busiest, for the most part in `{slowest.node}`"
    )
