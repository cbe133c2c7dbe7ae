"""Rings of ranks that share the tokens of the same heads: they find in float64 what one rank finds.

One launch of four ranks (this file as a script) runs every case on groups of two and of four; of a model with
one key head all of them are a ring, with two heads each two ranks trade heads. ``varlen_attn`` and flex
attention have no gradients on a CPU: what stands in for them is that of ``test_packed_kernels.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch
from test_packed_kernels import there, unmasked
from test_packing import columns
from torch.nn.attention.flex_attention import BlockMask

from rlgraph.runtime.engines.fsdp.batching import Budget, micro_batches
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch
from rlgraph.runtime.engines.fsdp.packing import attention_share
from rlgraph.runtime.engines.sequence.attention import share_attention
from rlgraph.runtime.engines.sequence.groups import ALONE, SequenceGroup, over_heads, sequence_group

CPU = torch.device("cpu")
KEY_HEADS = (1, 2)
# how rows lie: beside each other, or end to end under a mask, told apart by their ends, or in blocks
KINDS = ("beside", "windows", "mask", "varlen", "flex")


def built(kind: str, key_heads: int) -> Any:
    """A random model of two layers in float64, its norms too, where transformers' compute in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 4}
    window["layer_types"] = ["sliding_attention", "full_attention"]  # type: ignore[assignment]
    shape = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads, "head_dim": 8}
    config = AutoConfig.for_model("qwen2", **shape, **heads, **(window if kind == "windows" else {}))
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
        layer.post_attention_layernorm = torch.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
    model.model.norm = torch.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64)
    return unmasked(model) if kind in ("varlen", "flex") else model


def columns_of(kind: str) -> dict[str, Any]:
    shared = [(k // 4, 5, [True] * (2 + k % 3)) for k in range(16)]
    alone = [(k, k % 4, [True] * (3 + 3 * k % 19)) for k in range(12)]
    drawn = columns(shared if kind in ("mask", "flex") else alone)
    return {**drawn, "place": drawn["tokens"].like(torch.arange(len(drawn["tokens"].values)))}


def batches_of(kind: str, model: Any, group: SequenceGroup) -> list[MicroBatch]:
    share = None if kind in ("beside", "windows") else 1e-9 * attention_share(model, model.model.layers)
    budget = Budget(10_000, share, torch.float64, kind == "mask", over_heads(group, model))
    return micro_batches(columns_of(kind), budget, CPU)


def found(kind: str, key_heads: int, group: SequenceGroup) -> dict[str, Any]:
    """Log-probs, entropies and the loss of all rows, and the gradient of every weight."""
    with there() if kind in ("varlen", "flex") else nullcontext():
        model = built(kind, key_heads)
        share_attention(model, group)
        (batch,) = batches_of(kind, model, group)
        logits = batch.picked(model(**batch.arguments(), use_cache=False).logits).log_softmax(-1)
        own = logits.gather(1, batch.labels[:, None]).squeeze(1), -(logits.exp() * logits).sum(-1)
        order = batch.columns["place"].values[batch.places].argsort()
        logprobs, entropy = (batch.whole(score)[order] for score in own)
        weights = torch.linspace(0.1, 1, len(logprobs), dtype=torch.float64)
        loss = (logprobs.sum() / 10).square() - (weights * logprobs).sum() + 0.3 * entropy.sum()
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        if group.group:
            dist.all_reduce(gradient, group=group.group)
    scores = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "loss": loss.detach()}
    return {**scores, "gradients": gradients}


def main(rank: int, root: Path) -> None:
    groups = {ranks: sequence_group(cast(Any, dist.group.WORLD), ranks) for ranks in (2, 4)}
    cases = [(kind, heads, ranks) for kind in KINDS for heads in KEY_HEADS for ranks in groups]
    torch.save({(k, h, r): found(k, h, groups[r]) for k, h, r in cases}, root / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("ring")
    launch(__file__, root)
    return [torch.load(root / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key_heads", KEY_HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_finds_what_one_rank_finds(ranked: Any, kind: str, key_heads: int, ranks: int) -> None:
    one = found(kind, key_heads, ALONE)
    assert all(gradient.abs().max() > 1e-3 for gradient in one["gradients"].values())
    for rank in ranked:
        torch.testing.assert_close(rank[kind, key_heads, ranks], one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_are_what_they_are_called(kind: str) -> None:
    with there() if kind in ("varlen", "flex") else nullcontext():
        batches = batches_of(kind, built(kind, 2), ALONE)
    masks = {type(batch.inputs.get("attention_mask")) for batch in batches}
    expected = {"varlen": torch.Tensor, "flex": BlockMask}.get(kind, type(None))
    assert masks == {expected} and all(bool(batch.mask) == (kind == "mask") for batch in batches)


def test_every_rank_of_a_ring_computes_as_many_scores() -> None:
    for ranks, heads in ((4, 1), (8, 2)):
        groups = [SequenceGroup(cast(Any, "a group"), rank, ranks, ranks // heads) for rank in range(ranks)]
        width = 16 * groups[0].multiple
        cells = [group.chunked(torch.arange(width)[None]).flatten() for group in groups]
        assert len({int((own + 1).sum()) for own in cells}) == 1
        inputs = {"input_ids": torch.arange(width)[None]}
        parts = [group.share(inputs, torch.arange(width)) for group in groups]
        tokens = [part.inputs["input_ids"].flatten() for part in parts]
        assert torch.cat(tokens).sort().values.equal(torch.arange(width))
        for part, own in zip(parts, tokens, strict=True):
            assert part.inputs["position_ids"].flatten().equal(own)
            assert own[part.cells].equal(torch.arange(width)[part.own])
            assert all((line.diff() == 1).all() for line in part.inputs["position_ids"]), "seem packed"


if __name__ == "__main__":
    forked(main, 4)
