"""Says whether a model of transformers reads a text from left to right, as one that generates does."""

from __future__ import annotations

import inspect
from typing import Any

# what no field of theirs says: these attend in both directions, and these in one
BOTH_WAYS = ("cpmant", "xlm", "xlnet")
ONE_WAY = ("xglm",)


def sees_later_tokens(model: Any) -> bool:
    """Return whether a model attends in both directions.

    Classes of transformers' newer form say so of their attention. Of the others those that can look into an
    encoder's states are an encoder themselves unless their configuration says ``is_decoder``.
    """
    config = model.config
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    declared = {module.is_causal for module in decoder.modules() if hasattr(module, "is_causal")}
    if declared:
        return False in declared
    is_decoder = getattr(config, "is_decoder", False)
    crosses = "encoder_hidden_states" in inspect.signature(type(model).forward).parameters
    if config.model_type in (*BOTH_WAYS, *ONE_WAY):
        return config.model_type in BOTH_WAYS
    return crosses and not is_decoder
