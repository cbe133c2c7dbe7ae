"""Which attention a pass asks for, and which kernels it becomes: never the one that keeps all scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rows import batch, engine
from torch.profiler import ProfilerActivity, profile

import far
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

pytestmark = pytest.mark.usefixtures("one_rank")

FAST = ("flash", "fmha", "cudnn", "flex")  # of the names of kernels


def scoring(model: str, device: torch.device, packed: bool, dtype: str) -> FsdpEngine:
    """A frozen engine that packs rows, or lays them beside each other."""
    found = engine(model, device, dtype=dtype, frozen=True, optimizer=None, packing=packed)
    if packed:
        found.budget = replace(found.budget, share=1e-9)
    return found


def score(frozen: FsdpEngine) -> Ragged:
    given = batch()
    return frozen.logprobs(given["tokens"], given["loss_mask"])


def kernels(frozen: FsdpEngine) -> set[str]:
    """The names of all kernels of a pass."""
    score(frozen)  # what is compiled or chosen on first use
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        score(frozen)
        torch.cuda.synchronize()
    return {event.key.lower() for event in found.key_averages()}


@pytest.mark.parametrize("packed", [False, True], ids=["beside", "packed"])
def test_a_fast_kernel_computes_attention(packed: bool, gpu: torch.device, model: str) -> None:
    names = kernels(scoring(model, gpu, packed, "bfloat16"))
    assert any(word in name for name in names for word in FAST), sorted(names)
    assert not any("softmax" in name for name in names), "the kernel that keeps all scores has one"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_beside_each_other_need_no_mask(dtype: str, model: str) -> None:
    """In bfloat16 heads stay grouped, as flash attention takes them; in float32 no fused kernel does."""
    with far.device() as seen:
        score(scoring(model, far.DEVICE, False, dtype))
    calls = {(call.masked, call.causal, call.grouped, call.dtype) for call in seen.attention}
    assert calls == {(False, True, dtype == "bfloat16", getattr(torch, dtype))}


def test_float32_does_not_keep_all_scores(gpu: torch.device, model: str) -> None:
    """Scores of 8,192 x 8,192 in four heads are 1 GiB: the memory of a pass says whether they were there."""
    frozen = scoring(model, gpu, False, "float32")
    tokens = Ragged.of([[3 + at % 20 for at in range(8192)]])
    mask = tokens.like(torch.arange(8192) >= 8000)
    frozen.logprobs(tokens, mask)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    frozen.logprobs(tokens, mask)
    assert torch.cuda.max_memory_allocated() - before < 2**29
