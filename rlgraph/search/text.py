"""What a search found, as text: remedies, single changes, a table of layouts and why the others lost."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlgraph.search.candidate import Candidate, Remedy
from rlgraph.search.layout import PoolLayout
from rlgraph.search.moves import overrides
from rlgraph.units import middle, range_text, seconds_text, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlgraph.search.faster import Outlook

ROWS = 5  # of the table of layouts
CHANGES = 3  # single changes that are printed


def _group_text(layout: PoolLayout) -> str:
    return f"servers over {layout.group} devices" if layout.group > 1 else "servers on one device"


def _recompute_text(layout: PoolLayout) -> str:
    return "activations computed again" if layout.recompute else "activations kept"


def _shard_text(layout: PoolLayout) -> str:
    return f"{layout.shard}-way shards" if layout.shard else "shards over all devices"


def _sequence_text(layout: PoolLayout) -> str:
    return f"rows over {layout.sequence} devices" if layout.sequence else "rows on one device"


def _division_text(layout: PoolLayout) -> str:
    division = _division(layout)
    return f"{division} devices" if division else "all of a layer on each device"


CHOICES: Mapping[str, Callable[[PoolLayout], str]] = {
    "group": _group_text,
    "micro": lambda layout: f"micro-batches of {layout.micro:,} tokens",
    "recompute": _recompute_text,
    "shard": _shard_text,
    "host": lambda layout: layout.host.removeprefix(", ") or "nothing on the host",
    "sequence": _sequence_text,
    "divided": _division_text,
}
# fields that may differ as well where two layouts differ in a choice: devices that share rows have larger
# batches, and those that divide layers share no rows
DEPENDENT = {"sequence": ("micro",), "divided": ("micro", "sequence", "shard")}


def remedies_text(remedies: Sequence[Remedy]) -> str:
    """Return what an error offers in place of a plan that does not fit."""
    if not remedies:
        return "no change of one pool makes it fit: --autoplace tries several, or take a smaller model"
    changes = "\n    or ".join(map(_remedy_text, remedies))
    return f"what would make it fit:\n    {changes}"


def _remedy_text(remedy: Remedy) -> str:
    words = overrides(remedy.candidate.settings)
    seconds = range_text(remedy.candidate.prediction.seconds)
    if remedy.devices and words:
        words.insert(0, f"{remedy.devices} devices with")
    elif remedy.devices:
        words.append(f"{remedy.devices} devices")
    return f"{' '.join(words)}  # {seconds} per iteration"


def outlook_lines(outlook: Outlook, least_saving: float) -> Iterator[str]:
    """Yield the single changes that help a run most."""
    tried = f"of {outlook.tried} single changes"
    if not outlook.changes:
        yield f"nothing would help: {tried}, none saves {least_saving:.0%} of an iteration by the cost model"
        return
    before = seconds_text(middle(outlook.seconds))
    yield f"what would help most, {tried}, by the cost model calibrated on this run ({before} an iteration)"
    for number, change in enumerate(outlook.changes[:CHANGES], 1):
        alters = f"; it alters results: {change.alters}" if change.alters else ""
        yield f"  {number}. {seconds_text(middle(change.seconds))}, {change.saves:.0%} less{alters}"
        yield "     " + shlex.join(change.edits)


def contest_text(candidates: Sequence[Candidate], width: int = 100, offer: Candidate | None = None) -> str:
    """Return a table of the best layouts, a line per other division of the devices, and settings.

    ``offer`` is a faster one that streams, which would change results.
    """
    from rich.console import Console  # errors of `check`, which need no table, do not pay for its import

    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    fitting = [candidate for candidate in candidates if candidate.fits]
    console.print(f"{len(candidates)} layouts tried, {len(fitting)} of them fit")
    best = _distinct(fitting)[:ROWS]
    if best:
        console.print(_table(best))
    reasons = [*_with_another_choice(candidates), *_lost(candidates, best)]
    if reasons:
        console.print("\nwhy the others lost")
    for line in reasons:
        console.print(f"  {line}", soft_wrap=True)
    if fitting and fitting[0].layout:
        console.print("\nthe first, as settings")
        _print_settings(console, fitting[0])
    if offer:
        console.print(_offer_text(offer, candidates[0]), soft_wrap=True)
        _print_settings(console, offer)
    return console.export_text()


def _print_settings(console: Console, candidate: Candidate) -> None:
    for setting in overrides(candidate.settings):
        console.print(f"  {shlex.quote(setting)}", soft_wrap=True)


def _offer_text(offer: Candidate, best: Candidate) -> str:
    share = offer.seconds / best.seconds
    seconds = range_text(offer.prediction.seconds)
    return (
        f"\nwhere generation streams an iteration takes {share:.2f} x the time of the first, {seconds}:"
        f"\n{offer.alters}; as settings"
    )


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first of the candidates that differ in name only: with equal devices, seconds and memory."""
    distinct: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        assert candidate.plan
        devices = tuple(candidate.plan.pools.values())
        peaks = tuple(peak.bytes for peak in candidate.peaks.values())
        distinct.setdefault((devices, candidate.prediction.seconds, peaks), candidate)
    return list(distinct.values())


def _table(best: Sequence[Candidate]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    numbers = ("groups", "micro-batch", "moves")
    for head in ("", "devices", "groups", "micro-batch", "moves", "an iteration", "peak"):
        table.add_column(head, justify="right" if head in numbers else "left")
    for number, candidate in enumerate(best, 1):
        layout = candidate.layout
        table.add_row(
            f"{number}.",
            _devices_text(candidate),
            str(layout.group) if layout else "",
            _micro_text(layout),
            str(candidate.moves),
            range_text(candidate.prediction.seconds),
            ", ".join(size_text(peak.bytes) for peak in candidate.peaks.values()),
        )
    return table


def _devices_text(candidate: Candidate) -> str:
    """Return the pools of a layout, and how its models are spread over them."""
    assert candidate.plan
    text = ", ".join(f"{pool} {count}" for pool, count in candidate.plan.pools.items())
    layout = candidate.layout
    if layout is None:
        return text
    if layout.scorers:
        text += f" (+ {', '.join(sorted(layout.scorers))})"
    if layout.shard:
        text += f", {layout.shard}-way shard"
    if layout.sequence:
        text += f", rows over {layout.sequence}"
    if division := _division(layout):
        text += f", {division}"
    return text


def _micro_text(layout: PoolLayout | None) -> str:
    if layout is None:
        return "as is"
    recompute = ", again" if layout.recompute else ""
    return f"{layout.micro}{recompute}{layout.host}"


def _division(layout: PoolLayout) -> str:
    """Return what devices divide of a model in a layout, and how many; nothing where each has all of it."""
    setting, ranks = layout.divided or ("", 1)
    if ranks == 1:
        return ""
    divided = "experts" if setting == "expert_parallel" else "layers"
    return f"{divided} over {ranks}"


def _with_another_choice(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each choice of the best layout, how it does with the best other one, all else as it is."""
    best = candidates[0]
    if not best.fits or best.layout is None:
        return
    for choice, text in CHOICES.items():
        for other in candidates[1:]:
            if other.layout and _differs(best.layout, other.layout, choice):
                yield f"the same with {text(other.layout)}: {_why(other, [best])}"
                break


def _differs(layout: PoolLayout, other: PoolLayout, choice: str) -> bool:
    """Return whether two layouts differ in one choice alone, and in what depends on it."""
    if getattr(layout, choice) == getattr(other, choice):
        return False
    changes = {name: getattr(other, name) for name in (choice, *DEPENDENT.get(choice, ()))}
    return replace(layout, **changes) == other


def _lost(candidates: Sequence[Candidate], shown: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each division of the devices without a row, its best layout and why it lost."""
    families: dict[str, Candidate] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, candidate)
    shown_families = {candidate.family for candidate in shown}
    for family, best in families.items():
        if family not in shown_families:
            yield f"{family}: {_why(best, shown)}"
    unfit = [candidate for candidate in candidates if not candidate.fits]
    if unfit:
        yield f"{len(unfit)} do not fit, as: {unfit[0].why_not}"


def _why(candidate: Candidate, shown: Sequence[Candidate]) -> str:
    """Return why a candidate lost against those that are shown."""
    if not candidate.fits:
        return candidate.why_not
    assert candidate.plan
    pools = candidate.prediction.pools
    busiest = max(pools, key=lambda pool: middle(pools[pool]))
    priced = [step for step in candidate.plan.steps if step.seconds]
    steps = [step for step in priced if busiest in (step.pool, step.source)]
    slowest = max(steps, key=lambda step: math.prod(step.seconds or ())).node
    factor = candidate.seconds / shown[0].seconds if shown else 1.0
    return f"{factor:.2f} x the time of the first; {busiest} is busiest, for the most part in `{slowest}`"
