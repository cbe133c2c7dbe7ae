"""The figures that one decides by, as text: the same in plans, pages, terminals and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlgraph.ir.plan import Plan
from rlgraph.ir.prediction import Figure
from rlgraph.units import number_text, seconds_text, size_text

LABEL = 14  # characters before a figure


def headline(plan: Plan) -> dict[str, str]:
    """Return what a figure is of -> the figure and its range; nothing of a plan for no cluster."""
    return dict(_figures(plan))


def headline_text(plan: Plan) -> Iterator[str]:
    """Yield the lines of the headline, the first of which says for what it is predicted."""
    if plan.predicted and plan.predicted.headline:
        yield predicted_on(plan)
        yield from (f"  {label:<{LABEL}}{said}" for label, said in headline(plan).items())


def predicted_on(plan: Plan) -> str:
    """Return for which cluster a plan is predicted, and whether by what a run has measured."""
    assert plan.predicted
    on = plan.predicted.calibrated
    return f"predicted on {plan.predicted.cluster}, " + (f"calibrated on {on}" if on else "not calibrated")


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    if predicted is None or (told := predicted.headline) is None:
        return
    gpu = "GPU" if plan.device == "cuda" else "device"
    yield "iteration", _said(told.iteration, seconds_text)
    if told.run and told.device_hours:
        yield "run", f"{_said(told.run, seconds_text)}, {plan.iterations:,} iterations"
        yield f"{gpu}-hours", _said(told.device_hours, number_text)
    yield "tokens", f"{_said(told.tokens, number_text)} per second per {gpu}"
    if told.utilisation:
        updates = (f"`{node}` {_said(share, _percent)}" for node, share in told.utilisation.items())
        yield "MFU", ", ".join(updates)
    for node, (at_once, waves) in predicted.in_flight.items():
        yield "in flight", f"`{node}` {at_once:,} samples per engine, {waves} wave{'s' * (waves > 1)}"
    for pool, peak in (plan.peak or {}).items():
        rest = peak.capacity - peak.bytes
        free = f"{size_text(rest)} ({_percent(rest / peak.capacity)}) left" if rest >= 0 else "too much"
        yield (
            f"memory {pool}",
            f"{size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`, {free}",
        )
    for label, figure in (("evaluation", told.evaluation), ("checkpoint", told.checkpoint)):
        if figure:
            yield label, _said(figure, seconds_text)
    if told.limits:
        yield "limited by", ", ".join(f"`{node}` {_percent(share)}" for node, share in told.limits.items())
    if told.left_out:
        yield "left out", "; ".join(told.left_out)


def _said(figure: Figure, text: Callable[[float], str]) -> str:
    low, value, high = (text(number) for number in (figure.low, figure.value, figure.high))
    return f"{value} ({low} to {high})" if low != high else value


def _percent(share: float) -> str:
    return f"{share:.0%}"
