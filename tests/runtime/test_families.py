"""Families that are trained: names in and out, log-probs, updates and exports, against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.weights import pretrained
from rlgraph.runtime.engines.weights.naming import pieces_of

VOCABULARY = 29
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FEW = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}  # of a mixture
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "glm4": {},
    "granite": {},
    "smollm3": {},
    "cohere2": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 3, "shared_expert_intermediate_size": 20, **FEW},
    "qwen3_moe": {"num_experts": 3, **FEW},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 3, **GROUPS, **FEW},
    "deepseek_v3": {
        "n_routed_experts": 3,
        "num_key_value_heads": 4,
        "head_dim": 4,
        **GROUPS,
        **FEW,
        **LATENT,
    },
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8},
}
ROWS = Ragged.of([[5, 6, 7, 8, 9], [11, 12, 13], [3, 4, 5, 6, 7, 8, 9, 10, 11]])


def build(root: Path, family: str) -> Path:
    """A random model of a family as transformers writes it, with a tokenizer."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | FAMILIES[family]))
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too, so that one left out shows
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(root / family)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(root / family)
    return root / family


def plain(path: Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path).eval()


def scored() -> dict[str, Ragged]:
    """The rows, of which all but the first tokens are scored."""
    mask = [[t > 0 for t in range(length)] for length in ROWS.lengths.tolist()]
    return {"tokens": ROWS, "loss_mask": Ragged.of(mask, torch.bool)}


def expected(model: Any) -> torch.Tensor:
    """Log-probs of the scored tokens, from a plain forward of each row."""
    rows = []
    for row in ROWS.tolist():
        ids = torch.tensor([row])
        log_p = torch.log_softmax(model(ids).logits[0, :-1], -1)
        rows += [torch.zeros(1), log_p.gather(1, ids[0, 1:, None]).squeeze(1)]
    return torch.cat(rows)


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_scored_trained_and_given_away(one_rank: None, tmp_path: Path, family: str) -> None:
    path = build(tmp_path, family)
    stored, model = load_file(path / "model.safetensors"), plain(path)
    shape = pretrained.shape_of(str(path), AutoModelForCausalLM, {}, torch.float32)
    assert pretrained.reads_by_rows(shape, pieces_of(shape, stored), pretrained.weights_of(str(path)), ())
    engine = FsdpEngine(str(path), optimizer={"lr": 1e-2, "max_grad_norm": 1e9})
    torch.testing.assert_close(dict(engine.weights()), stored, rtol=0, atol=0)

    with torch.no_grad():
        logprobs = expected(model)
    torch.testing.assert_close(engine.logprobs(**scored()).values, logprobs, rtol=1e-4, atol=1e-5)
    metrics = engine.update(scored(), objective, torch.arange(len(ROWS)), len(ROWS))
    loss = -expected(model).sum() / scored()["loss_mask"].values.sum()
    loss.backward()
    trained = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in trained]))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)

    engine.export(str(tmp_path / "exported"))
    written = load_file(tmp_path / "exported/model.safetensors")
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in stored.items()}
    with torch.no_grad():
        again = expected(plain(tmp_path / "exported"))
    torch.testing.assert_close(engine.logprobs(**scored()).values, again, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(again, logprobs, atol=1e-3)
