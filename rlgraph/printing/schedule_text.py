"""Prints a plan's schedule: evaluations, the length of a run, regions, and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from rlgraph.ir.actions import Kind
from rlgraph.ir.plan import Plan
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.settings import Schedule
from rlgraph.units import plural


def evaluation_heading(plan: Plan) -> str:
    """Return when a plan evaluates, what it reports, and which checkpoints an evaluation keeps."""
    times = []
    if plan.eval_before:
        times.append("before the first iteration")
    if isinstance(plan.eval_every, Interval):
        times.append(f"every {plan.eval_every}")
    elif plan.eval_every:
        times.append(f"after every {plan.eval_every} iterations")
    moments = ", ".join(times)
    if moments:
        moments += " and "
    moments += "after the last"
    metrics = ", ".join(f"{metric} = mean of {column}" for metric, column in plan.report.items())
    return f"evaluate {moments}, reporting {metrics}{_best_checkpoints(plan.schedule)}"


def _best_checkpoints(schedule: Schedule) -> str:
    """Return which checkpoints are retained for their metric, as the end of a sentence."""
    best = schedule.best
    if best is None:
        return ""
    metric = best.metric.removeprefix("eval/")
    extreme = "highest" if best.mode == "max" else "lowest"
    checkpoints = "checkpoint stays" if best.keep == 1 else f"{best.keep} checkpoints stay"
    return f"; the {checkpoints} whose eval/{metric} is {extreme}"


def training_heading(plan: Plan) -> str:
    """Return how long a run is, how far generation leads, and which columns are recorded."""
    heading = f"repeat {_length(plan)}"
    lead = generation_lead(plan)
    if lead:
        heading += f", generation {lead} {plural('iteration', lead)} ahead of training"
    recorded = _recorded_iterations(plan.schedule.record_every)
    if recorded:
        heading += f", keeping the columns of {recorded} in recorded/"
    return heading


def generation_lead(plan: Plan) -> int:
    """Return how many iterations the step that leads most is ahead of training; 0 without a pipeline."""
    return max((step.lead for step in plan.steps), default=0)


def _length(plan: Plan) -> str:
    """Return how long a run is: ``500 times``, or ``for 3 epochs of prompts``."""
    epochs = plan.schedule.epochs
    if isinstance(epochs, dict):
        ((source, count),) = epochs.items()
        return f"for {count:g} {plural('epoch', count)} of {source}"
    return f"{plan.iterations} times"


def _recorded_iterations(interval: int | Interval) -> str:
    """Return in words the iterations whose columns are recorded; empty if none are."""
    if isinstance(interval, Interval):
        return f"iteration 1 and of the next one every {interval}"
    if interval > 1:
        return f"iterations 1, {1 + interval}, {1 + 2 * interval}, ..."
    return "every iteration" if interval else ""


def region_heading(plan: Plan, name: str) -> Iterator[str]:
    """Yield the lines above the steps of a region: a refill that repeats, or steps that stream."""
    steps = [step for step in plan.steps if step.region == name]
    numbers = [step.id for step in steps if step.kind is not Kind.COLLECT]
    start = numbers[0]
    end = numbers[-1]
    region = plan.regions[name]
    if region.streams:
        yield (
            f"  all along, steps {start} to {end}, on rows as they finish; "
            f"at most {region.max_rows_in_flight:,} rows are begun and not used"
        )
        yield f"  {_age_rule(plan, region.keep)}"
    else:
        limit = f"at most {region.rounds} {plural('round', region.rounds)}"
        yield f"  repeat steps {start} to {end} until {region.rows} rows stay, {limit}"


def _age_rule(plan: Plan, staleness: int) -> str:
    """Return how old the weights may be that generated a token, and what happens to older rows."""
    stream = plan.schedule.stream
    assert stream
    if stream.too_old == "correct":
        return "tokens are used however old the weights are that drew them: the loss corrects for it"
    rule = f"tokens are of weights at most {staleness} {plural('update', staleness)} old"
    if stream.too_old == "wait":
        return f"{rule}: an iteration waits for what would be older"
    return f"{rule}: what would be older is dropped"


def slot_steps(plan: Plan, pool: str) -> str:
    """Return what a pool runs in slot t of a full pipeline, as ``rollout(t+1), update_policy(t)``."""
    names = []
    for number in plan.slot:
        step = plan.steps[number - 1]
        if pool in (step.pool, step.source):
            iteration = f"t+{step.lead}" if step.lead else "t"
            names.append(f"{step.node}({iteration})")
    return ", ".join(names)


def pipeline_ends(lead: int) -> Iterator[str]:
    """Yield how a pipeline fills before its first iteration and drains after its last."""
    if lead == 1:
        filling, draining = "slot -1 runs", "slot runs"
    else:
        filling, draining = f"slots -{lead} to -1 run", f"{lead} slots run"
    yield f"  prologue       {filling} what leads, for the first iterations"
    yield f"  epilogue       the last {draining} without what would lead: before an evaluation, a checkpoint"
    yield "                 and the end, nothing is in flight"
