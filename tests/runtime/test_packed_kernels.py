"""Packed rows without a dense mask: what the kernels of CUDA are given says what the mask would say.

A CPU has neither kernel with gradients, so what stands in for each computes the same from the same arguments:
row by row from the ends, and block by block from the blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import CPU, GROUPS, ROWS, SHAPE, columns, scores, value_objective
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

import far
from rlgraph.costs.limits import needs_mask
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines import attention
from rlgraph.runtime.engines.fsdp import batching, cells
from rlgraph.runtime.engines.fsdp.batching import Budget, micro_batches, scored
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.packing import PackedLane, alike, has_mask, lanes_of, packs

ALONE = columns([(0, 0, [True] * (3 + k % 5)) for k in range(12)])
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "granite": {"attention_multiplier": 0.3},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
}


class Kernels:
    """What stands in for both kernels, and how often each was asked."""

    def __init__(self) -> None:
        self.rows = self.blocks = 0

    def varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Causal attention of each row by itself, from its last tokens: ``[tokens, heads, size]``."""
        self.rows += 1
        lengths, keys = cu_seq_q.diff(), cu_seq_k.diff()
        assert (lengths <= keys).all() and max_q == max_k >= int(keys.max())
        for ends, tensor in ((cu_seq_q, query), (cu_seq_k, key)):
            assert ends.dtype == torch.int32 and ends.stride() == (1,) and window_size == (-1, 0)
            assert ends[0] == 0 and ends[-1] == len(tensor), "what no row covers is not computed"
        assert enable_gqa or query.shape[1] == key.shape[1]
        parts = query.split(lengths.tolist()), *(tensor.split(keys.tolist()) for tensor in (key, value))
        found = [self._row(*each, scale) for each in zip(*parts, strict=True)]
        return torch.cat(found)

    def _row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True).transpose(0, 1)

    def flex(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        block_mask: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention under what the blocks say: ``[lanes, heads, width, size]``."""
        self.blocks += 1
        assert enable_gqa and block_mask.seq_lengths == (query.shape[2], key.shape[2])
        seen = dense(block_mask)
        return scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True)


def dense(mask: BlockMask) -> torch.Tensor:
    """The cells that flex attention lets see each other: bool ``[queries, keys]``."""
    size, (queries, keys) = mask.BLOCK_SIZE[0], (torch.arange(length) for length in mask.seq_lengths)
    by_cell = mask.mask_mod(torch.tensor(0), torch.tensor(0), queries[:, None], keys[None, :])
    partial, full = (
        blocks(counts, columns).repeat_interleave(size, 0).repeat_interleave(size, 1)
        for counts, columns in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    assert not (partial & full).any()
    return (partial & by_cell) | full


def blocks(counts: Any, columns: Any) -> torch.Tensor:
    found = torch.zeros(columns.shape[-2:], dtype=torch.bool)
    for row, (count, order) in enumerate(zip(counts[0, 0].tolist(), columns[0, 0].tolist(), strict=True)):
        found[row, order[:count]] = True
    return found


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    """The CPU, taken for a device that has both kernels."""
    with there() as found:
        yield found


@contextmanager
def there() -> Iterator[Kernels]:
    """Stand-ins in the place of the kernels; blocks are of four cells, as rows are short."""
    found = Kernels()
    with pytest.MonkeyPatch.context() as context:
        context.setattr(attention, "needs_mask", lambda *_: False)
        context.setattr(attention, "varlen_attn", found.varlen)
        context.setattr(attention, "_compiled_flex", lambda: found.flex)
        for module in (batching, cells):
            context.setattr(module, "BLOCK", 4)
        yield found


def built(family: str = "llama") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "eager"  # in float64 the other has no kernel
    return AutoModelForCausalLM.from_config(config).double().eval()


def unmasked(model: Any) -> Any:
    attention.attend_without_mask(model, CPU, torch.float32)
    assert packs(model) and not has_mask(model)
    return model


def laid(drawn: Any, width: int) -> tuple[cells.Cells, PackedLane]:
    """The first lane of some rows, and its cells, in blocks of four."""
    given = columns(drawn)
    lane = lanes_of(alike(given["tokens"], scored(given["loss_mask"])), width)[0]
    rows = torch.tensor([span.row for unit in lane for span in unit.spans])
    wide = -(-sum(unit.length for unit in lane) // 4) * 4 or 4
    return cells.cells_of(given["tokens"].take(rows), [lane], wide), lane


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_blocks_say_what_the_mask_says(drawn: Any) -> None:
    with patch.object(cells, "BLOCK", 4):
        made, lane = laid(drawn, 60)
        wanted = made.mask(torch.float64, CPU)[0, 0] == 0
        mask = cells.block_mask(lane, made, CPU)
        at = torch.arange(len(wanted))
        assert torch.equal(mask.mask_mod(0, 0, at[:, None], at[None, :]), wanted)
        assert torch.equal(dense(mask), wanted)
        if cells.kernel_of(lane) == "flex":
            tiles = wanted.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).any(3).any(1)
            assert cells.scores_of(lane) == 16 * int(tiles.sum())


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_ends_say_what_the_mask_says(drawn: Any) -> None:
    given = columns(drawn)
    units = alike(given["tokens"], scored(given["loss_mask"]))
    lane = tuple(unit.first(10**6 if len(unit.spans) == 1 else unit.length - 1) or unit for unit in units)
    lane = tuple(unit for unit in lane if len(unit.spans) == 1)
    width = cells.width_of([lane], "varlen")
    rows = torch.tensor([span.row for unit in lane for span in unit.spans], dtype=torch.int64)
    made = cells.cells_of(given["tokens"].take(rows), [lane], width)
    wanted = made.mask(torch.float64, CPU)[0, 0] == 0
    ends = cells.row_ends(lane, width, CPU)
    row = torch.bucketize(torch.arange(width), ends[0, 0, 0, 1:], right=True)
    assert torch.equal((row[:, None] == row[None, :]).tril(), wanted)
    assert ends.shape[2] == int(ends[0, 0, 0].diff().max())
    used = sum(unit.length for unit in lane)
    assert cells.scores_of(lane) == int(wanted[:used, :used].sum())


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """One model twice: that needs no mask, and that has one."""
    with there():
        return unmasked(built()), built()


@settings(max_examples=40, deadline=None)
@given(drawn=ROWS, tokens=st.integers(1, 60))
def test_a_row_scores_as_it_does_alone(models: tuple[Any, Any], drawn: Any, tokens: int) -> None:
    with there():
        compare(*models, drawn, tokens)


def compare(without: Any, plain: Any, drawn: Any, tokens: int) -> None:
    given = {**columns(drawn), "row": torch.arange(len(drawn))}
    beside = micro_batches(given, Budget(tokens), CPU)
    packed = micro_batches(given, Budget(tokens, 0.0, torch.float64, mask=False), CPU)
    (wanted, slope), (found, other) = scores(plain, beside), scores(without, packed)
    torch.testing.assert_close(found.values, wanted.values, rtol=0, atol=1e-6)
    torch.testing.assert_close(other, slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_given_what_the_kernels_want(family: str, kernels: Kernels) -> None:
    shared = [(k // 4, 5, [True] * (2 + k % 3)) for k in range(16)]
    alone = [(0, 0, [True] * (3 + k % 5)) for k in range(12)]
    without, plain = unmasked(built(family)), built(family)
    compare(without, plain, shared, 60)
    assert kernels.blocks and not kernels.rows
    compare(without, plain, alone, 60)
    assert kernels.rows


@pytest.mark.filterwarnings("ignore")  # that it is not compiled
def test_flex_attention_itself_reads_the_blocks(models: tuple[Any, Any]) -> None:
    """PyTorch's own, which a CPU has without gradients."""
    without, plain = models
    many = columns([(k // 4, 50, [True] * (20 + k % 30)) for k in range(16)])
    (packed,) = micro_batches(many, Budget(2000, 0.0, mask=False), CPU)
    assert isinstance(packed.arguments()["attention_mask"], BlockMask)
    with torch.no_grad(), patch.object(attention, "_compiled_flex", lambda: flex_attention):
        assert_close(chosen(without, packed), under_the_mask(plain, many, packed))


def under_the_mask(plain: Any, given: dict[str, Any], packed: Any) -> torch.Tensor:
    """What a model with a dense mask finds of the same rows, in the order in which they lie in a batch."""
    place = given["tokens"].like(torch.arange(len(given["tokens"].values)))
    kinds = (Budget(10**6, 0.0, torch.float64), Budget(10**6, 0.0, mask=False))
    (masked,), (same,) = (micro_batches({**given, "place": place}, kind, CPU) for kind in kinds)
    found = torch.zeros(len(place.values), dtype=torch.float64)
    found[masked.columns["place"].values[masked.places]] = chosen(plain, masked)
    assert torch.equal(same.places, packed.places)
    return found[same.columns["place"].values[same.places]]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def chosen(model: Any, batch: Any) -> torch.Tensor:
    logits = batch.picked(model(**batch.arguments(), use_cache=False).logits)
    return logits.gather(1, batch.labels[:, None]).squeeze(1)


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs of some tokens more than of others, and the entropy."""
    weights, mask = batch["tokens"].values.float() / 24, batch["loss_mask"].values
    gain = (batch["logprobs"].values * weights).sum() + 0.3 * batch["entropy"].values[mask].sum()
    return -gain / totals.tokens, {"entropy": (batch["entropy"].values[mask].sum().detach(), mask.sum())}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    "more", [{}, {"lora": {"rank": 2, "alpha": 4}}, {"recompute": True}], ids=["plain", "lora", "recompute"]
)
@pytest.mark.parametrize("given", [GROUPS, ALONE], ids=["flex", "varlen"])
def test_an_engine_trains_as_under_the_mask(
    tmp_path: Path,
    kernels: Kernels,
    head: Any,
    more: dict[str, Any],
    given: Any,
) -> None:
    built().float().save_pretrained(tmp_path / "model")
    found, count = [], len(given["tokens"])
    for mask in (True, False):
        options = {"lr": 1e-2, "eps": 1e-3}
        with patch.object(attention, "needs_mask", lambda *_, mask=mask: mask):
            engine = FsdpEngine.of(str(tmp_path / "model"), head=head, optimizer=options, **more)
        assert engine.budget.mask == mask
        engine.budget = Budget(1000, 1e-9, mask=mask)
        score = engine.logprobs if head == "lm" else engine.values
        loss = objective if head == "lm" else value_objective
        metrics = engine.update(given, loss, torch.arange(count), count, minibatches=2, entropy=head == "lm")
        found.append((score(given["tokens"], given["loss_mask"]).values, metrics))
    assert bool(kernels.blocks) == (given is GROUPS) and bool(kernels.rows) == (given is ALONE)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=5e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-3)


def test_long_rows_pack() -> None:
    """No width is too large without a mask; under one, 4,096 tokens beside 16,384 are the most."""
    prompt = list(range(6000))
    rows = [[*prompt, *[k] * (500 + k)] for k in range(8)]
    counted = [[False] * 6000 + [True] * (500 + k) for k in range(8)]
    given = {"tokens": Ragged.of(rows), "loss_mask": Ragged.of(counted, dtype=torch.bool)}
    (packed,) = micro_batches(given, Budget(16384, 1e-5, mask=False), CPU)
    assert packed.inputs["input_ids"].shape == (1, 10112), "a prompt, 8 answers, and less than a block"
    masked = micro_batches(given, Budget(16384, 1e-5), CPU)
    assert len(masked) == 4 and not any("position_ids" in batch.inputs for batch in masked)


def test_rows_that_share_too_little_are_not_read_in_blocks() -> None:
    """Blocks of 128 compute far more than what short rows see: alone, they are less work."""
    short = columns([(k // 2, 6, [True] * (2 + k % 7)) for k in range(60)])
    (cheap,) = micro_batches(short, Budget(1000, 1e-6, mask=False), CPU)
    (dear,) = micro_batches(short, Budget(1000, 0.1, mask=False), CPU)
    assert isinstance(cheap.inputs["attention_mask"], BlockMask)
    assert dear.inputs["attention_mask"].dtype == torch.int32
    assert dear.inputs["input_ids"].numel() > cheap.inputs["input_ids"].numel()


def test_what_the_kernels_are_given_is_on_the_device() -> None:
    with far.device():
        for given in (GROUPS, ALONE):
            (batch,) = micro_batches(given, Budget(1000, 1e-9, mask=False), far.DEVICE)
            mask = batch.arguments()["attention_mask"]
            if isinstance(mask, BlockMask):
                at = torch.arange(8, device=far.DEVICE)
                assert mask.mask_mod(0, 0, at[:, None], at[None, :]).device == far.DEVICE
                mask = mask.kv_indices
            assert mask.device == far.DEVICE
        assert mask.stride()[:3] == (0, 0, 0) or mask.stride()[2] == 0, "the ends are repeated in a view"


def test_an_older_torch_is_given_repeated_heads(kernels: Kernels) -> None:
    """Before it had ``enable_gqa``, varlen attention took no grouped heads."""
    with patch.object(attention, "VARLEN", attention.VARLEN - {"enable_gqa"}):
        compare(unmasked(built()), built(), [(0, 0, [True] * (3 + k % 5)) for k in range(12)], 60)
    assert kernels.rows


def test_one_rule_says_where_a_mask_is_needed() -> None:
    assert not needs_mask("cuda", "bfloat16", 128)
    assert needs_mask("cpu", "bfloat16", 128) and needs_mask("cuda", "float32", 128)
    assert needs_mask("cuda", "bfloat16", 320) and needs_mask("cuda", "bfloat16", 8)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_attention_of_another_kind_keeps_its_own(family: str, kernels: Kernels) -> None:
    """Scores that are capped, sinks, and values of another size than keys are not what the kernels take."""
    more: dict[str, Any] = {"num_local_experts": 2} if family == "gpt_oss" else {}
    shape = SHAPE | ({"num_key_value_heads": 4} if family == "deepseek_v3" else {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **more))
    attention.attend_without_mask(model, CPU, torch.float32)
    assert has_mask(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what it looks at
def test_compiled_layers_take_both_as_one_graph_each(models: tuple[Any, Any]) -> None:
    """The operation behind ``varlen_attn`` is PyTorch's own here, but for its kernel; lengths may change."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    varlen._varlen_attn.register_kernel("cpu")(varlen_kernel)
    torch._dynamo.reset()
    with patch.object(attention, "needs_mask", lambda *_: False):
        compiled = unmasked(built())
    for layer in compiled.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=backend)
    for more in (0, 40):
        alone = columns([(0, 0, [True] * (3 + more + k % 5)) for k in range(12 + more)])
        shared = columns([(k // 8, 50, [True] * (20 + k % 30 + more)) for k in range(16 + more // 2)])
        for drawn in (alone, shared):
            (batch,) = micro_batches(drawn, Budget(4000, 0.0, mask=False), CPU)
            with torch.no_grad():
                assert_close(chosen(compiled, batch), under_the_mask(models[1], drawn, batch))
        assert len(graphs) == 2
    torch._dynamo.reset()


def varlen_kernel(*given: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``_varlen_attn`` returns: attention, the sums of scores, and what draws numbers."""
    named = inspect.signature(varlen._varlen_attn._init_fn).bind(*given, **more).arguments
    assert named["is_causal"]
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    rest = {"scale": named["scale"], "enable_gqa": True, "window_size": tuple(named["window_size"])}
    out = Kernels().varlen(*(named[name] for name in names), **rest)
    return out.contiguous(), torch.zeros(out.shape[1], len(out)), torch.zeros(2, dtype=torch.uint64)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_flex_attention_is_compiled_once_for_all_widths() -> None:
    """PyTorch's compiled kernel for CPUs, which has no gradients, reads our blocks."""
    torch._dynamo.reset()
    counts = set()
    for more in (0, 12, 30):
        given = columns([(k // 8, 50, [True] * (20 + k % 30 + more)) for k in range(16 + more)])
        (batch,) = micro_batches(given, Budget(10_000, 0.0, mask=False), CPU)
        blocks = batch.inputs["attention_mask"]
        width = blocks.seq_lengths[0]
        query, key, value = (torch.randn(1, heads, width, 32) for heads in (4, 2, 2))
        with torch.no_grad():
            found = attention.flex(query, key, value, blocks)
            wanted = scaled_dot_product_attention(query, key, value, dense(blocks), enable_gqa=True)
        torch.testing.assert_close(found, wanted)
        counts.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(counts) == 1
