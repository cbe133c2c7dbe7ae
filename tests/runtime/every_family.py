"""Tiny random models of every family of the installed transformers that generates text from text.

A family's configuration is made of its own defaults: sizes are cut down by the names of their fields, layers
to one of each kind and at least two, windows to a few tokens, so that one that is passed over shows. What no
such rule fits stands in ``OWN``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlgraph.runtime.engines.fsdp.load import quiet

VOCABULARY = 32
LARGEST = 3_000_000  # parameters: a model with more was not cut down
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim")
WIDE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length")
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(HIDDEN, 32),
    **dict.fromkeys(WIDE, 64),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(LENGTHS, 64),
    **dict.fromkeys(WINDOWS, 4),
    **dict.fromkeys(EXPERTS, 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "rotary_dim": 4,
    "initializer_range": 0.2,
    "attention_chunk_size": 8,
    "num_kv_shared_layers": 0,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ENDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
LATENT = {"head_dim": 4, "num_key_value_heads": 4, "v_head_dim": 8}  # with keys of two parts
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
OWN: dict[str, dict[str, Any]] = {
    "bamba": MAMBA,
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "intermediate_size": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 2, "indexer_head_dim": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def decoders() -> list[str]:
    """The types that have a language model over text alone: no encoder beside it, no pictures or sounds."""
    found = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind)
            alone = config.get_text_config() is config
        except Exception:  # each family's check raises what it likes; one that has no defaults is no decoder
            continue
        if alone and not getattr(config, "is_encoder_decoder", False):
            found.append(kind)
    return found


def config_of(kind: str) -> Any:
    default = AutoConfig.for_model(kind)
    there = default.to_dict()
    fields = {name: value for name, value in SIZES.items() if name in there} | ENDS
    fields = {name: value for name, value in fields.items() if _can_be_set(default, name)}
    if "qk_rope_head_dim" in there:
        fields |= {name: value for name, value in LATENT.items() if name in there}
    own = OWN.get(kind, {})
    if kinds := [*dict.fromkeys(there.get("mlp_layer_types") or ())]:
        fields["mlp_layer_types"] = (kinds * 2)[:2]
    if kinds := [*dict.fromkeys(own.get("layer_types") or there.get("layer_types") or ())]:
        fields["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        fields |= {name: len(fields["layer_types"]) for name in LAYERS if name in there}
    return AutoConfig.for_model(kind, **fields | own)


def _can_be_set(config: Any, name: str) -> bool:
    own = getattr(type(config), name, None)
    return not isinstance(own, property) or own.fset is not None


def build(root: Path, kind: str) -> tuple[Path, Any]:
    """A random model of a family as transformers writes it, with a tokenizer; and the model itself.

    Raises:
        Exception: it can't be built of these sizes.
    """
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    with quiet():
        config = config_of(kind)
        # read as a file is: a class gives its parts sizes of the whole, as MoshiConfig does
        config = type(config).from_dict(config.to_dict())
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        assert size < LARGEST, f"{kind} has {size} parameters"
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too, so that one left out shows
                parameter.add_(0.1 * torch.randn_like(parameter))
            model.eval()(torch.tensor([[5, 6, 7]]), use_cache=False)
        model.save_pretrained(root / kind)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(root / kind)
    return root / kind, model
