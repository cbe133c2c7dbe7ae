"""Attention alone, in the forms that rows can be given to it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.cuda_side.bench import Bench, Record, Records
from torch.nn.functional import scaled_dot_product_attention as attend

HEADS, KEYS, WIDTH = 32, 8, 128  # query heads, key heads, numbers of a head: Qwen3-8B's
LANES = (1024, 4096, 16384, 32768)
LARGEST_MASK = 2**28  # numbers of a mask that is tried
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(bench: Bench) -> Records:
    """Useful FLOP/s (causal, the backward pass counted as 2.5 forward ones) against the device's peak.

    Every form computes the same: lanes of one row each, side by side, ``LANES[-1]`` tokens in all.
    """
    total = bench.size(LANES[-1], LANES[-1] // 64)
    for width in (bench.size(lane, lane // 64) for lane in LANES):
        lanes = total // width
        flops = 3.5 * 2 * HEADS * WIDTH * lanes * width**2
        for name, form in _forms(bench, lanes, width):
            taken = _seconds(bench, form, lanes, width)
            label = f"attention: {name}, {lanes} x {width}"
            yield Record(label, flops / taken, "FLOP/s", "the device's peak", bench.peak)


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


def _forms(bench: Bench, lanes: int, width: int) -> Iterator[tuple[str, Form]]:
    """What rows beside each other and packed rows can be given to, as far as this torch has it."""
    yield "causal", lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True)
    if lanes * width**2 <= LARGEST_MASK:
        zeros = torch.zeros(lanes, 1, width, width, device=bench.device, dtype=torch.bfloat16)
        mask = zeros.masked_fill_(torch.ones_like(zeros, dtype=torch.bool).triu_(1), float("-inf"))
        yield "dense mask", partial(_masked, mask)
    if bench.is_cuda and (varlen := _varlen()):
        yield "varlen", partial(_flat, varlen, lanes, width)
    if bench.is_cuda:
        yield "flex", _flex(bench, width)


def _masked(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As transformers gives masked rows to it: key heads repeated."""
    repeated = [x.repeat_interleave(HEADS // KEYS, dim=1) for x in (k, v)]
    return attend(q, *repeated, attn_mask=mask)


def _varlen() -> Any:
    """Torch's attention over rows end to end, where this version has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _flat(
    varlen: Any, lanes: int, width: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    ends = torch.arange(lanes + 1, device=q.device, dtype=torch.int32) * width
    repeated = [x.repeat_interleave(HEADS // KEYS, dim=1) for x in (k, v)]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, *repeated)]
    causal = _causal(varlen)
    return varlen(*flat, ends, ends, width, width, **causal)


def _causal(varlen: Any) -> dict[str, Any]:
    """Causality, as this version of torch is told of it."""
    import inspect

    named = inspect.signature(varlen).parameters
    return {"window_size": (-1, 0)} if "window_size" in named else {"is_causal": True}


def _flex(bench: Bench, width: int) -> Form:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(_b: Any, _h: Any, q: Any, k: Any) -> Any:
        return q >= k

    blocks = create_block_mask(seen, None, None, width, width, device=bench.device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=True)
