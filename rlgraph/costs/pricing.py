"""A plan with what it takes on a cluster: seconds and bytes of each step, and the peak of its memory."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce

from rlgraph.costs import formulas, limits, muon
from rlgraph.costs.calibration import RATES, Calibration
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.efficiency import ASSUMED, BEST, WORST, Rates
from rlgraph.costs.formulas import Tokens
from rlgraph.costs.layer_memory import wide_head
from rlgraph.costs.lora_size import adapter_sizes, served_alone, trained_on_device
from rlgraph.costs.memory import Footprint, Item, gathered_width, master
from rlgraph.costs.model_size import Size
from rlgraph.costs.plan_size import part_of, planned_size, sent_share
from rlgraph.costs.workload import row_work
from rlgraph.engines.registry import serving
from rlgraph.errors import GraphError, Problem
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import ColumnPlan, Plan, Step, TrainPlan
from rlgraph.ir.steps import ONE, Kind
from rlgraph.ops.column_types import DOMAINS, LISTED
from rlgraph.units import middle

TEXT = 4  # bytes of a token as text: about four characters of English


def sizes_of(plan: Plan) -> dict[str, Size]:
    """Return the sizes of the models that some engine holds.

    Raises:
        GraphError: with every model whose size is unknown.
    """
    sizes: dict[str, Size] = {}
    problems: list[Problem] = []
    for name, model in plan.models.items():
        if model.train or model.serve:
            try:
                sizes[name] = planned_size(model)
            except GraphError as error:
                problems += [replace(p, remedy=p.remedy.replace("NAME", name)) for p in error.problems]
    if problems:
        raise GraphError(dict.fromkeys(problems))
    return sizes


@dataclass(frozen=True)
class Pricing(Footprint):
    """Prices of a plan's steps on a cluster: seconds, and bytes that travel, as well as memory."""

    calibration: Calibration | None = None

    def middle(self, step: Step) -> float:
        """Return the geometric mean of best and worst seconds."""
        return middle((self.seconds(step, BEST)[0], self.seconds(step, WORST)[0]))

    def priced(self, step: Step) -> Step:
        """Return the step with its seconds and bytes."""
        (best, moved), (worst, _) = self.seconds(step, BEST), self.seconds(step, WORST)
        return replace(step, seconds=(round(best, 6), round(worst, 6)), bytes=round(moved))

    def seconds(self, step: Step, grade: int) -> tuple[float, float]:
        """Return seconds at one grade, and bytes. Where a run was measured, the middle times its factor."""
        both = {one: self._assumed(step, one) for one in ((BEST, WORST) if self.calibration else (grade,))}
        return self.calibrated(step.rate, grade, lambda one: both[one][0]), both[grade][1]

    def calibrated(self, kind: str, grade: int, price: Callable[[int], float]) -> float:
        """Return the price of some work at a grade: where a run was measured, the middle times its factor."""
        factors = self.calibration and self.calibration.of(kind)
        return middle((price(BEST), price(WORST))) * factors[grade == WORST] if factors else price(grade)

    def _assumed(self, step: Step, grade: int) -> tuple[float, float]:
        seconds, moved = PRICES[step.rate](self, step, grade)
        return seconds + ASSUMED.step[grade], moved

    def _on_host(self, step: Step, grade: int) -> tuple[float, float]:
        if step.inserted:
            return 0.0, 0.0
        touched = (*step.reads, *step.writes)
        # a source's text was made into tokens before the first iteration
        text = any(self.plan.columns[step.phase][name].type.dtype in LISTED for name in step.reads)
        row = ASSUMED.text_row if text else ASSUMED.row
        return self.rows(touched, step) / len(step.devices) * row[grade], 0.0

    def generation(self, step: Step, grade: int) -> tuple[Size, Rates, bool]:
        """Return the model that generates, the rates of its engine, and whether that replays CUDA graphs."""
        (_, size), first = self.model_of(step), self.plan.devices[step.pool].start
        serve = self.serve(next(iter(step.models)))
        group, graphs = serve.tensor_parallel, serving(serve).cuda_graphs
        return size, Rates(self.cluster, group, serve.dtype, grade, first=first, group=group), graphs

    def _rollout(self, step: Step, grade: int) -> tuple[float, float]:
        size, rates, graphs = self.generation(step, grade)
        rows, prompt, slots = self.server_rows(step, False), self.work.prompt, self.slots(step)
        prompts = rows / self.plan.domain(step.phase, step.writes[0]).times
        prefill = formulas.prefill_seconds(size, rates, prompts, prompt)
        lengths = self.work.limited(function := self.plan.functions[step.phase][step.node])
        rest = formulas.decode_seconds(size, rates, rows, slots, prompt, lengths, graphs)
        # between turns a tool answers: others fill the engine meanwhile, at best, but for the last; at worst
        # none does, and a cache has lost the turns before
        between = self.work.turns_of(function) - 1
        rest += between * self.work.tool_seconds * (1 if grade == BEST else math.ceil(rows / slots))
        if between and grade == WORST:
            rest += formulas.prefill_seconds(size, rates, rows * between, prompt + lengths.mean / 2)
        return prefill + rest, 0.0

    def _pass(self, step: Step, grade: int) -> tuple[float, float]:
        model, size = self.model_of(step)
        assert model.train
        function = self.plan.functions[step.phase][step.node]
        minibatches, epochs = int(function.value("minibatches", 1)), int(function.value("epochs", 1))
        mesh = self.plan.meshes[next(iter(step.models))]
        size = part_of(size, mesh.tensor)
        rates = replace(self._rates(step.pool, model.train.dtype, grade, mesh), reshard=model.train.reshard)
        times = minibatches * epochs if step.updates else 1
        passes = [self._share(one, size, model.train, minibatches, times) for one in self.plan.passes(step)]
        even = reduce(Tokens.plus, passes)
        work = replace(even, uneven=self.work.uneven(mesh.experts))
        if step.updates:
            factor = 4 if model.train.recompute else 3
            trained = trained_on_device(size, model, mesh.shard)
            summed = formulas.replica_bytes(trained, rates, times)
            on_host = trained if model.train.optimizer_offload else 0
            adapters = trained if model.train.lora else None
            flops = factor - bool(model.train.lora)
            seconds = formulas.update_seconds(size, rates, work, times, flops, summed, on_host, adapters)
            seconds += formulas.activation_seconds(size, rates, work) * model.train.activation_offload
            moved = formulas.update_bytes(size, rates, work.passes, times, adapters) + summed
            if muon.steps_by_muon(model):
                seconds += times * muon.step_seconds(size, rates)
                moved += times * muon.step_bytes(size, rates)
        else:
            factor, seconds = 1, formulas.score_seconds(size, rates, work)
            moved = formulas.score_bytes(size, rates, work.passes)
        if wide_head(model, size):
            seconds += formulas.wide_head_seconds(size, rates, work.tokens, step.updates)
        # those of a group: forward, once more where that runs again, and backward
        devices = model.train.sequence_parallel
        group = replace(rates, devices=devices, replicas=mesh.replicate * mesh.shard // devices)
        again = max(1, factor - 1)
        shared = again * work.tokens * group.devices
        seconds += formulas.exchange_seconds(size, group, shared, again * work.passes)
        moved += formulas.exchange_bytes(size, group, shared)
        group = replace(group, devices=mesh.experts, replicas=mesh.replicate * mesh.shard // mesh.experts)
        routed = again * work.tokens * work.uneven
        seconds += formulas.dispatch_seconds(size, group, routed, again * work.passes)
        moved += formulas.dispatch_bytes(size, group, routed)
        group = replace(rates, devices=mesh.tensor, replicas=mesh.shard, tensor=1)
        seconds += formulas.reduction_seconds(size, group, work.tokens, factor, work.passes)
        return seconds, moved + formulas.reduction_bytes(size, group, work.tokens, factor)

    def _share(self, step: Step, size: Size, train: TrainPlan, minibatches: int, times: int) -> Tokens:
        """Return what the busiest device computes per mini-batch: an even share, or the longest sample.

        Devices that share the tokens of a row have an even part of either; those that divide layers have all.
        """
        ranks, cuts = train.sequence_parallel, minibatches if step.trains else 1
        rows = self.rows(step.reads, step) / cuts
        alike = ranks * train.tensor_parallel
        each, longest = rows * alike / len(step.devices), self.work.longest(rows)
        shares = (each * self.work.mean, each * self.work.square), (longest, longest**2)
        tokens, squares = max(shares, key=lambda part: row_work(part[0], part[1], size.attention_share))
        passes = times * math.ceil(tokens / max(train.pass_tokens(step.trains), longest))
        return Tokens(tokens / ranks * times, squares / ranks * times, passes)

    def _rates(self, pool: str, dtype: str, grade: int, mesh: Mesh | None = None) -> Rates:
        """Return the rates of the devices of a pool, in a mesh or all of them together."""
        devices = self.plan.devices[pool]
        mesh = mesh or Mesh(1, len(devices))
        rates = Rates(self.cluster, mesh.shard, dtype, grade, first=devices.start)
        return replace(rates, replicas=mesh.replicate, tensor=mesh.tensor)

    def _sync(self, step: Step, grade: int) -> tuple[float, float]:
        if step.copied:  # all weights are gathered, and each device keeps its shard
            size, width = self.sizes[step.copied], master(self.plan.models[step.copied])
            rates = self._rates(step.pool, "float32", grade, self.plan.meshes[step.copied])
            moved = formulas.sync_bytes(size, rates.devices, width, rates.tensor)
            return formulas.sync_seconds(size, rates, width), moved
        model, size = self.model_of(step)
        assert model.train and model.serve
        mesh, width = self.plan.meshes[next(iter(step.models))], gathered_width(model)
        rates = self._rates(step.source or step.pool, model.serve.dtype, grade, mesh)
        if lora := served_alone(model):
            whole = sum(adapter_sizes(size, lora)) * rates.width
            moved = (rates.devices - 1) * trained_on_device(size, model, rates.devices) * rates.width
            seconds = rates.travel(moved) + sync_buckets(self.plan, step)[0] * rates.launch(1)
        else:
            whole = size.parameters * rates.width
            seconds = formulas.sync_seconds(size, rates, width)
            moved = formulas.sync_bytes(size, rates.devices, width, rates.tensor)
        if model.train.lora and not lora:
            moved += (rates.devices - 1) * trained_on_device(size, model, rates.devices) * MASTER
        # files are written by one device and read by all: what the host's link lets through, twice
        files = 2 * formulas.host_seconds(whole, rates) if step.path == "disk" else 0.0
        if step.source:
            both = replace(rates, first=0, devices=sum(self.plan.pools.values()), replicas=1, tensor=1)
            way = files or both.traded(whole)
            if model.serve.sync == "delta":
                share = sent_share(model)
                way = share * way + formulas.changes_seconds(whole, rates)
                whole = round(share * whole)
            seconds += way
            moved = max(moved, whole)
        if model.serve.addresses:  # the plan takes them to be on other hosts
            seconds += files or whole / (self.cluster.inter_link * rates.efficiency.link[grade])
        return seconds, moved

    def _move(self, step: Step, grade: int) -> tuple[float, float]:
        """Price a move of an engine's parts. A serve engine drops its own, which on a GPU takes as long as
        their memory is unmapped, and mapped again; frozen ones are on the host."""
        (name,) = step.models
        items = self.items(step.pool)
        held = float(sum(items[Item(name, step.engine, part)] for part in step.parts))
        if step.engine == "serve":
            return held / ASSUMED.mapped[grade] * (self.plan.device == "cuda"), 0.0
        moved = 0.0 if step.facts.moves == "off" and self.plan.models[name].frozen else held
        return formulas.host_seconds(moved, self._rates(step.pool, "float32", grade)), moved

    def _repartition(self, step: Step, grade: int) -> tuple[float, float]:
        columns = self.plan.columns[step.phase]
        whole = sum(self._row_bytes(columns[c]) * self.work.rows[columns[c].domain] for c in step.reads)
        devices = self.plan.pools[step.pool]
        away = whole * (devices - 1) / devices
        # rows that lie or gather on one device pass its link, all of them; else each device takes its share
        through_one = ONE in {step.layout, *(columns[c].layout for c in step.reads)}
        seconds = away / (1 if through_one else devices) / ASSUMED.objects[grade]
        received = away / (1 if step.layout == ONE else devices)
        return seconds, received

    def _row_bytes(self, column: ColumnPlan) -> float:
        """Return the bytes of one row of a column."""
        kind = column.type
        size = kind.cell_bytes(column.sizes, column.stored)
        if size is not None and not kind.axis:
            return size
        prompt = kind.axis == "prompt_tokens" or not (kind.axis or DOMAINS[kind.domain].answered)
        return (TEXT if size is None else size) * (self.work.prompt if prompt else self.work.mean)


PRICES: Mapping[str, Callable[[Pricing, Step, int], tuple[float, float]]] = {
    "generate": Pricing._rollout,
    "score": Pricing._pass,
    "update": Pricing._pass,
    "sync": Pricing._sync,
    "move": Pricing._move,
    "repartition": Pricing._repartition,
    "host": Pricing._on_host,
}
assert {*PRICES} == {*RATES} - {"round"} >= {kind.facts.rate for kind in Kind if kind.facts.rate}


def sync_least(plan: Plan, step: Step) -> int:
    """Return the fewest bytes that a device has to receive in a sync: what it lacks, in the engine's type."""
    (name,) = step.models
    model = plan.models[name]
    assert model.serve
    size, mesh = planned_size(model), plan.meshes[name]
    if lora := served_alone(model):
        whole = sum(adapter_sizes(size, lora)) * WIDTH[model.serve.dtype]
        return round(whole * (1 if step.source else 1 - 1 / mesh.shard))
    lie = 0 if step.source else mesh.shard, WIDTH[model.serve.dtype], model.serve.tensor_parallel, mesh.tensor
    share = sent_share(model) if step.source and model.serve.sync == "delta" else 1.0
    return round(share * formulas.sync_bound(size, *lie))


def sync_buckets(plan: Plan, step: Step) -> tuple[int, str]:
    """Return how many buckets the weights of a sync travel in, and their data type.

    Within a process they are the buckets of the gather, else those that are sent.
    """
    (name,) = step.models
    model = plan.models[name]
    assert model.serve
    if lora := served_alone(model):
        sizes = [number * WIDTH[model.serve.dtype] for number in adapter_sizes(planned_size(model), lora)]
        return len([*limits.buckets(sizes, int)]), model.serve.dtype
    inside = step.path == "memory"
    width = gathered_width(model) if inside else WIDTH[model.serve.dtype]
    dtypes = {width: dtype for dtype, width in WIDTH.items()}
    return planned_size(model).buckets(width, fused=inside), dtypes[width]


def stepped_on_host(plan: Plan, step: Step) -> int:
    """Return the bytes of gradients that a device's host takes from it with every optimizer step."""
    (name,) = step.models
    model = plan.models[name]
    assert model.train
    if not model.train.optimizer_offload:
        return 0
    mesh = plan.meshes[name]
    size = part_of(planned_size(model), mesh.tensor)
    return MASTER * trained_on_device(size, model, mesh.shard)
