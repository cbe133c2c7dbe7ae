"""Rows end to end: every score is what the row alone would have, and so is every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fsdp import SHAPE
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.batching import Budget, micro_batches, scored
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch
from rlgraph.runtime.engines.fsdp.packing import alike, lanes_of, packs

CPU = torch.device("cpu")
ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.lists(st.booleans(), max_size=9)),
    min_size=1,
    max_size=12,
)


def columns(drawn: list[tuple[int, int, list[bool]]]) -> dict[str, Any]:
    """Rows of (prompt, its length, which of the tokens behind it count): some share a prompt."""
    tokens, mask = [], []
    for number, (prompt, length, counted) in enumerate(drawn):
        tokens.append(
            [(prompt * 7 + t) % 24 for t in range(length)]
            + [(number + 5 * t) % 24 for t in range(len(counted))]
        )
        mask.append([False] * length + counted)
    return {"tokens": Ragged.of(tokens, torch.int64), "loss_mask": Ragged.of(mask, torch.bool)}


GROUPS = columns([(k // 4, 5, [True] * (2 + k % 3)) for k in range(16)])


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 40))
def test_every_row_is_in_one_lane_once(drawn: Any, width: int) -> None:
    found = columns(drawn)
    lanes = lanes_of(alike(found["tokens"], scored(found["loss_mask"])), width)
    assert sorted(span.row for lane in lanes for unit in lane for span in unit.spans) == list(
        range(len(drawn))
    )
    assert all(
        sum(unit.length for unit in lane) <= width or len(lane) == len(lane[0].spans) == 1 for lane in lanes
    )


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()


def scores(model: Any, batches: list[MicroBatch]) -> tuple[Ragged, torch.Tensor]:
    """The logits of each label in the order of the rows, and the gradient of their sum of squares.

    The model's norms compute in float32 whatever it holds.
    """
    model.zero_grad()
    found: dict[int, list[float]] = {}
    for batch in batches:
        logits = batch.picked(model(**batch.arguments(), use_cache=False).logits)
        chosen = logits.gather(1, batch.labels[:, None]).squeeze(1)
        chosen.square().sum().backward()
        for row, values in zip(
            batch.columns["row"].tolist(), batch.scatter(chosen.detach()).tolist(), strict=True
        ):
            found[row] = values
    return Ragged.of([found[row] for row in sorted(found)], torch.float64), model.model.layers[
        0
    ].self_attn.q_proj.weight.grad.clone()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(drawn=ROWS, tokens=st.integers(1, 60))
def test_a_packed_row_scores_as_it_does_alone(model: Any, drawn: Any, tokens: int) -> None:
    given = {**columns(drawn), "row": torch.arange(len(drawn))}
    beside = micro_batches(given, Budget(tokens), CPU)
    packed = micro_batches(given, Budget(tokens, 0.0, torch.float64), CPU)
    (plain, slope), (found, other) = scores(model, beside), scores(model, packed)
    torch.testing.assert_close(found.values, plain.values, rtol=0, atol=1e-6)
    torch.testing.assert_close(other, slope, rtol=1e-3, atol=1e-5)
    assert sum(b.inputs["input_ids"].numel() for b in packed) <= sum(
        b.inputs["input_ids"].numel() for b in beside
    )


def test_a_shared_prompt_is_read_once_and_no_lane_is_half_empty() -> None:
    (batch,) = micro_batches(GROUPS, Budget(1000, 0.0), CPU)
    assert {*batch.arguments()} - {*batch.inputs} == {"attention_mask"}, "made for the pass, not kept"
    useful = 4 * 5 + sum(1 + k % 3 for k in range(16))  # the prompts, and all but the last token of a row
    assert (
        batch.inputs["input_ids"].numel() < 1.3 * useful < sum(len(row) for row in GROUPS["tokens"].tolist())
    )


def test_what_attention_would_cost_more_than_is_saved_is_not_packed() -> None:
    (batch,) = micro_batches(GROUPS, Budget(1000, 10.0), CPU)
    assert list(batch.inputs) == ["input_ids"]


def test_only_full_attention_with_positions_packs() -> None:
    windowed = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4))
    assert packs(LlamaForCausalLM(LlamaConfig(**SHAPE)))
    assert not packs(windowed)
    by_distance = FalconConfig(vocab_size=24, hidden_size=32, num_hidden_layers=1, alibi=True)
    by_distance.num_attention_heads = 4
    assert not packs(AutoModelForCausalLM.from_config(by_distance))
    sinks = GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, head_dim=8)
    assert not packs(AutoModelForCausalLM.from_config(sinks))


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    weights = batch["tokens"].values.float() / 24
    return -(batch["logprobs"].values * weights).sum() / totals.tokens, {}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    "more", [{}, {"lora": {"rank": 2, "alpha": 4}}, {"recompute": True}], ids=["plain", "lora", "recompute"]
)
def test_an_engine_trains_alike_packed_or_not(tmp_path: Path, head: Any, more: dict[str, Any]) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "model")
    found = []
    for packing in (True, False):
        options = {"lr": 1e-2, "eps": 1e-3}
        engine = FsdpEngine.of(str(tmp_path / "model"), head=head, optimizer=options, packing=packing, **more)
        score = engine.logprobs if head == "lm" else engine.values
        loss = objective if head == "lm" else value_objective
        before = score(GROUPS["tokens"], GROUPS["loss_mask"])
        engine.update(GROUPS, loss, torch.arange(16), 16, minibatches=2)
        found.append((before.values, score(GROUPS["tokens"], GROUPS["loss_mask"]).values))
    assert (found[0][1] - found[0][0]).abs().max() > 1e-3
    for packed, beside in zip(*found, strict=True):
        torch.testing.assert_close(packed, beside, rtol=0, atol=5e-5)


def value_objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = batch["loss_mask"].values
    return (batch["new_values"].values - 1).square()[mask].sum() / totals.tokens, {}
