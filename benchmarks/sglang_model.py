"""A random Qwen2 and a tokenizer for it, which the benchmarks of SGLang share."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 4096


def save_model(directory: str | Path, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """Write them, and return the model.

    Args:
        directory: where they go.
        hidden: the model's width, a multiple of 64; of its feed-forward layers four times as much.
        layers: its decoder layers.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    words = {f"<{i}>": i for i in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<1>", pad_token="<0>").save_pretrained(
        directory
    )
    return model
