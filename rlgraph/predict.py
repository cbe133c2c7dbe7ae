"""A plan with what it takes on a cluster: seconds and bytes of each step, and the peak of its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlgraph.cluster import Cluster
from rlgraph.cost import (
    BEST,
    MASTER,
    WORST,
    Rates,
    Tokens,
    decode_seconds,
    prefill_seconds,
    score_bytes,
    score_seconds,
    sync_bound,
    sync_bytes,
    sync_seconds,
    update_bytes,
    update_seconds,
)
from rlgraph.efficiency import ASSUMED
from rlgraph.errors import GraphError, Problem, fail
from rlgraph.fit import refuse
from rlgraph.lineage import BYTES
from rlgraph.memory import device_rows, handle, peaks, slots
from rlgraph.plan import ModelPlan, Plan, Prediction, Step
from rlgraph.sizes import Size, size_of
from rlgraph.workload import Workload, workload

TEXT = 4  # bytes of a token as text: about four characters of English


def predict(
    plan: Plan, cluster: Cluster, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Plan:
    """The plan with predictions: ``seconds`` and ``bytes`` of its training steps, ``peak``, ``predicted``.

    Args:
        plan: made for as many devices as the cluster has, or fewer.
        cluster: what it is to run on.
        prompt_tokens: mean tokens of a prompt, unless as the plan's attributes suggest.
        response_tokens: mean tokens of a response, likewise.

    Raises:
        GraphError: a model of unknown size, a pool larger than the cluster, or a plan that does not fit, with
            where its memory goes and the changes that would make it fit.
    """
    large = [
        f"pool `{name}` has {count} devices" for name, count in plan.pools.items() if count > cluster.total
    ]
    if large:
        raise fail("pool-size", f"{', '.join(large)}; {cluster.cluster} has {cluster.total}", None)
    work = workload(plan, prompt_tokens, response_tokens)
    sizes = sizes_of(plan)
    peak = peaks(plan, cluster, work, sizes)
    if any(pool.bytes > pool.capacity for pool in peak.values()):
        raise refuse(plan, cluster, work, sizes, peak)
    steps = tuple(Pricing(plan, cluster, work, sizes).priced(step) for step in plan.steps)
    times = [step.seconds for step in steps if step.seconds]
    total = (round(sum(t[0] for t in times), 6), round(sum(t[1] for t in times), 6))
    return replace(plan, steps=steps, peak=peak, predicted=Prediction(cluster.cluster, total, work.assumed))


def sizes_of(plan: Plan) -> dict[str, Size]:
    """The sizes of the models that some engine holds.

    Raises:
        GraphError: with every model whose size is unknown.
    """
    sizes: dict[str, Size] = {}
    problems: list[Problem] = []
    for name, model in plan.models.items():
        if model.train or model.serve:
            try:
                sizes[name] = size_of(model.path, model.head)
            except GraphError as error:
                problems += error.problems
    if problems:
        raise GraphError(dict.fromkeys(problems))
    return sizes


@dataclass(frozen=True)
class Pricing:
    """What a step takes depends on the plan, the cluster, the work and the models."""

    plan: Plan
    cluster: Cluster
    work: Workload
    sizes: Mapping[str, Size]

    def priced(self, step: Step) -> Step:
        """The step with its seconds and bytes."""
        best, moved = self.seconds(step, BEST)
        worst, _ = self.seconds(step, WORST)
        return replace(step, seconds=(round(best, 6), round(worst, 6)), bytes=round(moved))

    def seconds(self, step: Step, grade: int) -> tuple[float, float]:
        """Seconds at one grade, and bytes."""
        engine = handle(self.plan, step)
        if step.kind == "repartition":
            seconds, moved = self._repartition(step, grade)
        elif step.kind == "sync":
            seconds, moved = self._sync(step, grade)
        elif engine == "serve":
            seconds, moved = self._rollout(step, grade), 0.0
        elif engine == "train":
            seconds, moved = self._pass(step, grade)
        else:
            seconds, moved = self._on_host(step, grade), 0.0
        return seconds + ASSUMED.step[grade], moved

    def _model(self, step: Step) -> tuple[ModelPlan, Size]:
        (name,) = step.models
        return self.plan.models[name], self.sizes[name]

    def _rows(self, columns: tuple[str, ...], step: Step) -> float:
        found = [self.plan.columns[step.phase][name].domain for name in columns]
        return max((self.work.rows[domain] for domain in found), default=0.0)

    def _on_host(self, step: Step, grade: int) -> float:
        if step.kind != "run":
            return 0.0
        touched = (*step.reads, *step.writes)
        text = any(self.plan.columns[step.phase][name].type.startswith("text") for name in touched)
        row = ASSUMED.text_row if text else ASSUMED.row
        return self._rows(touched, step) / len(step.devices) * row[grade]

    def _rollout(self, step: Step, grade: int) -> float:
        model, size = self._model(step)
        assert model.serve
        rates = Rates(self.cluster, 1, model.serve["dtype"], grade)
        rows = device_rows(self.plan, step, self.work)
        prompts = rows / self.plan.columns[step.phase][step.writes[0]].times
        first = prefill_seconds(size, rates, prompts, self.work.prompt)
        lengths = self.work.limited(self.plan.functions[step.phase][step.node])
        return first + decode_seconds(
            size, rates, rows, slots(self.plan, step, self.work), self.work.prompt, lengths
        )

    def _pass(self, step: Step, grade: int) -> tuple[float, float]:
        model, size = self._model(step)
        assert model.train
        attributes = self.plan.functions[step.phase][step.node].attributes
        minibatches, epochs = (int(attributes.get(name, 1)) for name in ("minibatches", "epochs"))
        rates = Rates(self.cluster, len(step.devices), model.train["dtype"], grade)
        times = minibatches * epochs if step.updates else 1
        work = self._share(step, model.train["micro_tokens"], minibatches, times)
        if step.updates:
            return update_seconds(size, rates, work, times), update_bytes(size, rates, work.passes, times)
        return score_seconds(size, rates, work), score_bytes(size, rates, work.passes)

    def _share(self, step: Step, micro_tokens: int, minibatches: int, times: int) -> Tokens:
        """What the busiest device computes: an even share, or the longest sample, of each mini-batch."""
        cuts = minibatches if step.updates else 1
        rows = self._rows(step.reads, step) / cuts
        tokens = max(rows * self.work.mean / len(step.devices), self.work.longest(rows))
        squares = tokens / self.work.mean * self.work.square
        passes = times * math.ceil(tokens / max(micro_tokens, self.work.longest(rows)))
        return Tokens(tokens * times, squares * times, passes)

    def _sync(self, step: Step, grade: int) -> tuple[float, float]:
        model, size = self._model(step)
        rates = Rates(self.cluster, len(step.devices), sync_dtype(model), grade)
        return sync_seconds(size, rates, master(model)), sync_bytes(size, rates.devices, master(model))

    def _repartition(self, step: Step, grade: int) -> tuple[float, float]:
        columns = self.plan.columns[step.phase]
        whole = sum(self._row_bytes(columns[c].type) * self.work.rows[columns[c].domain] for c in step.reads)
        devices = self.plan.pools[step.pool]
        away = whole * (devices - 1) / devices
        # rows that lie or gather on one device pass its link, all of them; else each device takes its share
        through_one = "one" in {step.layout, *(columns[c].layout for c in step.reads)}
        seconds = away / (1 if through_one else devices) / ASSUMED.objects[grade]
        received = away / (1 if step.layout == "one" else devices)
        return seconds, received

    def _row_bytes(self, kind: str) -> float:
        """Bytes of one row of a column type such as ``int64[samples, tokens]``."""
        dtype, _, axes = kind.partition("[")
        domain, _, axis = axes.rstrip("]").partition(", ")
        prompt = axis == "prompt_tokens" or (not axis and domain == "prompts")
        tokens = self.work.prompt if prompt else self.work.mean
        if dtype in BYTES:
            return BYTES[dtype] * (tokens if axis else 1)
        return TEXT * tokens


def master(model: ModelPlan) -> int:
    """Bytes of a weight in the train engine."""
    assert model.train
    return MASTER if not model.frozen or model.train["dtype"] == "float32" else 2


def sync_dtype(model: ModelPlan) -> str:
    """What the serve engine holds weights in."""
    assert model.serve
    return str(model.serve["dtype"])


def sync_least(plan: Plan, step: Step) -> int:
    """The fewest bytes that a device has to receive in a sync: what it lacks, in the serve engine's type."""
    (name,) = step.models
    model = plan.models[name]
    width = 2 if sync_dtype(model) == "bfloat16" else 4
    return round(sync_bound(size_of(model.path, model.head), len(step.devices), width))
