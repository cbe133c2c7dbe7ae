"""What a plan is predicted to take, as text: a line a step, the memory of a device, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlgraph.plan import Peak, Plan, Step
from rlgraph.units import range_text, size_text


def step_text(plan: Plan, step: Step) -> str:
    """As ``1.2 s to 4 s, receives 1.73 GB a device``; nothing where nothing was predicted."""
    if step.seconds is None:
        return ""
    words = range_text(step.seconds)
    if step.bytes:
        words += f", receives {size_text(step.bytes)} a device"
    if step.kind == "sync" and step.bytes:
        from rlgraph.predict import sync_buckets, sync_least

        words += f" ({size_text(sync_least(plan, step))} at least) in {sync_buckets(plan, step)} buckets"
    return words


def prediction_text(plan: Plan) -> Iterator[str]:
    """The lines that close a plan for a cluster."""
    if plan.peak is None or plan.predicted is None:
        return
    yield from memory_text(plan.peak)
    yield ""
    where, on = plan.predicted.cluster, plan.predicted.calibrated
    how = f"calibrated on {on}" if on else "not calibrated"
    yield f"predicted on {where}: {range_text(plan.predicted.seconds)} an iteration, {how}, assuming"
    for assumed in plan.predicted.assumed:
        yield f"  {assumed}"
    if len(plan.pools) > 1:
        for pool, took in plan.predicted.pools.items():
            share = " to ".join(f"{a / b:.0%}" for a, b in zip(took, plan.predicted.seconds, strict=True))
            yield f"  pool {pool} is busy for {range_text(took)} of it ({share})"
    if plan.eval_steps:
        yield "  evaluations are left out of the time; their memory is counted"


def memory_text(peak: Mapping[str, Peak]) -> Iterator[str]:
    """The peak of each pool, its largest parts first."""
    for pool, most in peak.items():
        share = most.bytes / most.capacity
        yield (
            f"peak of a device of {pool}, in `{most.step}`: "
            f"{size_text(most.bytes)} of {size_text(most.capacity)} ({share:.0%})"
        )
        for part, size in sorted(most.parts.items(), key=lambda item: -item[1]):
            yield f"  {part:<17} {size_text(size):>9}  {size / most.bytes:>4.0%}"
