"""The findings of a search, as text: remedies, single changes, a table of layouts and why the others lost."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlgraph.ir.chosen import NOTE
from rlgraph.search.candidate import Candidate, Remedy
from rlgraph.search.layout import PoolLayout
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import middle, range_text, seconds_text, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlgraph.planning.predict import DoesNotFitError
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
    return f"what would make it fit (--autoplace tries other pools as well):\n    {changes}"


def choice_text(choice: Candidate, error: DoesNotFitError) -> str:
    """Return the note of a plan whose open settings were chosen: which, and why."""
    peaks = error.pricing.peaks()
    pool, worst = max(peaks.items(), key=lambda item: item[1].lacks)
    settings = " ".join(overrides(choice.settings))
    return (
        f"{NOTE}{settings}, the fastest of what fits: without, a device of pool {pool} needs "
        f"{size_text(worst.bytes)} of {size_text(worst.capacity)} in `{worst.step}`"
    )


def host_text(hosts: int, devices: int, candidate: Candidate) -> str:
    """Return what a plan on another number of hosts would be like."""
    count = f"{hosts} hosts" if hosts > 1 else "1 host"
    text = f"  on {count}, {devices} devices: "
    if candidate.plan is None:
        return f"{text}refused, as {candidate.refusal}"
    if not candidate.fits:
        return f"{text}does not fit either"
    text += f"{range_text(candidate.prediction.seconds)} per iteration"
    if candidate.settings:
        text += f", with {' '.join(overrides(candidate.settings))}"
    return text


def _remedy_text(remedy: Remedy) -> str:
    changes = []
    if remedy.devices:
        changes.append(f"{remedy.devices} devices")
    settings = " ".join(overrides(remedy.candidate.settings))
    if settings:
        changes.append(settings)
    seconds = range_text(remedy.candidate.prediction.seconds)
    return f"{' with '.join(changes)}  # {seconds} per iteration"


def outlook_lines(outlook: Outlook, least_saving: float) -> Iterator[str]:
    """Yield the single changes that help a run most."""
    tried = f"of {outlook.tried} single changes"
    if not outlook.changes:
        yield f"nothing would help: {tried}, none saves {least_saving:.0%} of an iteration by the cost model"
        return
    now = seconds_text(middle(outlook.seconds))
    yield f"what would help most, {tried}, by the cost model calibrated on this run ({now} an iteration)"
    for number, change in enumerate(outlook.changes[:CHANGES], 1):
        line = f"  {number}. {seconds_text(middle(change.seconds))}, {change.saves:.0%} less"
        if change.alters:
            line += f"; it alters results: {change.alters}"
        yield line
        yield "     " + shlex.join(change.edits)


def contest_text(candidates: Sequence[Candidate], width: int = 100, offer: Candidate | None = None) -> str:
    """Return a table of the best layouts, a line per other division of the devices, and settings.

    ``offer`` is a faster one that streams, which would change results.
    """
    from rich.console import Console  # errors of `check`, which need no table, do not pay for its import

    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    fitting = [candidate for candidate in candidates if candidate.fits]
    console.print(f"{len(candidates)} placements tried, {len(fitting)} of them fit")
    rows = _distinct(fitting)[:ROWS]
    if rows:
        console.print(_table(rows))
        for line in _within_error(rows):
            console.print(line, soft_wrap=True)
    reasons = [*_with_another_choice(candidates), *_without_a_row(candidates, rows)]
    if reasons:
        console.print("\nwhy the others lost")
    for line in reasons:
        console.print(f"  {line}", soft_wrap=True)
    if rows and rows[0].layout:
        console.print("\nthe first, as settings")
        _print_settings(console, rows[0])
    if offer:
        console.print(_offer_text(offer, candidates[0]), soft_wrap=True)
        _print_settings(console, offer)
    return console.export_text()


def _within_error(rows: Sequence[Candidate]) -> Iterator[str]:
    """Yield which rows of the table may be as fast as the first: those whose range overlaps with its own."""
    worst = rows[0].prediction.seconds[1] if rows else 0.0
    numbers = []
    for number, candidate in enumerate(rows[1:], 2):
        if candidate.prediction.seconds[0] <= worst:
            numbers.append(f"{number}.")
    if numbers:
        yield f"within the error: no difference between 1. and {', '.join(numbers)} (their ranges overlap)"


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
    table.add_column("")
    table.add_column("devices")
    table.add_column("groups", justify="right")
    table.add_column("micro-batch", justify="right")
    table.add_column("moves", justify="right")
    table.add_column("an iteration")
    table.add_column("peak")
    for number, candidate in enumerate(best, 1):
        layout = candidate.layout
        peaks = [size_text(peak.bytes) for peak in candidate.peaks.values()]
        table.add_row(
            f"{number}.",
            _devices_text(candidate),
            str(layout.group) if layout else "",
            _micro_text(layout),
            str(candidate.moves),
            range_text(candidate.prediction.seconds),
            ", ".join(peaks),
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
    division = _division(layout)
    if division:
        text += f", {division}"
    return text


def _micro_text(layout: PoolLayout | None) -> str:
    if layout is None:
        return "as is"
    recompute = ", again" if layout.recompute else ""
    return f"{layout.micro}{recompute}{layout.host}"


def _division(layout: PoolLayout) -> str:
    """Return what devices divide of a model in a layout, and how many; nothing where each has all of it."""
    if layout.divided is None:
        return ""
    setting, ranks = layout.divided
    if ranks == 1:
        return ""
    divided = "experts" if setting == "expert_parallel" else "layers"
    return f"{divided} over {ranks}"


def _with_another_choice(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each choice of the best layout, how it does with the best alternative, all else as it is."""
    best = candidates[0]
    if not best.fits or best.layout is None:
        return
    for choice, text in CHOICES.items():
        for candidate in candidates[1:]:
            layout = candidate.layout
            if layout and _differ_in(choice, best.layout, layout):
                yield f"the same with {text(layout)}: {_reason(candidate, best)}"
                break


def _differ_in(choice: str, layout: PoolLayout, another: PoolLayout) -> bool:
    """Return whether two layouts differ in one choice alone, and in what depends on it."""
    if getattr(layout, choice) == getattr(another, choice):
        return False
    changes = {choice: getattr(another, choice)}
    for dependent in DEPENDENT.get(choice, ()):
        changes[dependent] = getattr(another, dependent)
    return replace(layout, **changes) == another


def _without_a_row(candidates: Sequence[Candidate], rows: Sequence[Candidate]) -> Iterator[str]:
    """Yield, for each division of the devices without a row in the table, its best layout and why it lost."""
    winner = rows[0] if rows else None
    families = {candidate.family for candidate in rows}
    for candidate in candidates:
        if candidate.family not in families:
            families.add(candidate.family)
            yield f"{candidate.family}: {_reason(candidate, winner)}"
    unfit = [candidate for candidate in candidates if not candidate.fits]
    if unfit:
        yield f"{len(unfit)} do not fit, as: {unfit[0].why_not}"


def _reason(candidate: Candidate, winner: Candidate | None) -> str:
    """Return why a candidate lost: it does not fit, or takes longer than the winner."""
    if not candidate.fits:
        return candidate.why_not
    pools = candidate.prediction.pools
    busiest = max(pools, key=lambda pool: middle(pools[pool]))
    reason = f"{busiest} is busiest, for the most part in `{_longest_step(candidate, busiest)}`"
    if winner is None:
        return reason
    factor = f"{candidate.seconds / winner.seconds:.2f} x the time of the first"
    if candidate.prediction.seconds[0] <= winner.prediction.seconds[1]:
        factor += " (their ranges overlap)"
    return f"{factor}; {reason}"


def _longest_step(candidate: Candidate, pool: str) -> str:
    """Return the node of the step that takes a pool the longest."""
    assert candidate.plan
    node, longest = "", -math.inf
    for step in candidate.plan.steps:
        if not step.seconds or pool not in (step.pool, step.source):
            continue
        seconds = math.prod(step.seconds)  # in the order of the middles, whose squares they are
        if seconds > longest:
            node, longest = step.node, seconds
    return node
