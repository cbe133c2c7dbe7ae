"""A plan with what it takes on a cluster: seconds and bytes of each step, and the peak of its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from rlgraph.calibrate import Calibration
from rlgraph.cluster import Cluster
from rlgraph.cost import (
    BEST,
    BUCKET,
    WORST,
    Rates,
    Tokens,
    broadcast_seconds,
    decode_seconds,
    host_seconds,
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
from rlgraph.memory import Footprint, Item, device_rows, master, slots
from rlgraph.pipeline import pipeline
from rlgraph.plan import MOVES, ModelPlan, Peak, Plan, Prediction, Step
from rlgraph.reside import reside
from rlgraph.simulate import busy, period, simulate, steady, weighed
from rlgraph.sizes import Size, size_of
from rlgraph.units import size_text
from rlgraph.workload import Workload, workload

TEXT = 4  # bytes of a token as text: about four characters of English


def predict(
    plan: Plan,
    cluster: Cluster,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """The plan with predictions: ``seconds`` and ``bytes`` of its training steps, ``peak``, ``predicted``.

    Args:
        plan: made for as many devices as the cluster has, or fewer.
        cluster: what it is to run on.
        prompt_tokens: mean tokens of a prompt, unless as the plan's attributes suggest.
        response_tokens: mean tokens of a response, likewise.
        calibration: factors on the seconds, measured in a run.

    Raises:
        GraphError: a model of unknown size, a pool larger than the cluster, or a plan that does not fit, with
            where its memory goes and the changes that would make it fit.
    """
    footprint, before = laid_out(plan, cluster, prompt_tokens, response_tokens, calibration)
    peak = footprint.peaks()
    if any(pool.bytes > pool.capacity for pool in peak.values()):
        raise refuse(footprint, before)
    host_holds(footprint)
    return with_prediction(footprint, peak, calibration)


def laid_out(
    plan: Plan,
    cluster: Cluster,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    calibration: Calibration | None = None,
) -> tuple[Footprint, Plan]:
    """The plan in its order on a cluster, with engines moved where that helps; and without these moves.

    Raises:
        GraphError: as ``predict``, but for a plan that does not fit on its devices.
    """
    _groups_inside_hosts(plan, cluster)
    if sum(plan.pools.values()) > cluster.total:
        large = [f"pool `{name}` has {count} devices" for name, count in plan.pools.items()]
        raise fail("pool-size", f"{', '.join(large)}; {cluster.cluster} has {cluster.total}", None)
    work, sizes = workload(plan, prompt_tokens, response_tokens), sizes_of(plan)
    before = pipeline(plan, Pricing(plan, cluster, work, sizes, calibration).middles())
    footprint = Footprint(before, cluster, work, sizes)
    return replace(footprint, plan=reside(footprint)), before


def with_prediction(footprint: Footprint, peak: Mapping[str, Peak], calibration: Calibration | None) -> Plan:
    """The plan of a footprint with its seconds, bytes and peaks."""
    plan = footprint.plan
    pricing = Pricing(plan, footprint.cluster, footprint.work, footprint.sizes, calibration)
    steps = tuple(map(pricing.priced, plan.steps))
    return replace(plan, steps=steps, peak=peak, predicted=pricing.prediction(steps))


def _groups_inside_hosts(plan: Plan, cluster: Cluster) -> None:
    """No tensor-parallel group reaches over two hosts."""
    firsts = dict(zip(plan.pools, accumulate(plan.pools.values(), initial=0), strict=False))
    for name, model in plan.models.items():
        group = model.serve["tensor_parallel"] if model.serve else 1
        first = firsts[model.serve["pool"]] if model.serve else 0
        if cluster.devices % group or first % group:
            law = f"groups of {group} devices of `{name}` (tensor_parallel) reach over two hosts of "
            law += f"{cluster.cluster}, which have {cluster.devices} devices: their pool begins at {first}"
            remedy = f"a divisor of {cluster.devices}, and a multiple of {group} devices in the pools before"
            raise fail("tensor-parallel", law, None, remedy=remedy)


def host_holds(footprint: Footprint) -> None:
    """What leaves the devices of a host has to fit into its memory."""
    plan, cluster = footprint.plan, footprint.cluster
    if cluster.host_memory is None:
        return
    moved = {(name, part) for s in (*plan.steps, *plan.eval_steps) for name in s.models for part in s.parts}
    for pool, devices in plan.pools.items():
        sizes = footprint.items(pool).items()
        own = sum(size for item, size in sizes if item.engine == "train" and (item.model, item.part) in moved)
        whole = own * min(devices, cluster.devices)
        if whole > cluster.host_memory:
            law = f"{plan.graph} does not fit on {cluster.cluster}: what leaves the devices of pool {pool} "
            law += f"takes {size_text(whole)} of a host, which has {size_text(cluster.host_memory)}"
            remedy = "more devices, so that less has to leave; or change host_memory in the cluster's file"
            raise fail("does-not-fit", law, None, remedy=remedy)


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
    calibration: Calibration | None = None

    @cached_property
    def footprint(self) -> Footprint:
        """What the same takes in memory."""
        return Footprint(self.plan, self.cluster, self.work, self.sizes)

    def middles(self) -> dict[int, float]:
        """Step -> seconds between best and worst."""
        return {step.id: self.middle(step) for step in self.plan.steps}

    def middle(self, step: Step) -> float:
        """Seconds between best and worst: their geometric mean."""
        return math.sqrt(self.seconds(step, BEST)[0] * self.seconds(step, WORST)[0])

    def prediction(self, steps: Sequence[Step]) -> Prediction:
        """What an iteration of these priced steps takes in the steady state, and how busy each pool is."""
        deepest = max((step.lead for step in steps), default=0)
        count = 4 * (deepest + 1) if deepest else 1
        whole, pools = [], []
        for grade in (0, 1):
            seconds = weighed(self.plan, {step.id: step.seconds[grade] for step in steps if step.seconds})
            whole.append(round(period(simulate(steady(self.plan), seconds, count), count), 6))
            pools.append(busy(self.plan, seconds))
        both = {pool: (round(pools[0][pool], 6), round(pools[1][pool], 6)) for pool in self.plan.pools}
        on = self.calibration.calibration if self.calibration else ""
        return Prediction(self.cluster.cluster, (whole[0], whole[1]), both, self.work.assumed, on)

    def priced(self, step: Step) -> Step:
        """The step with its seconds and bytes."""
        best, moved = self.seconds(step, BEST)
        worst, _ = self.seconds(step, WORST)
        return replace(step, seconds=(round(best, 6), round(worst, 6)), bytes=round(moved))

    def seconds(self, step: Step, grade: int) -> tuple[float, float]:
        """Seconds at one grade, and bytes. Where a run was measured, the middle times its factor."""
        seconds, moved = self._assumed(step, grade)
        factors = self.calibration and self.calibration.of(step)
        if factors:
            other, _ = self._assumed(step, WORST if grade == BEST else BEST)
            seconds = math.sqrt(seconds * other) * factors[0 if grade == BEST else 1]
        return seconds, moved

    def _assumed(self, step: Step, grade: int) -> tuple[float, float]:
        if step.kind == "repartition":
            seconds, moved = self._repartition(step, grade)
        elif step.kind == "sync":
            seconds, moved = self._sync(step, grade)
        elif step.kind in MOVES:
            seconds, moved = self._move(step, grade)
        elif step.engine == "serve":
            seconds, moved = self._rollout(step, grade), 0.0
        elif step.copied:
            seconds, moved = self._copy(step, grade)
        elif step.engine == "train":
            seconds, moved = self._pass(step, grade)
        else:
            seconds, moved = self._on_host(step, grade), 0.0
        return seconds + ASSUMED.step[grade], moved

    def _copy(self, step: Step, grade: int) -> tuple[float, float]:
        """A full gather of the weights that are copied; each device keeps its shard."""
        size, model = self.sizes[step.copied], self.plan.models[step.copied]
        rates = self._rates(step.pool, "float32", grade)
        return sync_seconds(size, rates, master(model)), sync_bytes(size, rates.devices, master(model))

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
        group, graphs = model.serve["tensor_parallel"], model.serve["engine"] == "sglang"
        rates = Rates(self.cluster, group, model.serve["dtype"], grade, group=group)
        rows = device_rows(self.plan, step, self.work) * group
        prompts = rows / self.plan.columns[step.phase][step.writes[0]].times
        first = prefill_seconds(size, rates, prompts, self.work.prompt)
        lengths = self.work.limited(self.plan.functions[step.phase][step.node])
        return first + decode_seconds(
            size, rates, rows, slots(self.plan, step, self.work), self.work.prompt, lengths, graphs
        )

    def _pass(self, step: Step, grade: int) -> tuple[float, float]:
        model, size = self._model(step)
        assert model.train
        attributes = self.plan.functions[step.phase][step.node].attributes
        minibatches, epochs = (int(attributes.get(name, 1)) for name in ("minibatches", "epochs"))
        rates = self._rates(step.pool, model.train["dtype"], grade)
        times = minibatches * epochs if step.updates else 1
        work = self._share(step, model.train["micro_tokens"], minibatches, times)
        if step.updates:
            factor = 4 if model.train["recompute"] else 3
            seconds = update_seconds(size, rates, work, times, factor)
            return seconds, update_bytes(size, rates, work.passes, times)
        return score_seconds(size, rates, work), score_bytes(size, rates, work.passes)

    def _share(self, step: Step, micro_tokens: int, minibatches: int, times: int) -> Tokens:
        """What the busiest device computes: an even share, or the longest sample, of each mini-batch."""
        cuts = minibatches if step.updates else 1
        rows = self._rows(step.reads, step) / cuts
        tokens = max(rows * self.work.mean / len(step.devices), self.work.longest(rows))
        squares = tokens / self.work.mean * self.work.square
        passes = times * math.ceil(tokens / max(micro_tokens, self.work.longest(rows)))
        return Tokens(tokens * times, squares * times, passes)

    def _rates(self, pool: str, dtype: str, grade: int) -> Rates:
        """Of the devices of a pool, all of them."""
        first = 0
        for name, count in self.plan.pools.items():
            if name == pool:
                break
            first += count
        return Rates(self.cluster, self.plan.pools[pool], dtype, grade, first=first)

    def _sync(self, step: Step, grade: int) -> tuple[float, float]:
        model, size = self._model(step)
        rates = self._rates(step.source or step.pool, sync_dtype(model), grade)
        seconds, moved = (
            sync_seconds(size, rates, master(model)),
            sync_bytes(size, rates.devices, master(model)),
        )
        whole = size.parameters * rates.width
        # files are written by one device and read by all: what the host's link lets through, twice
        files = 2 * host_seconds(whole, rates) if step.path == "disk" else 0.0
        if step.source:
            both = replace(rates, first=0, devices=sum(self.plan.pools.values()))
            seconds += files or broadcast_seconds(size, both)
            moved = max(moved, whole)
        if model.serve and model.serve["addresses"]:  # of other hosts, as far as the plan knows
            seconds += files or whole / (self.cluster.inter_link * rates.efficiency.link[grade])
        return seconds, moved

    def _move(self, step: Step, grade: int) -> tuple[float, float]:
        """An engine's parts to the host or back; a serve engine drops its own, frozen ones are there."""
        (name,) = step.models
        dropped = step.engine == "serve" or (step.kind == "offload" and self.plan.models[name].frozen)
        items = self.footprint.items(step.pool)
        moved = 0.0 if dropped else float(sum(items[Item(name, "train", part)] for part in step.parts))
        return host_seconds(moved, self._rates(step.pool, "float32", grade)), moved

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


def sync_dtype(model: ModelPlan) -> str:
    """What the serve engine holds weights in."""
    assert model.serve
    return str(model.serve["dtype"])


def sync_least(plan: Plan, step: Step) -> int:
    """The fewest bytes that a device has to receive in a sync: what it lacks, in the serve engine's type."""
    (name,) = step.models
    model = plan.models[name]
    width = 2 if sync_dtype(model) == "bfloat16" else 4
    assert model.serve
    devices = 0 if step.source else len(step.devices)
    size, group = size_of(model.path, model.head), int(model.serve["tensor_parallel"])
    return round(sync_bound(size, devices, width, group))


def sync_buckets(plan: Plan, step: Step) -> int:
    """In how many pieces the weights of a sync travel, each of at most ``BUCKET`` numbers."""
    (name,) = step.models
    return math.ceil(size_of(plan.models[name].path).parameters / BUCKET)
