"""Finds the tokens that end a response."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file


def stop_ids(path: str, config: Any, tokenizer: Any) -> list[int]:
    """Return every end token that the generation config, the tokenizer or the model's text config names."""
    found = [tokenizer.eos_token_id, config.eos_token_id]
    if cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False):
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return sorted(
        {stop for ids in found if ids is not None for stop in (ids if isinstance(ids, list) else [ids])}
    )
