"""The figures by which a user decides: what an iteration and the whole run take, and what they are spent on.

A run is its iterations in the steady state, the filling of the pipeline before each stretch of them,
evaluations, and checkpoints as far as no iteration hides them:

    evaluation │ fill │ iterations │ evaluation │ fill │ iterations │ evaluation │ checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlgraph.costs.dtypes import MASTER
from rlgraph.costs.efficiency import BEST, WORST
from rlgraph.costs.lora_size import trained_on_device
from rlgraph.costs.optimizers import averages_on_device
from rlgraph.costs.plan_size import part_of
from rlgraph.costs.pricing import Pricing
from rlgraph.costs.step_rates import rate_of
from rlgraph.costs.workload import workload
from rlgraph.ir.intervals import share
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.prediction import Figure, Headline, Prediction
from rlgraph.planning.simulate import critical_path, depth, occupied, simulate, steady, weighed
from rlgraph.syntax.interval import Interval
from rlgraph.units import middle

LIMITING = 3  # steps, at most, that are named as limits of an iteration
LEAST_SHARE = 0.05  # of an iteration, for a step to be named
Seconds = tuple[float, float]  # at best, at worst
NOTHING: Seconds = (0.0, 0.0)


def headline(pricing: Pricing, predicted: Prediction) -> Headline:
    """Return the figures of a plan whose steps are priced and whose iteration is predicted."""
    plan = pricing.plan
    best, worst = predicted.seconds
    devices = sum(plan.pools.values())
    evaluation, unknown = _evaluation(pricing)
    checkpoint = _checkpoint(pricing)
    left_out = [unknown] if unknown else []
    run, hours = None, None
    if plan.schedule.iterations:
        run_seconds = (
            _run(plan, predicted, 0, evaluation or NOTHING, checkpoint or 0.0),
            _run(plan, predicted, 1, evaluation or NOTHING, checkpoint or 0.0),
        )
        run = Figure.of(run_seconds)
        hours = Figure.of((run_seconds[0] * devices / 3600, run_seconds[1] * devices / 3600))
        left_out += _uncounted(plan)
        if checkpoint is None:
            left_out.append("checkpoints: the cluster does not say how fast its `disk` is")
    else:
        left_out.append("the whole run: how many iterations its epochs are is counted from the data")
    tokens = _tokens(pricing)
    updates = [step for step in plan.steps if rate_of(step) == "update"]
    return Headline(
        iteration=Figure.of(predicted.seconds),
        run=run,
        device_hours=hours,
        tokens=Figure.of((tokens / best / devices, tokens / worst / devices)),
        utilisation={step.node: _utilisation(pricing, step) for step in updates},
        evaluation=Figure.of(evaluation) if evaluation else None,
        checkpoint=Figure.of((checkpoint, checkpoint)) if checkpoint is not None else None,
        limits=_limits(plan, predicted),
        left_out=tuple(left_out),
    )


def _run(plan: Plan, predicted: Prediction, grade: int, evaluation: Seconds, checkpoint: float) -> float:
    """Return the seconds of the whole run, at best (grade 0) or at worst (1).

    At best an iteration hides every checkpoint but the last. With ``restarts``, an iteration that does not
    run ahead waits for a checkpoint of its own.
    """
    count = plan.schedule.iterations
    assert count
    seconds = predicted.seconds[grade]
    is_worst = grade == 1
    evaluations = []
    if plan.eval_steps:
        evaluations = _times(count, plan.eval_every, seconds)
    saves = _times(count, plan.schedule.save_every, seconds)
    if is_worst and plan.schedule.best:  # each evaluation is better than all before it
        saves = sorted({*saves, *evaluations})
    saves_each_iteration = plan.schedule.restarts > 0 and not depth(plan)
    if saves_each_iteration:
        waiting, hidden = count * checkpoint, 0.0
    elif is_worst:
        waiting, hidden = len(saves) * checkpoint, 0.0
    else:
        waiting = len(saves) * checkpoint
        hidden = min(checkpoint, seconds) * (len(saves) - 1)
    stretches = {*evaluations, *saves}  # the pipeline is empty after each
    fill = _fill(plan, grade, seconds) * len(stretches)
    if predicted.stream:
        fill += predicted.stream.fill[grade]  # once: no boundary empties what streams
    evaluated = len(evaluations)
    if evaluations and plan.eval_before:
        evaluated += 1
    return count * seconds + fill + evaluated * evaluation[grade] + waiting - hidden


def _uncounted(plan: Plan) -> list[str]:
    """Return what comes by epochs, whose iterations are not known before the data are read."""
    intervals: dict[str, int | Interval] = {"checkpoints": plan.schedule.save_every}
    if plan.eval_steps:
        intervals["evaluations"] = plan.eval_every
    uncounted = []
    for name, interval in intervals.items():
        is_of_epochs = isinstance(interval, Interval) and interval.epochs
        if is_of_epochs:
            uncounted.append(
                f"{name} on the way: how many iterations {interval} are is counted from the data"
            )
    return uncounted


def _times(count: int, interval: int | Interval, seconds: float) -> list[int]:
    """Return after which of so many iterations something is due that has an interval, and at the end.

    Each iteration takes so many seconds. Of epochs nothing is known but the end.

    Example:
        >>> _times(10, 4, 60.0), _times(10, 0, 60.0), _times(10, Interval.parse("5 min"), 90.0)
        ([4, 8, 10], [10], [4, 7, 10])
    """
    if not interval:
        return [count]
    if not isinstance(interval, Interval):
        return [*range(interval, count, interval), count]
    if not interval.seconds:
        return [count]
    times = []
    for number in range(1, count):
        intervals_before = int((number - 1) * seconds / interval.seconds)
        if int(number * seconds / interval.seconds) > intervals_before:
            times.append(number)
    return [*times, count]


def _fill(plan: Plan, grade: int, period: float) -> float:
    """Return the seconds in which the pipeline fills: what a stretch takes beyond its iterations."""
    if not depth(plan):
        return 0.0
    seconds = weighed(plan, {step.id: step.seconds[grade] for step in plan.steps if step.seconds})
    count = 4 * (depth(plan) + 1)
    end = max(event.end for event in simulate(steady(plan), seconds, count))
    return max(end - count * period, 0.0)


def _evaluation(pricing: Pricing) -> tuple[Seconds | None, str]:
    """Return the seconds of an evaluation; or why they are not known."""
    plan = pricing.plan
    if not plan.eval_steps:
        return None, ""
    for node, function in plan.functions["eval"].items():
        if isinstance(function.value("rows"), str):
            return None, f"evaluations: how many rows `{node}` gives is known when its files are read"
    # priced as a plan that trains: of an evaluation no number of rows is known
    steps = tuple(replace(step, phase="train") for step in plan.eval_steps)
    evaluation = replace(
        plan,
        steps=steps,
        regions={},
        functions={"train": plan.functions["eval"]},
        columns={"train": plan.columns["eval"]},
        domains={"train": plan.domains["eval"]},
    )
    work = replace(pricing.work, rows=workload(evaluation).rows, kept={})
    priced = replace(pricing, plan=evaluation, work=work)
    best, worst = 0.0, 0.0
    for step in steps:
        best += priced.seconds(step, BEST)[0]
        worst += priced.seconds(step, WORST)[0]
    return (best, worst), ""


def _checkpoint(pricing: Pricing) -> float | None:
    """Return the seconds of a checkpoint: float32 masters and averages of what trains, at the disk's rate."""
    disk = pricing.cluster.disk
    if not disk:
        return None
    numbers = 0
    for name, model in pricing.plan.models.items():
        if model.frozen or not model.train or not model.optimizer:
            continue
        mesh = pricing.plan.meshes[name]
        size = part_of(pricing.sizes[name], mesh.tensor)
        masters = trained_on_device(size, model, mesh.shard)
        averages = averages_on_device(size, model, mesh.shard)
        numbers += (masters + averages) * mesh.shard * mesh.tensor
    return MASTER * numbers / disk


def _tokens(pricing: Pricing) -> float:
    """Return the tokens of an iteration: of the samples that it makes, or of the rows that it trains on."""
    sampled = [*_sampled(pricing)]
    if sampled:
        return sum(sampled)
    rows = 0.0
    for step in pricing.plan.steps:
        if step.updated:
            rows = max(rows, pricing.rows(step.reads, step))
    return rows * pricing.work.mean


def _sampled(pricing: Pricing) -> Iterator[float]:
    """Yield the tokens that each step samples in an iteration, prompts included."""
    plan, work = pricing.plan, pricing.work
    for step in plan.steps:
        if not step.generates or not step.writes:
            continue
        domain = plan.domain("train", step.writes[0])
        if domain.maker == step.node:
            mean = work.limited(plan.functions["train"][step.node]).mean
            yield work.rows[domain.name] * (work.prompt + mean) * share(step.when)


def _utilisation(pricing: Pricing, step: Step) -> Figure:
    """Return the FLOPs that a model needs over those that the devices of its update could do."""
    (model, size), plan, work = pricing.model_of(step), pricing.plan, pricing.work
    assert model.train and step.seconds
    rows = sum(pricing.rows(term.reads, term) for term in plan.passes(step))
    epochs = int(plan.functions["train"][step.node].value("epochs", 1))
    # a backward pass does twice the work of a forward pass
    flops = 3 * epochs * rows * size.forward_flops(work.mean, work.square)
    peak = pricing.cluster.flops(model.train.dtype) * len(step.devices)
    best, worst = step.seconds
    return Figure.of((flops / peak / best, flops / peak / worst))


def _limits(plan: Plan, predicted: Prediction) -> dict[str, float]:
    """Return the shares of the critical path; where rows stream, of the busiest pool's time."""
    seconds = weighed(plan, {step.id: middle(step.seconds) for step in plan.steps if step.seconds})
    chain: Sequence[tuple[str, float]]
    if predicted.stream:
        busiest = max(plan.pools, key=lambda pool: middle(predicted.pools[pool]))
        on_busiest = [step for step in plan.steps if busiest in occupied(step)]
        chain = [(step.node, seconds[step.id]) for step in on_busiest]
        total = middle(predicted.seconds)
    else:
        chain = critical_path(plan, seconds)
        total = sum(took for _, took in chain)
    longest = sorted(chain, key=lambda item: -item[1])[:LIMITING]
    limits = {}
    for node, took in longest:
        if took >= LEAST_SHARE * total:
            limits[node] = round(took / total, 4)
    return limits
