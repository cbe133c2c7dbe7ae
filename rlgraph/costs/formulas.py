"""Seconds and bytes of the work that a device does: formulas, no plan. See docs/cost_model.md.

Rows and tokens are those of the busiest device; bytes are those that it receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from rlgraph.costs.dtypes import MASTER
from rlgraph.costs.efficiency import BEST, WORST, Rates
from rlgraph.costs.limits import ring_ranks
from rlgraph.costs.model_size import Size, padded
from rlgraph.costs.plan_size import elsewhere, is_small, part_of
from rlgraph.costs.workload import row_work
from rlgraph.lengths import Lengths


def prefill_seconds(size: Size, rates: Rates, prompts: float, tokens: float) -> float:
    """Return the seconds of 2 N FLOPs per prompt token, and attention; once per prompt, not per sample.

    The head reads the last token alone.
    """
    layers = 2 * (size.multiplied - size.embedding) * tokens
    work = prompts * (layers + size.attention_flops(tokens) + 2 * size.embedding)
    passing = rates.activations(size.activations * prompts * tokens)
    return work / rates.flops(rates.efficiency.prefill) + passing + rates.reduced(size, prompts * tokens)


def decode_step_seconds(size: Size, rates: Rates, live: float, context: float, graphs: bool = False) -> float:
    """Return the seconds of one token for each of ``live`` rows that have ``context`` tokens so far.

    max[(weights + live cached rows) / bandwidth, 2 N rows / FLOPS] + overhead, with the rows of whole tiles.

    Args:
        graphs: the engine replays CUDA graphs. Otherwise kernels are launched from Python while others run,
            so that the longer of both decides.
    """
    efficiency, grade = rates.efficiency, rates.grade
    bytes_read = size.touched(live) * rates.width + live * size.cache_bytes(rates.width, context)
    work = 2 * size.tiled(live, *rates.tiles()) + 2 * live * size.asked * context
    on_device = max(bytes_read / rates.memory, work / rates.flops(efficiency.decode)) + rates.reduced(
        size, live
    )
    of_rows = live * efficiency.decode_row[grade]
    if graphs:
        gaps = size.launched_layers * efficiency.graph_layer[grade]
        return on_device + gaps + efficiency.graph_step[grade] + of_rows
    launching = rates.launch(size.launched_layers)
    return max(on_device, launching) + efficiency.decode_step[grade] + of_rows


@lru_cache(maxsize=4096)  # a search has many layouts that generate alike
def decode_seconds(
    size: Size, rates: Rates, rows: float, slots: float, prompt: float, lengths: Lengths, graphs: bool = False
) -> float:
    """Return the seconds of full slots until no row waits, then of a shrinking batch."""
    batch = min(rows, slots)
    waiting = rows - batch
    steps = waiting * lengths.mean / batch
    full = 0.0
    if steps:
        full = steps * decode_step_seconds(size, rates, batch, prompt + lengths.mean / 2, graphs)
    shrinking = sum(
        count * decode_step_seconds(size, rates, live, prompt + generated, graphs)
        for generated, live, count in lengths.alive(batch)
    )
    return full + shrinking


@dataclass(frozen=True)
class Tokens:
    """The load of the busiest device in training: tokens, the sum of squared lengths, passes of a model."""

    tokens: float
    squares: float
    passes: int  # micro-batches
    uneven: float = 1.0  # tokens that come to its experts, over those of an even share

    def plus(self, other: Tokens) -> Tokens:
        """Return both loads together, their experts chosen evenly."""
        return Tokens(self.tokens + other.tokens, self.squares + other.squares, self.passes + other.passes)


def score_seconds(size: Size, rates: Rates, work: Tokens) -> float:
    """Return the seconds of a pass without gradients: 2 N FLOPs per token, and attention."""
    compute = _compute(size, rates, work, 1, rates.efficiency.score)
    return rates.overlapped(compute, rates.travel(score_bytes(size, rates, work.passes)))


def update_seconds(
    size: Size,
    rates: Rates,
    work: Tokens,
    optimizer_steps: int,
    factor: float = 3,
    summed: float = 0.0,
    on_host: int = 0,
    adapters: int | None = None,
) -> float:
    """Return the seconds of 6 N FLOPs per token (``factor`` 3, or 4 where activations are computed again; of
    ``adapters``, as in ``update_bytes``, one less: frozen weights have no gradients).

    ``summed``: the bytes of ``replica_bytes``. ``on_host``: the numbers of a device that its host steps; 0
    where the device steps all of them.
    """
    compute = _compute(size, rates, work, factor, rates.efficiency.update)
    travel = rates.travel(update_bytes(size, rates, work.passes, optimizer_steps, adapters))
    both = rates.overlapped(compute, travel + rates.between_replicas(summed))
    if on_host:
        return both + optimizer_steps * host_step_seconds(on_host, rates)
    # the optimizer reads weight, gradient and two averages, and writes all but the gradient
    stepped = size.parameters / rates.devices if adapters is None else adapters
    return both + optimizer_steps * 7 * MASTER * stepped / rates.memory


def _compute(size: Size, rates: Rates, work: Tokens, factor: float, share: tuple[float, float]) -> float:
    multiplied = size.multiplied * row_work(work.tokens, work.squares, size.attention_share)
    flops: float = factor * 2 * (multiplied + (work.uneven - 1) * size.chosen * work.tokens)
    numbers = size.activations + 3 * size.vocabulary  # logits are written, and read twice by the log-softmax
    passing = rates.activations(factor * numbers * work.tokens)
    layers = factor * work.passes * size.launched_layers
    return max(
        flops / rates.flops(share) + passing, rates.launch(layers) / 4
    )  # a quarter of a decode's kernels


def gather_bytes(size: Size, devices: int, width: int = MASTER) -> int:
    """Return the bytes that a device receives as so many gather all weights, of ``width`` bytes per number:
    whole rows of each tensor, and the padding of one that has fewer rows than there are devices."""
    return ((devices - 1) * size.on_device(devices) - elsewhere(size, devices)) * width


def wide_head_seconds(size: Size, rates: Rates, tokens: float, updates: bool) -> float:
    """Return how much longer a head takes whose logits are computed in float32.

    An update computes them twice, and the gradients of hidden states and weights; torch's float32 is no TF32.
    """
    work = (4 if updates else 1) * 2 * size.embedding * tokens
    share = (rates.efficiency.update if updates else rates.efficiency.score)[rates.grade]
    return work / share * (1 / rates.cluster.flops("float32") - 1 / rates.cluster.flops(rates.dtype))


def _gathers_once(size: Size, rates: Rates) -> bool:
    return is_small(size) if rates.reshard is None else not rates.reshard


def score_bytes(size: Size, rates: Rates, passes: int) -> float:
    """Return the bytes of weights, gathered with every micro-batch, or once where the model is small."""
    return (1 if _gathers_once(size, rates) else passes) * gather_bytes(size, rates.devices, rates.width)


def update_bytes(
    size: Size, rates: Rates, passes: int, optimizer_steps: int, adapters: int | None = None
) -> float:
    """Return the bytes of weights, gathered for forward and backward, and float32 gradients, in each pass.

    Embeddings, last norm and head are gathered once: the backward pass needs no embeddings, and the others
    are kept for it. ``adapters``: the numbers of a device that train beside frozen weights; None: all do.
    """
    received_adapters = (rates.devices - 1) * (adapters or 0)
    weights = gather_bytes(size, rates.devices, rates.width) + received_adapters * rates.width
    gradients = gather_bytes(size, rates.devices) if adapters is None else received_adapters * MASTER
    if _gathers_once(size, rates):
        return optimizer_steps * (weights + gradients)
    once = padded(size.root_tensors, rates.devices) * rates.away * rates.width
    return passes * (2 * weights + gradients - once)


def replica_bytes(trained: int, rates: Rates, optimizer_steps: int) -> float:
    """Return the bytes of gradient shards, of ``trained`` numbers each, that are summed over replicas with
    every optimizer step by a ring (Patarasuk and Yuan, 2009): all but a part come twice."""
    return optimizer_steps * 2 * (rates.replicas - 1) / rates.replicas * trained * MASTER


def exchange_bytes(size: Size, rates: Rates, tokens: float) -> float:
    """Return the bytes of one pass in which a group shares so many tokens: all-to-alls of queries, keys,
    values and what attention puts out (DeepSpeed-Ulysses, arXiv 2309.14509), and keys and values of the whole
    width that a ring gathers (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    return sum(moved for _, _, moved in _exchanges(size, rates, tokens))


def exchange_seconds(size: Size, rates: Rates, tokens: float, passes: float) -> float:
    """Return the seconds of these exchanges in each layer of a pass, which nothing hides."""
    latency = size.config.num_hidden_layers * passes * rates.efficiency.reduction[rates.grade]
    exchanges = _exchanges(size, rates, tokens)
    return sum(among.traded(moved) + count * latency for among, count, moved in exchanges)


def _exchanges(size: Size, rates: Rates, tokens: float) -> Iterator[tuple[Rates, int, float]]:
    """Yield which devices exchange something, how often in each layer, and the bytes of all layers."""
    config, numbers = size.config, size.config.num_hidden_layers * tokens * rates.width
    keys_and_values = config.keys + config.values
    ring = ring_ranks(config.key_heads, rates.devices)
    within = replace(rates, devices=rates.devices // ring, replicas=rates.replicas * ring)
    if within.devices > 1:
        heads = config.queries + config.outputs + keys_and_values
        yield within, 4, numbers * heads / rates.devices * within.away
    if ring > 1:
        yield rates, 2, numbers * keys_and_values / within.devices * (ring - 1) / ring


def dispatch_bytes(size: Size, rates: Rates, tokens: float) -> float:
    """Return the bytes of the all-to-alls of one pass in which so many tokens go to their experts on other
    devices, and come back (GShard, arXiv 2006.16668)."""
    config = size.config
    mixtures = sum(config.is_sparse(index) for index in range(config.num_hidden_layers))
    numbers = 2 * mixtures * config.num_experts_per_tok * tokens * config.hidden_size
    return numbers * rates.width * rates.away


def dispatch_seconds(size: Size, rates: Rates, tokens: float, passes: float) -> float:
    """Return the seconds of these all-to-alls, which nothing hides: two in each layer of a pass, behind one
    that says how many rows they have."""
    latency = 3 * size.config.num_hidden_layers * passes * rates.efficiency.reduction[rates.grade]
    return rates.traded(dispatch_bytes(size, rates, tokens)) + latency if rates.devices > 1 else 0.0


def host_step_seconds(numbers: int, rates: Rates) -> float:
    """Return the seconds of an optimizer step on the host (ZeRO-Offload, arXiv 2101.06840): gradients come,
    masters are stepped, weights go back. At best two of these hide behind the longest."""
    gradients, weights = (host_seconds(numbers * width, rates) for width in (MASTER, rates.width))
    rate = rates.cluster.host_step or rates.efficiency.host_step[rates.grade]
    stages = (gradients, numbers / rate, weights)
    return max(stages) if rates.grade == BEST else sum(stages)


def activation_seconds(size: Size, rates: Rates, work: Tokens) -> float:
    """Return the seconds in which inputs of layers go to the host and come back, beyond what is hidden: at
    best the forward pass, one of four, hides the way there and the others the way back; at worst none."""
    config = size.config
    one_way = host_seconds(config.num_hidden_layers * config.hidden_size * rates.width * work.tokens, rates)
    if rates.grade == WORST:
        return 2 * one_way
    forward = _compute(size, rates, work, 1, rates.efficiency.update)
    return max(one_way - forward, 0.0) + max(one_way - 3 * forward, 0.0)


def reduction_bytes(size: Size, rates: Rates, tokens: float, factor: float) -> float:
    """Return the bytes of the sums of hidden states over devices that divide each layer, by a ring: all but a
    part come twice (Megatron-LM, arXiv 1909.08053).

    A layer has two forward and two backward. Computed again (``factor`` 4), it sums all but the last.
    """
    each = 2 * rates.away * tokens * size.config.hidden_size * rates.width
    return _sums(factor) * size.config.num_hidden_layers * each


def reduction_seconds(size: Size, rates: Rates, tokens: float, factor: float, passes: float) -> float:
    """Return the seconds of these sums, which nothing hides."""
    count = _sums(factor) * size.config.num_hidden_layers * passes
    latency = count * rates.efficiency.reduction[rates.grade]
    return rates.travel(reduction_bytes(size, rates, tokens, factor)) + latency if rates.devices > 1 else 0.0


def _sums(factor: float) -> float:
    """Return the sums of a layer in a pass without gradients (1), in an update (3), or with recompute (4)."""
    return 2 if factor == 1 else factor + 1


def sync_bytes(size: Size, devices: int, width: int = MASTER, tensor: int = 1) -> int:
    """Return the bytes that a device receives as all gather whole rows, of ``width`` bytes per number.

    Where layers are divided in ``tensor`` parts, or experts, that is of one part, and then the others.
    """
    part = part_of(size, tensor)
    not_in_part = size.parameters - part.parameters + elsewhere(size, 1)
    return gather_bytes(part, devices, width) + not_in_part * width


def sync_bound(size: Size, devices: int, width: int, group: int = 1, tensor: int = 1) -> float:
    """Return the bytes that a device must receive: its group's part of the weights, without its own shard.

    Shards are over ``devices``, each of one of ``tensor`` parts; 0 for a device of another pool, which has no
    shard. Each device of a serve engine, a group, has its part of every layer, of ``width`` bytes per number.
    """
    shard = part_of(size, tensor).parameters / size.parameters / devices if devices else 0.0
    return size.parameters * width * max(1 / group - shard, 0.0)


def sync_seconds(size: Size, rates: Rates, width: int = MASTER) -> float:
    """Return the seconds of a full gather in buckets, and of a copy in the data type of ``rates``.

    ``width``: bytes of a number as it is gathered.
    """
    copied = size.parameters * (width + rates.width) / rates.memory
    received = rates.travel(sync_bytes(size, rates.devices, width, rates.tensor))
    return received + copied + size.buckets(width) * rates.launch(1)


def host_seconds(moved: float, rates: Rates) -> float:
    """Return the seconds in which bytes of a device go to its host's memory or back."""
    return moved / (rates.cluster.host_link * rates.efficiency.link[rates.grade])


def changes_seconds(nbytes: float, rates: Rates) -> float:
    """Return the seconds in which weights come to a host, changes are found, and weights go to a device."""
    return 2 * host_seconds(nbytes, rates) + nbytes / rates.efficiency.changes[rates.grade]
