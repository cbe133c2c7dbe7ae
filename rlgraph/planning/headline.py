"""The figures that one decides by: what an iteration and the whole run take, and what they are spent on.

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

TOLD = 3  # steps that are told to limit an iteration
Seconds = tuple[float, float]  # at best, at worst


def headline(pricing: Pricing, predicted: Prediction) -> Headline:
    """Return the figures of a plan whose steps are priced and whose iteration is predicted."""
    plan, seconds, left_out = pricing.plan, predicted.seconds, list[str]()
    evaluation, unknown = _evaluation(pricing)
    left_out += [unknown] * bool(unknown)
    checkpoint = _checkpoint(pricing)
    left_out += _uncounted(plan) if plan.schedule.iterations else []
    if plan.schedule.iterations and checkpoint is None:
        left_out.append("checkpoints: the cluster does not say how fast its `disk` is")
    run = _run(plan, predicted, evaluation or (0.0, 0.0), checkpoint or 0.0)
    if run is None:
        left_out.append("the whole run: how many iterations its epochs are is counted from the data")
    devices, tokens = sum(plan.pools.values()), _tokens(pricing)
    hours = (run[0] * devices / 3600, run[1] * devices / 3600) if run else None
    updates = [step for step in plan.steps if rate_of(step) == "update"]
    return Headline(
        iteration=Figure.of(seconds),
        run=Figure.of(run) if run else None,
        device_hours=Figure.of(hours) if hours else None,
        tokens=Figure.of((tokens / seconds[0] / devices, tokens / seconds[1] / devices)),
        utilisation={step.node: _utilisation(pricing, step) for step in updates},
        evaluation=Figure.of(evaluation) if evaluation else None,
        checkpoint=Figure.of((checkpoint, checkpoint)) if checkpoint is not None else None,
        limits=_limits(plan, predicted),
        left_out=tuple(left_out),
    )


def _run(plan: Plan, predicted: Prediction, evaluation: Seconds, checkpoint: float) -> Seconds | None:
    """Return the seconds of the whole run; of checkpoints only the last is waited for at best."""
    count, seconds = plan.schedule.iterations, predicted.seconds
    if not count:
        return None
    together = plan.schedule.restarts > 0 and not depth(plan)  # each iteration's is waited for
    ends = []
    for grade, other in ((0, BEST), (1, WORST)):
        evaluations = _times(count, plan.eval_every, seconds[grade]) if plan.eval_steps else []
        saves = _times(count, plan.schedule.save_every, seconds[grade])
        if plan.schedule.best and other == WORST:  # each evaluation is better than those before
            saves = sorted({*saves, *evaluations})
        stretches = len({*evaluations, *saves})
        waited = count if together else len(saves)
        hidden = 0.0 if together or other == WORST else min(checkpoint, seconds[grade]) * (len(saves) - 1)
        fill = _fill(plan, grade, seconds[grade]) * stretches
        fill += predicted.stream.fill[grade] if predicted.stream else 0.0  # no boundary empties what streams
        asked = (len(evaluations) + bool(evaluations and plan.eval_before)) * evaluation[grade]
        ends.append(count * seconds[grade] + fill + asked + waited * checkpoint - hidden)
    return ends[0], ends[1]


def _uncounted(plan: Plan) -> list[str]:
    """Return what comes by epochs, whose iterations are not known before the data are read."""
    named = {"checkpoints": plan.schedule.save_every} | (
        {"evaluations": plan.eval_every} if plan.eval_steps else {}
    )
    return [
        f"{what} on the way: how many iterations {every} are is counted from the data"
        for what, every in named.items()
        if isinstance(every, Interval) and every.epochs
    ]


def _times(count: int, every: int | Interval, seconds: float) -> list[int]:
    """Return after which of so many iterations something is due that has an interval, and at the end.

    Each iteration takes so many seconds. Of epochs nothing is known but the end.

    Example:
        >>> _times(10, 4, 60.0), _times(10, 0, 60.0), _times(10, Interval.parse("5 min"), 90.0)
        ([4, 8, 10], [10], [4, 7, 10])
    """
    if isinstance(every, Interval):
        clock = [int(n * seconds / every.seconds) if every.seconds else 0 for n in range(count)]
        return [*(n for n in range(1, count) if clock[n] > clock[n - 1]), count]
    return [*(n for n in range(every, count, every) if every), count] if every else [count]


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
    if open_rows := [node for node, f in plan.functions["eval"].items() if isinstance(f.value("rows"), str)]:
        return None, f"evaluations: how many rows `{open_rows[0]}` gives is known when its files are read"
    steps = tuple(replace(step, phase="train") for step in plan.eval_steps)
    own = replace(plan, steps=steps, regions={}, functions={"train": plan.functions["eval"]})
    own = replace(own, columns={"train": plan.columns["eval"]}, domains={"train": plan.domains["eval"]})
    priced = replace(pricing, plan=own, work=replace(pricing.work, rows=workload(own).rows, kept={}))
    best, worst = (sum(priced.seconds(step, grade)[0] for step in steps) for grade in (BEST, WORST))
    return (best, worst), ""


def _checkpoint(pricing: Pricing) -> float | None:
    """Return the seconds of a checkpoint: float32 masters and averages of what trains, at the disk's rate."""
    disk, numbers = pricing.cluster.disk, 0
    for name, model in pricing.plan.models.items():
        if model.train and model.optimizer and not model.frozen:
            mesh = pricing.plan.meshes[name]
            size, devices = part_of(pricing.sizes[name], mesh.tensor), mesh.shard
            held = trained_on_device(size, model, devices) + averages_on_device(size, model, devices)
            numbers += held * devices * mesh.tensor
    return MASTER * numbers / disk if disk else None


def _tokens(pricing: Pricing) -> float:
    """Return the tokens of an iteration: of the samples that it makes, or of the rows that it trains on."""
    made = [*_made(pricing)]
    trained = [
        pricing.rows(step.reads, step) * pricing.work.mean for step in pricing.plan.steps if step.updated
    ]
    return sum(made) if made else max(trained, default=0.0)


def _made(pricing: Pricing) -> Iterator[float]:
    plan, work = pricing.plan, pricing.work
    for step in (step for step in plan.steps if step.generates and step.writes):
        domain = plan.domain("train", step.writes[0])
        if domain.maker == step.node:
            mean = work.limited(plan.functions["train"][step.node]).mean
            yield work.rows[domain.name] * (work.prompt + mean) * share(step.when)


def _utilisation(pricing: Pricing, step: Step) -> Figure:
    """Return the FLOPs that a model needs over those that the devices of its update could do."""
    (model, size), plan, work = pricing.model_of(step), pricing.plan, pricing.work
    assert model.train and step.seconds
    rows = sum(pricing.rows(one.reads, one) for one in plan.passes(step))
    epochs = int(plan.functions["train"][step.node].value("epochs", 1))
    flops = 3 * epochs * rows * size.forward_flops(work.mean, work.square)
    peak = pricing.cluster.flops(model.train.dtype) * len(step.devices)
    return Figure.of((flops / peak / step.seconds[0], flops / peak / step.seconds[1]))


def _limits(plan: Plan, predicted: Prediction) -> dict[str, float]:
    """Return the shares of the critical path; where rows stream, of the busiest pool's time."""
    seconds = weighed(plan, {step.id: middle(step.seconds) for step in plan.steps if step.seconds})
    chain: Sequence[tuple[str, float]]
    if predicted.stream:
        busiest = max(plan.pools, key=lambda pool: middle(predicted.pools[pool]))
        chain = [(step.node, seconds[step.id]) for step in plan.steps if busiest in occupied(step)]
        whole = middle(predicted.seconds)
    else:
        chain = critical_path(plan, seconds)
        whole = sum(took for _, took in chain)
    longest = sorted(chain, key=lambda item: -item[1])[:TOLD]
    return {node: round(took / whole, 4) for node, took in longest if took >= 0.05 * whole}
