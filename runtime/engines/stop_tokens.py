"""Finds the tokens that end a response."""

from __future__ import annotations

from itertools import chain
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file


def stop_ids(path: str, config: Any, tokenizer: Any) -> list[int]:
    """Return every end token that the generation config, the tokenizer or the model's text config names."""
    named = [tokenizer.eos_token_id, config.eos_token_id]
    if cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False):
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    lists = [ids if isinstance(ids, list) else [ids] for ids in named if ids is not None]
    return sorted({*chain.from_iterable(lists)})
