"""Attention alone, in the forms that rows can be given to it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.cuda_side.bench import Bench, Record, Records
from torch.nn.functional import scaled_dot_product_attention as attend

from rlgraph.costs.limits import BLOCK
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.attention import end_to_end, flex
from rlgraph.runtime.engines.fsdp.batching import scored
from rlgraph.runtime.engines.fsdp.cells import block_mask, cells_of, row_ends, scores_of, width_of
from rlgraph.runtime.engines.fsdp.packing import PackedLane, PromptGroup, alike

HEADS, KEYS, WIDTH = 32, 8, 128  # query heads, key heads, numbers of a head: Qwen3-8B's
LANES = (1024, 4096, 16384, 32768)
LARGEST_MASK = 2**28  # numbers of a mask that is tried
PACKED = 16384  # tokens of a lane of packed rows
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(bench: Bench) -> Records:
    """How fast each form is: rows of one length against the device's peak, packed rows against each other."""
    yield from _alike(bench)
    yield from _packed(bench, "ragged rows", prompts=32, samples=1, shared=0.0)
    yield from _packed(bench, "8 samples of each prompt", prompts=4, samples=8, shared=0.25)


def _alike(bench: Bench) -> Records:
    """Useful FLOP/s (causal, the backward pass counted as 2.5 forward ones).

    Every form computes the same: lanes of one row each, side by side, ``LANES[-1]`` tokens in all.
    """
    total = bench.size(LANES[-1], LANES[-1] // 64)
    for width in (bench.size(lane, lane // 64) for lane in LANES):
        lanes = total // width
        flops = 3.5 * 2 * HEADS * WIDTH * lanes * width**2
        for name, form, rows in _forms(bench, lanes, width):
            taken = _seconds(bench, form, rows, lanes * width // rows)
            label = f"attention: {name}, {lanes} x {width}"
            yield Record(label, flops / taken, "FLOP/s", "the device's peak", bench.peak)


def _packed(bench: Bench, what: str, prompts: int, samples: int, shared: float) -> Records:
    """Pairs of a token and one that it sees, per second, against those of one row at a time.

    A label says how many scores a form computes for a pair. Scores per second over those of rows beside each
    other are what ``ATTENTION`` in ``rlgraph/costs/efficiency.py`` is made of.
    """
    lane = _lane(bench.size(PACKED, 512), prompts, samples, shared)
    lengths = [span.end for unit in lane for span in unit.spans]
    pairs = sum(length * (length + 1) // 2 for length in lengths)  # each row with a prompt of its own
    alone = None
    for name, form, rows, width, scores in _packed_forms(bench, lane, lengths):
        taken = _seconds(bench, form, rows, width)
        alone = alone or pairs / taken
        label = f"attention: {what}, {name}, {scores / pairs:.2f} scores for a pair"
        yield Record(label, pairs / taken, "pairs/s", "one row at a time", alone)


def _lane(total: int, prompts: int, samples: int, shared: float) -> PackedLane:
    """Rows of so many tokens in all, end to end, ``shared`` of them in prompts; own tokens vary threefold."""
    unit = total // prompts
    prompt = int(shared * unit)
    mean = (unit - prompt) // samples
    own = [mean // 2 + mean * (2 * k + 1) // (2 * samples) for k in range(samples)]
    if samples == 1:
        own = [mean // 2 + mean * (2 * p + 1) // (2 * prompts) for p in range(prompts)]
    pairs = [(p, own[p if samples == 1 else k]) for p in range(prompts) for k in range(samples)]
    tokens = Ragged.of([[p] * (prompt + count) for p, count in pairs])
    mask = Ragged.of([[False] * prompt + [True] * count for _, count in pairs], dtype=torch.bool)
    return alike(tokens, scored(mask))


def _packed_forms(
    bench: Bench, lane: PackedLane, lengths: Sequence[int]
) -> Iterator[tuple[str, Form, int, int, int]]:
    """Yield a form's name, itself, rows and width of what it is given, and the scores that it computes."""
    beside = max(lengths)
    sums = sum(length * (length + 1) // 2 for length in lengths)
    yield "one row at a time", partial(_in_turn, lengths), 1, sum(lengths), sums
    yield "beside", _causal, len(lengths), beside, len(lengths) * beside**2 // 2
    width = width_of([lane], "flex")
    cells = cells_of(Ragged.of([[0] * length for length in lengths]), [lane], width)
    mask = cells.mask(torch.bfloat16, bench.device)
    yield "dense mask", partial(_masked, mask), 1, width, width**2
    if bench.is_cuda:
        rows = [PromptGroup((span,)) for unit in lane for span in unit.spans]
        total = width_of([rows], "varlen")
        yield "varlen", partial(_ends, row_ends(rows, total, bench.device)), 1, total, scores_of(rows)
        blocks = block_mask(lane, cells, bench.device)
        scores = (int(blocks.kv_num_blocks.sum()) + int(blocks.full_kv_num_blocks.sum())) * BLOCK**2
        yield "flex", partial(_blocks, blocks), 1, width, scores


def _seconds(bench: Bench, form: Form, lanes: int, width: int) -> float:
    made = [_inputs(bench, lanes, width) for _ in range(2)]

    def once() -> None:
        made.reverse()  # neither finds the other's numbers in a cache
        q, k, v = made[0]
        form(q, k, v).sum().backward()
        for tensor in made[0]:
            tensor.grad = None

    taken = bench.seconds(once, repeats=3, warm=2, inner=bench.size(3, 1))
    made.clear()
    bench.clear()
    return taken


def _inputs(bench: Bench, lanes: int, width: int) -> list[torch.Tensor]:
    options: dict[str, Any] = {"device": bench.device, "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(lanes, heads, width, WIDTH, **options) for heads in (HEADS, KEYS, KEYS)]


def _forms(bench: Bench, lanes: int, width: int) -> Iterator[tuple[str, Form, int]]:
    """What rows beside each other and packed rows can be given to, and in how many lanes."""
    yield "causal", _causal, lanes
    if lanes * width**2 <= LARGEST_MASK:
        zeros = torch.zeros(lanes, 1, width, width, device=bench.device, dtype=torch.bfloat16)
        mask = zeros.masked_fill_(torch.ones_like(zeros, dtype=torch.bool).triu_(1), float("-inf"))
        yield "dense mask", partial(_masked, mask), lanes
    if bench.is_cuda:
        tokens = Ragged.of([[row, *[0] * width] for row in range(lanes)])  # the last token is not read
        rows = alike(tokens, scored(tokens.like(torch.ones(len(tokens.values), dtype=torch.bool))))
        total = lanes * width
        yield "varlen", partial(_ends, row_ends(rows, total, bench.device)), 1
        order = torch.tensor([unit.spans[0].row for unit in rows])
        cells = cells_of(tokens.take(order), [rows], total)
        yield "flex", partial(_blocks, block_mask(rows, cells, bench.device)), 1


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, is_causal=True, enable_gqa=True)


def _in_turn(lengths: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = zip(*(tensor.split(list(lengths), dim=2) for tensor in (q, k, v)), strict=True)
    return torch.cat([_causal(*part) for part in parts], dim=2)


def _masked(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As transformers gives masked rows to it: key heads repeated."""
    repeated = [x.repeat_interleave(HEADS // KEYS, dim=1) for x in (k, v)]
    return attend(q, *repeated, attn_mask=mask)


def _ends(ends: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return end_to_end(*(x[0].transpose(0, 1) for x in (q, k, v)), ends[0, 0, 0], ends.shape[2])


def _blocks(blocks: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex(q, k, v, blocks)
