"""Which attention a pass asks for, and which kernels it becomes: never the one that keeps all scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rows import batch, engine, objective
from torch.profiler import ProfilerActivity, profile

import far
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

pytestmark = pytest.mark.usefixtures("one_rank")

FAST = ("flash", "fmha", "cudnn", "flex")  # of the names of kernels
ROUNDED = 2e-2  # nats that bfloat16 may differ by in the mean


def scoring(model: str, device: torch.device, packed: bool, dtype: str) -> FsdpEngine:
    """A frozen engine that packs rows, or lays them beside each other."""
    found = engine(model, device, dtype=dtype, frozen=True, optimizer=None, packing=packed)
    if packed:
        found.budget = replace(found.budget, share=1e-9)
    return found


def score(frozen: FsdpEngine, given: dict[str, Any] | None = None) -> Ragged:
    given = given or batch()
    return frozen.logprobs(given["tokens"], given["loss_mask"])


def kernels(frozen: FsdpEngine, given: dict[str, Any] | None = None) -> set[str]:
    """The names of all kernels of a pass."""
    score(frozen, given)  # what is compiled or chosen on first use
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        score(frozen, given)
        torch.cuda.synchronize()
    return {event.key.lower() for event in found.key_averages()}


@pytest.mark.parametrize("packed", [False, True], ids=["beside", "packed"])
def test_a_fast_kernel_computes_attention(packed: bool, gpu: torch.device, model: str) -> None:
    names = kernels(scoring(model, gpu, packed, "bfloat16"))
    assert any(word in name for name in names for word in FAST), sorted(names)
    assert not any("softmax" in name for name in names), "the kernel that keeps all scores has one"


def groups(samples: int, more: int = 0) -> dict[str, Any]:
    """Four prompts of 100 tokens, and so many samples of each, of 20 to 90 tokens."""
    draw = torch.Generator().manual_seed(5 + more)
    lengths = [20 + more + 70 * k // (4 * samples) for k in range(4 * samples)]
    prompts = [torch.randint(3, 22, (100,), generator=draw).tolist() for _ in range(4)]
    rows = [
        prompts[k % 4] + torch.randint(3, 22, (length,), generator=draw).tolist()
        for k, length in enumerate(lengths)
    ]
    tokens = Ragged.of(rows)
    mask = Ragged.of([[False] * 100 + [True] * length for length in lengths], dtype=torch.bool)
    return {"tokens": tokens, "loss_mask": mask, "advantages": tokens.like(torch.ones(len(tokens.values)))}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("samples", "names"), [(1, ("flash",)), (6, ("flex", "triton_tem"))])
def test_packed_rows_without_a_mask_are_those_under_it(
    samples: int, names: tuple[str, ...], gpu: torch.device, model: str
) -> None:
    """Rows end to end by varlen attention, rows that share prompts by flex attention, of any width."""
    frozen = scoring(model, gpu, True, "bfloat16")
    assert not frozen.budget.mask
    for more in (0, 7, 150):
        given = groups(samples, more)
        found = score(frozen, given).values
        frozen.budget = replace(frozen.budget, mask=True)
        masked = score(frozen, given).values
        frozen.budget = replace(frozen.budget, mask=False)
        assert float((found - masked).abs().mean()) < ROUNDED
    seen = kernels(frozen, groups(samples))
    assert any(word in name for name in seen for word in names), sorted(seen)
    assert not any("softmax" in name or "fmha" in name for name in seen), "neither all scores nor a mask"


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"compile": True}], ids=["plain", "re", "comp"])
@pytest.mark.parametrize("samples", [1, 6], ids=["varlen", "flex"])
def test_packed_rows_train_as_under_the_mask(
    samples: int, options: dict[str, Any], gpu: torch.device, model: str
) -> None:
    given, metrics = groups(samples), []
    for mask in (True, False):
        trained = engine(model, gpu, dtype="bfloat16", **options)
        assert not trained.budget.mask
        trained.budget = replace(trained.budget, share=1e-9, mask=mask)
        count = 4 * samples
        metrics.append(trained.update(given, objective, torch.arange(count), count, entropy=True))
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], abs=ROUNDED)
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.1)


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
