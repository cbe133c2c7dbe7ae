"""The fused forward against transformers' own, over the same parameters, on tiny random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlgraph.runtime.engines.transformers.fused import fused
from rlgraph.runtime.engines.transformers.kv_cache import Decode, Prefill, SlotCache

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, scaled positions": LlamaConfig(**SIZES, rope_parameters=SCALED),
    "llama, a head a key": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
}
OTHERS = {
    "a window": Qwen2Config(
        **SIZES,
        sliding_window=4,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "another norm": GemmaConfig(**SIZES, head_dim=8),
    "other scales": GraniteConfig(**SIZES),
    "another data type": LlamaConfig(**SIZES, dtype="bfloat16"),
}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
NEXT = [14, 15, 16]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_forward(config: PreTrainedConfig) -> None:
    model = empty(config)
    forward = fused(model)
    assert forward is not None
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # only now: as weights that a sync brings, norms and biases too
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw) + (parameter.dim() == 1))
    cache, lengths = SlotCache(4, 8, [False] * 2), torch.tensor([len(prompt) for prompt in PROMPTS])
    padded = torch.tensor([[*prompt, *[0] * (5 - len(prompt))] for prompt in PROMPTS])
    begun = forward(padded, torch.arange(5)[None], None, cache.aim(Prefill(0, torch.arange(3))), lengths - 1)
    close(begun, torch.stack([own(model, prompt) for prompt in PROMPTS]))
    mask = torch.zeros(3, 6).masked_fill_(torch.arange(6) > lengths[:, None], -torch.inf)
    target = Decode(torch.arange(3), lengths, 6, aligned=False)
    gone_on = forward(torch.tensor(NEXT)[:, None], lengths[:, None], mask[:, None, None], cache.aim(target))
    close(
        gone_on,
        torch.stack([own(model, [*prompt, token]) for prompt, token in zip(PROMPTS, NEXT, strict=True)]),
    )


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_other_models_run_their_own_forward(config: PreTrainedConfig) -> None:
    model = empty(config)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert fused(model) is None
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


def empty(config: PreTrainedConfig) -> Any:
    """A model as the engine makes it."""
    return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval().requires_grad_(False)


def own(model: Any, tokens: list[int]) -> torch.Tensor:
    """Transformers' logits ``[vocabulary]`` after tokens."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Logits that are not all near 0, equal to 1e-6."""
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
