"""Reads what the files of a model describe, for ``rlgraph doctor`` and preflight alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlgraph.runtime.engines.model_files import ModelFiles, context_of


@dataclass(frozen=True)
class InspectedModel:
    """A model as its files describe it, without its weights.

    Attributes:
        config: its configuration, with the fields that a graph changes.
        context: the tokens that fit into a row; None where the configuration does not say.
        vocabulary: the tokens that it has embeddings for; None where the configuration does not say.
        tokenizer: its tokenizer; None where it was not asked for, or can't be loaded.
        tokenizer_error: why the tokenizer can't be loaded.
        stop_ids: every token that ends a text by one of its files; none without a tokenizer.
    """

    config: Any
    context: int | None
    vocabulary: int | None
    tokenizer: Any = None
    tokenizer_error: Exception | None = None
    stop_ids: list[int] = field(default_factory=list)


def inspect_model(files: ModelFiles, needs_tokenizer: bool = True) -> InspectedModel:
    """Return what the files of a model describe.

    Raises:
        OSError, ValueError: the configuration can't be loaded, as a folder or from a hub.
        ConfigError: a changed field is without effect, or can't have its value.
        ConfigFileError: the model's class reads a field of ``config.json`` as another value.
    """
    config = files.config()
    text_config = config.get_text_config()
    context = context_of(config)
    vocabulary = getattr(text_config, "vocab_size", None)
    if not needs_tokenizer:
        return InspectedModel(config, context, vocabulary)
    try:
        tokenizer = files.tokenizer()
    except (OSError, ValueError) as error:
        return InspectedModel(config, context, vocabulary, tokenizer_error=error)
    stop_ids = files.stop_ids(text_config, tokenizer)
    return InspectedModel(config, context, vocabulary, tokenizer, stop_ids=stop_ids)
