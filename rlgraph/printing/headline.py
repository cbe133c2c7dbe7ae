"""The figures that one decides by, as text: the same in plans, pages, terminals and reports."""

from collections.abc import Callable, Iterator, Mapping

from rlgraph.ir.chosen import chosen_settings
from rlgraph.ir.plan import Plan
from rlgraph.ir.prediction import Figure, Headline, Peak, StreamForecast
from rlgraph.syntax.yaml_text import overrides
from rlgraph.units import middle, number_text, plural, range_text, seconds_text, size_text

LABEL = 14  # characters before a figure
EVEN = 0.05  # a change by a smaller share is no gain and no loss: rates are not known so well


def headline(plan: Plan) -> dict[str, str]:
    """Return what a figure is about -> the figure and its range; empty for a plan that has no cluster."""
    if plan.predicted is None or plan.predicted.headline is None:
        return {}
    return dict(_figures(plan, plan.predicted.headline))


def headline_text(plan: Plan) -> Iterator[str]:
    """Yield the lines of the headline, the first of which names the cluster of the prediction."""
    figures = headline(plan)
    if not figures:
        return
    yield predicted_on(plan)
    for label, figure in figures.items():
        yield f"  {label:<{LABEL}}{figure}"


def predicted_on(plan: Plan) -> str:
    """Return the cluster that a plan is predicted for, and the run that calibrated the prediction."""
    assert plan.predicted
    run = plan.predicted.calibrated
    calibration = f"calibrated on {run}" if run else "not calibrated"
    return f"predicted on {plan.predicted.cluster}, {calibration}"


def _figures(plan: Plan, figures: Headline) -> Iterator[tuple[str, str]]:
    """Yield pairs of a label and a figure."""
    assert plan.predicted
    device = "GPU" if plan.device == "cuda" else "device"
    yield "iteration", _figure_text(figures.iteration, seconds_text)
    if figures.run and figures.device_hours:
        yield "run", f"{_figure_text(figures.run, seconds_text)}, {plan.iterations:,} iterations"
        yield f"{device}-hours", _figure_text(figures.device_hours, number_text)
    yield "tokens", f"{_figure_text(figures.tokens, number_text)} per second per {device}"
    if figures.utilisation:
        updates = [f"`{node}` {_figure_text(mfu, _percent)}" for node, mfu in figures.utilisation.items()]
        yield "MFU", ", ".join(updates)
    if plan.predicted.stream:
        yield from _streaming(plan.predicted.stream)
    for node, (in_flight, waves) in plan.predicted.in_flight.items():
        samples = f"{in_flight:,} samples per engine"
        yield "in flight", f"`{node}` {samples}, {waves} {plural('wave', waves)}"
    chosen = chosen_settings(plan)
    if chosen:
        yield "chosen", f"{' '.join(overrides(chosen))}; without, it does not fit"
    for pool, peak in (plan.peak or {}).items():
        yield f"memory {pool}", _memory(peak)
    if figures.evaluation:
        yield "evaluation", _figure_text(figures.evaluation, seconds_text)
    if figures.checkpoint:
        yield "checkpoint", _figure_text(figures.checkpoint, seconds_text)
    if figures.limits:
        yield _limits(plan, figures.limits)
    filters = [*_filters(plan)]
    if filters:
        yield "filters", "; ".join(filters)
    if figures.left_out:
        yield "left out", "; ".join(figures.left_out)


def _limits(plan: Plan, limits: Mapping[str, float]) -> tuple[str, str]:
    """Return the label and the shares of the longest steps: "limited by" only where ranges do not overlap."""
    shares = ", ".join(f"`{node}` {_percent(share)}" for node, share in limits.items())
    rivals = _rivals(plan, limits)
    if rivals:
        return "longest", f"{shares} (the ranges of {' and '.join(rivals)} overlap)"
    return "limited by", shares


def _rivals(plan: Plan, limits: Mapping[str, float]) -> list[str]:
    """Return the longest step and those that may be longer within the ranges; none where it is the longest.

    Args:
        limits: step -> its share of an iteration, the largest first.
    """
    longest, *shorter = limits
    at_best = limits[longest] / _spread(plan, longest)
    rivals = []
    for node in shorter:
        at_worst = limits[node] * _spread(plan, node)
        if at_worst >= at_best:
            rivals.append(f"`{node}`")
    if rivals:
        rivals.insert(0, f"`{longest}`")
    return rivals


def _spread(plan: Plan, node: str) -> float:
    """Return by which factor the seconds of a step at worst are above the middle of their range."""
    spread = 1.0
    for step in plan.steps:
        if step.node != node or step.seconds is None:
            continue
        most = step.seconds[1]
        if most > 0:
            spread = max(spread, most / middle(step.seconds))
    return spread


def _filters(plan: Plan) -> Iterator[str]:
    """Yield which share of its rows each filter is assumed to keep, and what follows for sampling.

    A filter that is assumed to keep all rows has no line: nothing follows from it.
    """
    kept_rows: Mapping[str, float] = {}
    if plan.origin and plan.origin.target:
        kept_rows = plan.origin.target.kept_rows
    share_of_others = kept_rows.get("", 1.0)
    makers = [domain.maker for domain in plan.domains["train"].values() if domain.filtered]
    for maker in dict.fromkeys(makers):
        region = plan.regions.get(maker)
        if region is None:
            share = kept_rows.get(maker, share_of_others)
            consequence = " (--kept-rows)"
        else:
            share = region.expected
            consequence = f": {number_text(1 / share)} x the rows are drawn (refill.expected)"
        if share != 1:
            yield f"`{maker}` keeps {_percent(share)} of its rows{consequence}"


def _memory(peak: Peak) -> str:
    """Return text such as ``60 GB of 80 GB in `update_policy`, 20 GB (25%) left``."""
    used = f"{size_text(peak.bytes)} of {size_text(peak.capacity)} in `{peak.step}`"
    free = peak.capacity - peak.bytes
    if free < 0:
        return f"{used}, too much"
    return f"{used}, {size_text(free)} ({_percent(free / peak.capacity)}) left"


def _streaming(forecast: StreamForecast) -> Iterator[tuple[str, str]]:
    """Yield what streaming gains, or loses, on these devices, and how old rows are."""
    gains = [_gain(forecast.seconds, "synchronous", forecast.synchronous)]
    if forecast.ahead:
        gains.append(_gain(forecast.seconds, "`by: batch`", forecast.ahead))
    yield "streaming", ", ".join(gains)
    mean = _figure_text(Figure.of(forecast.age), number_text)
    bound = "no bound" if forecast.bound is None else f"bound {forecast.bound}"
    text = (
        f"{mean} updates on average, {forecast.oldest} at most ({bound}); "
        f"{forecast.waiting:,} of {forecast.begun:,} rows wait at most"
    )
    if max(forecast.dropped):
        text += f"; {_figure_text(Figure.of(forecast.dropped), _percent)} are dropped"
    yield "age of rows", text


def _gain(seconds: tuple[float, float], name: str, alternative: tuple[float, float]) -> str:
    """Return what is gained or lost against another way to run on the same devices.

    Example:
        >>> _gain((1, 4), "synchronous", (2, 8)), _gain((1, 4), "`by: batch`", (1, 4))
        ('2 x as fast as synchronous (2 s to 8 s)', 'no gain over `by: batch` (1 s to 4 s)')
        >>> _gain((2, 2), "`by: batch`", (1, 1))
        'slower than `by: batch` (1 s to 1 s) by 100%'
    """
    speedup = middle(alternative) / middle(seconds)
    name_and_time = f"{name} ({range_text(alternative)})"
    if speedup < 1 - EVEN:
        return f"slower than {name_and_time} by {_percent(1 / speedup - 1)}"
    if speedup > 1 + EVEN:
        return f"{number_text(speedup)} x as fast as {name_and_time}"
    return f"no gain over {name_and_time}"


def _figure_text(figure: Figure, text: Callable[[float], str]) -> str:
    """Return a figure, with its range if that differs in the digits that are shown."""
    low = text(figure.low)
    value = text(figure.value)
    high = text(figure.high)
    if low == high:
        return value
    return f"{value} ({low} to {high})"


def _percent(share: float) -> str:
    return f"{share:.0%}"
