"""Prints a plan's prediction for a cluster: memory, figures, assumptions, and busy pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlgraph.ir.plan import Plan
from rlgraph.ir.prediction import Peak
from rlgraph.printing.headline import headline_text
from rlgraph.units import range_text, size_text


def prediction_text(plan: Plan) -> Iterator[str]:
    """Yield the lines about a plan's prediction; none for a plan that was made for no cluster."""
    if plan.peak is None or plan.predicted is None:
        return
    yield from memory_text(plan.peak)
    yield ""
    yield from headline_text(plan)
    yield "assuming"
    for assumption in plan.predicted.assumed:
        yield f"  {assumption}"
    if len(plan.pools) > 1:
        yield from _busy_pools(plan.predicted.pools, plan.predicted.seconds)


def _busy_pools(busy: Mapping[str, tuple[float, float]], iteration: tuple[float, float]) -> Iterator[str]:
    for pool, seconds in busy.items():
        least = seconds[0] / iteration[0]
        most = seconds[1] / iteration[1]
        yield f"  pool {pool} is busy for {range_text(seconds)} of it ({least:.0%} to {most:.0%})"


def memory_text(peaks: Mapping[str, Peak]) -> Iterator[str]:
    """Yield the peak memory of a device of each pool, with its largest parts first."""
    for pool, peak in peaks.items():
        of_capacity = f"{size_text(peak.bytes)} of {size_text(peak.capacity)}"
        share = peak.bytes / peak.capacity
        yield f"peak of a device of {pool}, in `{peak.step}`: {of_capacity} ({share:.0%})"
        for name, size in sorted(peak.parts.items(), key=lambda item: -item[1]):
            yield f"  {name:<17} {size_text(size):>9}  {size / peak.bytes:>4.0%}"
        if peak.host:
            on_host = " and ".join(f"{name} {size_text(size)}" for name, size in peak.host.items())
            yield f"  beside it, in its host's memory: {on_host}"
