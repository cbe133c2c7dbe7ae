"""The layouts that a search tried as text: a table of the best, and why the others lost."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from rlgraph.reports.layout import PoolLayout
from rlgraph.reports.layout_search import Candidate, overrides
from rlgraph.units import middle, range_text, size_text

BEST = 5  # rows of the table
CHOICES: Mapping[str, Callable[[PoolLayout], str]] = {
    "group": lambda it: f"servers over {it.group} devices" if it.group > 1 else "servers on one device",
    "micro": lambda it: f"micro-batches of {it.micro:,} tokens",
    "recompute": lambda it: "activations computed again" if it.recompute else "activations kept",
    "shard": lambda it: f"{it.shard}-way shards" if it.shard else "shards over all devices",
    "host": lambda it: it.host.removeprefix(", ") or "nothing on the host",
    "sequence": lambda it: f"rows over {it.sequence} devices" if it.sequence else "rows on one device",
    "divided": lambda it: f"{_divided(it)} devices" if _divided(it) else "all of a layer on each device",
}
# what else may be another where two layouts differ in a choice: devices that share rows have larger batches,
# and those that divide layers share no rows
BESIDE = {"sequence": ("micro",), "divided": ("micro", "sequence", "shard")}


def contest_text(candidates: Sequence[Candidate], width: int = 100, offer: Candidate | None = None) -> str:
    """Return a table of the best layouts, a line per other division of the devices, and settings.

    ``offer`` is a faster one that streams, which would change results.
    """
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    fit = [candidate for candidate in candidates if candidate.fits]
    console.print(f"{len(candidates)} layouts tried, {len(fit)} of them fit")
    best = [*{_outcome(candidate): candidate for candidate in reversed(fit)}.values()][::-1][:BEST]
    if fit:
        console.print(_table(best))
    if lines := [*_with_another_choice(candidates), *_lost(candidates, best)]:
        console.print("\nwhy the others lost")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
    if fit and fit[0].layout:
        console.print("\nthe first, as settings")
        for setting in overrides(fit[0].settings):
            console.print(f"  {shlex.quote(setting)}", soft_wrap=True)
    for line in _offered(offer, candidates[0]) if offer else ():
        console.print(line, soft_wrap=True)
    return console.export_text()


def _offered(offer: Candidate, first: Candidate) -> Iterator[str]:
    assert offer.plan and offer.plan.predicted
    share, took = offer.seconds / first.seconds, range_text(offer.plan.predicted.seconds)
    yield f"\nwhere generation streams an iteration takes {share:.2f} x the time of the first, {took}:"
    yield f"{offer.why_not}; as settings"
    yield from (f"  {shlex.quote(setting)}" for setting in overrides(offer.settings))


def _outcome(candidate: Candidate) -> tuple[object, ...]:
    """Return what is the same of layouts that differ in name only: devices, seconds and memory."""
    assert candidate.plan and candidate.plan.predicted
    peaks = tuple(peak.bytes for peak in (candidate.plan.peak or {}).values())
    return tuple(candidate.plan.pools.values()), candidate.plan.predicted.seconds, peaks


def _table(best: Sequence[Candidate]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("", "devices", "groups", "micro-batch", "moves", "an iteration", "peak"):
        table.add_column(head, justify="right" if head in ("groups", "micro-batch", "moves") else "left")
    for number, candidate in enumerate(best, 1):
        plan, layout = candidate.plan, candidate.layout
        assert plan and plan.predicted and plan.peak
        micro = f"{layout.micro}{', again' * layout.recompute}{layout.host}" if layout else "as is"
        mesh = f", {layout.shard}-way shard" if layout and layout.shard else ""
        mesh += f", rows over {layout.sequence}" if layout and layout.sequence else ""
        mesh += f", {divided}" if layout and (divided := _divided(layout)) else ""
        beside = f" (+ {', '.join(sorted(layout.beside))})" if layout and layout.beside else ""
        table.add_row(
            f"{number}.",
            ", ".join(f"{pool} {count}" for pool, count in plan.pools.items()) + beside + mesh,
            str(layout.group) if layout else "",
            micro,
            str(sum(step.facts.moves == "off" for step in plan.steps)),
            range_text(plan.predicted.seconds),
            ", ".join(size_text(peak.bytes) for peak in plan.peak.values()),
        )
    return table


def _divided(layout: PoolLayout) -> str:
    """Return what devices divide of a model in a layout, and how many; nothing where that is all as it is."""
    setting, ranks = layout.divided or ("", 1)
    return f"{'experts' if setting == 'expert_parallel' else 'layers'} over {ranks}" * (ranks > 1)


def _with_another_choice(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each choice of the best layout, how it does with the best other one, all else as it is."""
    first = candidates[0]
    for choice in CHOICES if first.fits and first.layout else ():
        for other in candidates[1:]:
            if other.layout and _differs(first.layout, other.layout, choice):
                yield f"the same with {CHOICES[choice](other.layout)}: {_why(other, [first])}"
                break


def _differs(one: PoolLayout | None, other: PoolLayout, choice: str) -> bool:
    """Return whether two layouts differ in one choice alone, and in what it brings with it."""
    changed = (choice, *BESIDE.get(choice, ()))
    alike = one and replace(one, **{name: getattr(other, name) for name in changed})
    return alike == other and getattr(one, choice) != getattr(other, choice)


def _lost(candidates: Sequence[Candidate], shown: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each division of the devices without a row, its best layout and why it lost."""
    families: dict[str, Candidate] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, candidate)
    for family, best in families.items():
        if family not in {candidate.family for candidate in shown}:
            yield f"{family}: {_why(best, shown)}"
    short = [candidate for candidate in candidates if not candidate.fits]
    if short:
        yield f"{len(short)} do not fit, as: {short[0].why_not}"


def _why(candidate: Candidate, shown: Sequence[Candidate]) -> str:
    if not candidate.fits or candidate.plan is None or candidate.plan.predicted is None:
        return candidate.why_not
    plan, took = candidate.plan, candidate.plan.predicted
    busiest = max(took.pools, key=lambda pool: middle(took.pools[pool]))
    steps = [step for step in plan.steps if step.seconds and busiest in (step.pool, step.source)]
    slowest = max(steps, key=lambda step: math.prod(step.seconds or ())).node
    factor = candidate.seconds / shown[0].seconds if shown else 1.0
    return f"{factor:.2f} x the time of the first; {busiest} is busiest, for the most part in `{slowest}`"
