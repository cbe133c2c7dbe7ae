"""The figures that one decides by, as text: the same in plans, pages, terminals and reports."""

from collections.abc import Callable, Iterator

from rlgraph.ir.plan import Plan
from rlgraph.ir.prediction import Figure
from rlgraph.units import middle, number_text, range_text, seconds_text, size_text

LABEL = 14  # characters before a figure
EVEN = 0.05  # a smaller share than this is no gain: rates are not known so well


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
    yield from _streamed(plan)
    for node, (at_once, waves) in predicted.in_flight.items():
        yield "in flight", f"`{node}` {at_once:,} samples per engine, {waves} wave{'s' * (waves > 1)}"
    for pool, peak in (plan.peak or {}).items():
        rest = peak.capacity - peak.bytes
        free = f"{size_text(rest)} ({_percent(rest / peak.capacity)}) left" if rest >= 0 else "too much"
        taken = f"{size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"
        yield f"memory {pool}", f"{taken}, {free}"
    for label, figure in (("evaluation", told.evaluation), ("checkpoint", told.checkpoint)):
        if figure:
            yield label, _said(figure, seconds_text)
    if told.limits:
        yield "limited by", ", ".join(f"`{node}` {_percent(share)}" for node, share in told.limits.items())
    if told.left_out:
        yield "left out", "; ".join(told.left_out)


def _streamed(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what streaming gains, or loses, on these devices, and how old rows are."""
    if plan.predicted is None or (told := plan.predicted.stream) is None or plan.schedule.stream is None:
        return
    others = {"synchronous": told.synchronous}
    if told.ahead:
        others[f"`staleness: {plan.schedule.stream.staleness}`"] = told.ahead
    yield "streaming", ", ".join(_gain(told.seconds, name, took) for name, took in others.items())
    mean = _said(Figure.of(told.age), number_text)
    bound = "no bound" if told.bound is None else f"bound {told.bound}"
    waits = f"{told.waiting:,} of {told.begun:,} rows wait at most"
    if max(told.dropped):
        waits += f"; {_said(Figure.of(told.dropped), _percent)} are dropped"
    yield "age of rows", f"{mean} updates on average, {told.oldest} at most ({bound}); {waits}"


def _gain(seconds: tuple[float, float], name: str, other: tuple[float, float]) -> str:
    """Return what is gained or lost against another way to run on the same devices.

    Example:
        >>> _gain((1, 4), "synchronous", (2, 8)), _gain((1, 4), "`staleness: 1`", (1, 4))
        ('2 x as fast as synchronous (2 s to 8 s)', 'no gain over `staleness: 1` (1 s to 4 s)')
        >>> _gain((2, 2), "`staleness: 1`", (1, 1))
        'slower than `staleness: 1` (1 s to 1 s) by 100%'
    """
    gain, took = middle(other) / middle(seconds), f"{name} ({range_text(other)})"
    if gain < 1 - EVEN:
        return f"slower than {took} by {_percent(1 / gain - 1)}"
    return f"{number_text(gain)} x as fast as {took}" if gain > 1 + EVEN else f"no gain over {took}"


def _said(figure: Figure, text: Callable[[float], str]) -> str:
    low, value, high = (text(number) for number in (figure.low, figure.value, figure.high))
    return f"{value} ({low} to {high})" if low != high else value


def _percent(share: float) -> str:
    return f"{share:.0%}"
