"""Tiny random models of many families, as transformers writes them, and what plain transformers says of them.

Numbers are multiples of 8: grouped products in bfloat16 want rows of 16 bytes. SGLang on
a CPU wants an MLP of 64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.load import quiet

VOCABULARY = 29
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
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
FEW = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}  # of a mixture
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
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "glm4": {},
    "granite": {},
    "smollm3": {},
    "cohere2": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 3, "shared_expert_intermediate_size": 24, **FEW},
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
        # what SGLang reads of its config.json, and transformers does not
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4},
    "qwen3_next": {
        "num_experts": 3,
        "shared_expert_intermediate_size": 24,
        **FEW,
        **{f"linear_num_{kind}_heads": 2 for kind in ("key", "value")},
        **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
    },
}
# a name here -> the family of which it is a variant
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, windows": ("mistral", {"sliding_window": 4}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        },
    ),
}
ROWS = Ragged.of([[5, 6, 7, 8, 9], [11, 12, 13], [3, 4, 5, 6, 7, 8, 9, 10, 11]])


def family_of(name: str) -> str:
    return VARIANTS.get(name, (name, {}))[0]


def build(root: Path, family: str) -> Path:
    """A random model of a family as transformers writes it, with a tokenizer."""
    from tokenizers import Tokenizer, models

    kind, more = VARIANTS.get(family, (family, {}))
    torch.manual_seed(0)
    with quiet():
        config = AutoConfig.for_model(kind, **SHAPE | FAMILIES[kind] | more)
        model = AutoModelForCausalLM.from_config(config)
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
