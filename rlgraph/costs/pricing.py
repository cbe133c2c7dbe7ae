"""Prices a plan on a cluster: seconds and bytes of each step, besides the peak of its memory."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import get_args

from rlgraph.costs import formulas, limits
from rlgraph.costs.calibration import RATES, Calibration
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.efficiency import ASSUMED, BEST, WORST, Rates
from rlgraph.costs.formulas import Tokens
from rlgraph.costs.layer_memory import wide_head
from rlgraph.costs.lora_size import adapter_sizes, served_alone, trained_on_device
from rlgraph.costs.memory import EngineComponent, Footprint, gathered_width, master
from rlgraph.costs.model_size import Size
from rlgraph.costs.optimizers import extra_step_cost
from rlgraph.costs.plan_size import part_of, planned_size, sent_share
from rlgraph.costs.step_rates import StepRate, rate_of
from rlgraph.costs.workload import row_work
from rlgraph.engines.registry import decodes_in_graphs
from rlgraph.errors import GraphError, Problem
from rlgraph.ir.actions import MoveEngine, Sync
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Plan, Step, TrainPlan
from rlgraph.ir.steps import ONE
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
        if not model.train and not model.serve:
            continue
        try:
            sizes[name] = planned_size(model)
        except GraphError as error:
            for problem in error.problems:
                remedy = problem.remedy.replace("NAME", name)
                problems.append(replace(problem, remedy=remedy))
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
        """Return seconds at one grade, and bytes.

        With a calibration the seconds are the middle of both grades times the measured factor.
        """
        grades = (BEST, WORST) if self.calibration else (grade,)
        prices = {each: self._assumed(step, each) for each in grades}
        _, moved = prices[grade]
        return self.calibrated(rate_of(step), grade, lambda each: prices[each][0]), moved

    def calibrated(self, kind: str, grade: int, price: Callable[[int], float]) -> float:
        """Return the price of some work at a grade; with a calibration, the middle times its factor."""
        factors = self.calibration.of(kind) if self.calibration else None
        if not factors:
            return price(grade)
        return middle((price(BEST), price(WORST))) * factors[grade == WORST]

    def _assumed(self, step: Step, grade: int) -> tuple[float, float]:
        seconds, moved = PRICES[rate_of(step)](self, step, grade)
        return seconds + ASSUMED.step[grade], moved

    def _on_host(self, step: Step, grade: int) -> tuple[float, float]:
        if step.inserted:
            return 0.0, 0.0
        # a source's text was made into tokens before the first iteration
        has_text = any(self.plan.columns[step.phase][name].type.dtype in LISTED for name in step.reads)
        row_seconds = ASSUMED.text_row if has_text else ASSUMED.row
        rows = self.rows((*step.reads, *step.writes), step)
        return rows / len(step.devices) * row_seconds[grade], 0.0

    def generation(self, step: Step, grade: int) -> tuple[Size, Rates, bool]:
        """Return the model that generates, the rates of its engine, and whether that replays CUDA graphs."""
        _, size = self.model_of(step)
        serve = self.serve(step.model)
        start = self.plan.devices[step.pool].start
        group = serve.tensor_parallel
        rates = Rates(self.cluster, group, serve.dtype, grade, first=start, group=group)
        return size, rates, decodes_in_graphs(serve)

    def _rollout(self, step: Step, grade: int) -> tuple[float, float]:
        size, rates, graphs = self.generation(step, grade)
        function = self.plan.functions[step.phase][step.node]
        rows, slots = self.server_rows(step, ahead=False), self.slots(step)
        prompt, lengths = self.work.prompt, self.work.limited(function)
        prompts = rows / self.plan.domain(step.phase, step.writes[0]).times
        prefill = formulas.prefill_seconds(size, rates, prompts, prompt)
        decode = formulas.decode_seconds(size, rates, rows, slots, prompt, lengths, graphs)
        # A tool answers between turns. At best other samples fill the engine meanwhile, and only the last
        # one waits. At worst none does, and the cache has lost the turns before.
        tool_calls = self.work.turns_of(function) - 1
        waits = 1 if grade == BEST else math.ceil(rows / slots)
        decode += tool_calls * self.work.tool_seconds * waits
        if tool_calls and grade == WORST:
            decode += formulas.prefill_seconds(size, rates, rows * tool_calls, prompt + lengths.mean / 2)
        return prefill + decode, 0.0

    def _pass(self, step: Step, grade: int) -> tuple[float, float]:
        """Price scoring, or an update with its backward passes and optimizer steps."""
        model, size = self.model_of(step)
        assert model.train
        function = self.plan.functions[step.phase][step.node]
        minibatches, epochs = int(function.value("minibatches", 1)), int(function.value("epochs", 1))
        mesh = self.plan.meshes[step.model]
        size = part_of(size, mesh.tensor)
        rates = replace(self._rates(step.pool, model.train.dtype, grade, mesh), reshard=model.train.reshard)
        optimizer_steps = minibatches * epochs if step.updated else 1
        passes = []
        for term in self.plan.passes(step):
            passes.append(self._share(term, size, model.train, minibatches, optimizer_steps))
        work = replace(reduce(Tokens.plus, passes), uneven=self.work.uneven(mesh.experts))
        if step.updated:
            layer_runs = 4 if model.train.recompute else 3
            seconds, moved = self._update(model, size, rates, work, mesh, optimizer_steps, layer_runs)
        else:
            layer_runs = 1
            seconds = formulas.score_seconds(size, rates, work)
            moved = formulas.score_bytes(size, rates, work.passes)
        if wide_head(model, size):
            seconds += formulas.wide_head_seconds(size, rates, work.tokens, bool(step.updated))
        # collectives of sequence and expert groups run forward, once more in recomputation, and backward
        collective_runs = max(1, layer_runs - 1)
        copies = mesh.replicate * mesh.shard
        ranks = model.train.sequence_parallel
        group = replace(rates, devices=ranks, replicas=copies // ranks)
        exchanged = collective_runs * work.tokens * group.devices
        seconds += formulas.exchange_seconds(size, group, exchanged, collective_runs * work.passes)
        moved += formulas.exchange_bytes(size, group, exchanged)
        group = replace(group, devices=mesh.experts, replicas=copies // mesh.experts)
        routed = collective_runs * work.tokens * work.uneven
        seconds += formulas.dispatch_seconds(size, group, routed, collective_runs * work.passes)
        moved += formulas.dispatch_bytes(size, group, routed)
        group = replace(rates, devices=mesh.tensor, replicas=mesh.shard, tensor=1)
        seconds += formulas.reduction_seconds(size, group, work.tokens, layer_runs, work.passes)
        moved += formulas.reduction_bytes(size, group, work.tokens, layer_runs)
        return seconds, moved

    def _update(
        self,
        model: ModelPlan,
        size: Size,
        rates: Rates,
        work: Tokens,
        mesh: Mesh,
        optimizer_steps: int,
        layer_runs: int,
    ) -> tuple[float, float]:
        """Price the passes and optimizer steps of an update, without the collectives of its groups."""
        assert model.train
        trained = trained_on_device(size, model, mesh.shard)
        reduced = formulas.replica_bytes(trained, rates, optimizer_steps)
        on_host = trained if model.train.optimizer_offload else 0
        adapters = trained if model.train.lora else None
        # the backward pass below adapters has no gradients of weights to compute
        flops = layer_runs - 1 if model.train.lora else layer_runs
        seconds = formulas.update_seconds(
            size, rates, work, optimizer_steps, flops, reduced, on_host, adapters
        )
        if model.train.activation_offload:
            seconds += formulas.activation_seconds(size, rates, work)
        moved = formulas.update_bytes(size, rates, work.passes, optimizer_steps, adapters) + reduced
        beyond_adamw = extra_step_cost(model)
        if beyond_adamw:
            seconds += optimizer_steps * beyond_adamw.seconds(size, rates)
            moved += optimizer_steps * beyond_adamw.bytes(size, rates)
        return seconds, moved

    def _share(self, step: Step, size: Size, train: TrainPlan, minibatches: int, times: int) -> Tokens:
        """Return what the busiest device computes per mini-batch: an even share, or the longest sample.

        Devices that share the tokens of a row have an even part of either; devices that divide layers have
        all of it.
        """
        ranks = train.sequence_parallel
        trains = step.run is not None and step.run.trains
        rows = self.rows(step.reads, step) / (minibatches if trains else 1)
        rows_per_device = rows * (ranks * train.tensor_parallel) / len(step.devices)
        longest = self.work.longest(rows)
        even_share = (rows_per_device * self.work.mean, rows_per_device * self.work.square)
        longest_sample = (longest, longest**2)
        tokens, squares = max(
            (even_share, longest_sample),
            key=lambda share: row_work(share[0], share[1], size.attention_share),
        )
        passes = times * math.ceil(tokens / max(train.pass_tokens(trains), longest))
        return Tokens(tokens / ranks * times, squares / ranks * times, passes)

    def _rates(self, pool: str, dtype: str, grade: int, mesh: Mesh | None = None) -> Rates:
        """Return the rates of the devices of a pool, in a mesh or all of them together."""
        devices = self.plan.devices[pool]
        mesh = mesh or Mesh(1, len(devices))
        rates = Rates(self.cluster, mesh.shard, dtype, grade, first=devices.start)
        return replace(rates, replicas=mesh.replicate, tensor=mesh.tensor)

    def _sync(self, step: Step, grade: int) -> tuple[float, float]:
        sync = step.action
        if not isinstance(sync, Sync):
            return self._copy_of_weights(step, grade)
        model, size = self.model_of(step)
        assert model.train and model.serve
        mesh, width = self.plan.meshes[sync.model], gathered_width(model)
        rates = self._rates(sync.source or step.pool, model.serve.dtype, grade, mesh)
        lora = served_alone(model)
        if lora:
            total = sum(adapter_sizes(size, lora)) * rates.width
            moved = (rates.devices - 1) * trained_on_device(size, model, rates.devices) * rates.width
            buckets, _ = _buckets(size, model, sync)
            seconds = rates.travel(moved) + buckets * rates.launch(1)
        else:
            total = size.parameters * rates.width
            seconds = formulas.sync_seconds(size, rates, width)
            moved = formulas.sync_bytes(size, rates.devices, width, rates.tensor)
        if model.train.lora and not lora:
            moved += (rates.devices - 1) * trained_on_device(size, model, rates.devices) * MASTER
        # files are written by one device and read by all: twice what the host's link lets through
        files = 2 * formulas.host_seconds(total, rates) if sync.path == "disk" else 0.0
        if sync.source:
            all_pools = replace(rates, first=0, devices=sum(self.plan.pools.values()), replicas=1, tensor=1)
            travel = files or all_pools.traded(total)
            if model.serve.sync == "delta":
                share = sent_share(model)
                travel = share * travel + formulas.changes_seconds(total, rates)
                total = round(share * total)
            seconds += travel
            moved = max(moved, total)
        if model.serve.addresses:  # the plan assumes that these servers are on other hosts
            seconds += files or total / (self.cluster.inter_link * rates.efficiency.link[grade])
        return seconds, moved

    def _copy_of_weights(self, step: Step, grade: int) -> tuple[float, float]:
        """Price a copy onto another model: all weights are gathered, and each device keeps its shard."""
        size, width = self.sizes[step.copied], master(self.plan.models[step.copied])
        rates = self._rates(step.pool, "float32", grade, self.plan.meshes[step.copied])
        moved = formulas.sync_bytes(size, rates.devices, width, rates.tensor)
        return formulas.sync_seconds(size, rates, width), moved

    def _move(self, step: Step, grade: int) -> tuple[float, float]:
        """Price a move of an engine's parts.

        A serve engine drops its parts, which on a GPU takes as long as unmapping their memory, and mapping it
        again. Frozen weights have a copy on the host, so that only their way back takes time.
        """
        move = step.action
        assert isinstance(move, MoveEngine)
        items = self.items(step.pool)
        nbytes = float(sum(items[EngineComponent(move.model, move.engine, part)] for part in move.parts))
        if move.engine == "serve":
            if self.plan.device != "cuda":
                return 0.0, 0.0
            return nbytes / ASSUMED.mapped[grade], 0.0
        if move.direction == "off" and self.plan.models[move.model].frozen:
            nbytes = 0.0
        return formulas.host_seconds(nbytes, self._rates(step.pool, "float32", grade)), nbytes

    def _repartition(self, step: Step, grade: int) -> tuple[float, float]:
        columns = self.plan.columns[step.phase]
        total = 0.0
        layouts = {step.layout}
        for name in step.reads:
            column = columns[name]
            total += self._row_bytes(column) * self.work.rows[column.domain]
            layouts.add(column.layout)
        devices = self.plan.pools[step.pool]
        travels = total * (devices - 1) / devices
        # rows that are or gather on one device all pass its link; otherwise each device takes its share
        links = 1 if ONE in layouts else devices
        receivers = 1 if step.layout == ONE else devices
        return travels / links / ASSUMED.objects[grade], travels / receivers

    def _row_bytes(self, column: ColumnPlan) -> float:
        """Return the bytes of one row of a column."""
        kind = column.type
        cell = kind.cell_bytes(column.sizes, column.stored)
        if cell is not None and not kind.axis:
            return cell
        has_response = DOMAINS[kind.domain].answered
        of_prompt = kind.axis == "prompt_tokens" or not (kind.axis or has_response)
        tokens = self.work.prompt if of_prompt else self.work.mean
        if cell is None:
            return TEXT * tokens
        return cell * tokens


PRICES: Mapping[StepRate, Callable[[Pricing, Step, int], tuple[float, float]]] = {
    "generate": Pricing._rollout,
    "score": Pricing._pass,
    "update": Pricing._pass,
    "sync": Pricing._sync,
    "move": Pricing._move,
    "repartition": Pricing._repartition,
    "host": Pricing._on_host,
}
assert {*PRICES} == {*RATES} - {"round"} == {*get_args(StepRate)}


def sync_least(plan: Plan, sync: Sync) -> int:
    """Return the fewest bytes that a device has to receive in a sync: what it lacks, in the engine's type."""
    model, mesh = plan.models[sync.model], plan.meshes[sync.model]
    assert model.serve
    size, width = planned_size(model), WIDTH[model.serve.dtype]
    lora = served_alone(model)
    if lora:
        lacking: float = sum(adapter_sizes(size, lora)) * width
        if not sync.source:
            lacking *= 1 - 1 / mesh.shard  # the device has a shard
        return round(lacking)
    shards = 0 if sync.source else mesh.shard
    bound = formulas.sync_bound(size, shards, width, model.serve.tensor_parallel, mesh.tensor)
    if sync.source and model.serve.sync == "delta":
        return round(sent_share(model) * bound)
    return round(bound)


def sync_buckets(plan: Plan, sync: Sync) -> tuple[int, str]:
    """Return how many buckets the weights of a sync travel in, and their data type.

    Within a process they are the buckets of the gather, otherwise those that are sent.
    """
    model = plan.models[sync.model]
    return _buckets(planned_size(model), model, sync)


def _buckets(size: Size, model: ModelPlan, sync: Sync) -> tuple[int, str]:
    assert model.serve
    served = WIDTH[model.serve.dtype]
    lora = served_alone(model)
    if lora:
        sizes = [number * served for number in adapter_sizes(size, lora)]
        return len([*limits.buckets(sizes, int)]), model.serve.dtype
    within_process = sync.path == "memory"
    width = gathered_width(model) if within_process else served
    dtype = next(name for name, nbytes in WIDTH.items() if nbytes == width)
    return size.buckets(width, fused=within_process), dtype


def stepped_on_host(plan: Plan, step: Step) -> int:
    """Return the bytes of gradients that a device sends to its host with every optimizer step."""
    if step.copied:
        return 0  # it averages the weights of another model: there are no gradients
    model, mesh = plan.models[step.updated], plan.meshes[step.updated]
    assert model.train
    if not model.train.optimizer_offload:
        return 0
    size = part_of(planned_size(model), mesh.tensor)
    return MASTER * trained_on_device(size, model, mesh.shard)
