"""How many parameters of a model train: all of them, or those of its low-rank adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlgraph.plan import ModelPlan
from rlgraph.sizes import Size


def trained_parameters(size: Size, model: ModelPlan) -> int:
    """How many parameters of a model have gradients and AdamW's averages."""
    assert model.train
    if model.frozen:
        return 0
    return adapter_parameters(size, model.train["lora"]) if model.train["lora"] else size.parameters


def adapter_parameters(size: Size, lora: Mapping[str, Any]) -> int:
    """Those of low-rank adapters: rank x (inputs + outputs) of each linear layer that has one.

    A new value head trains whole. In a mixture of experts attention alone has adapters.
    """
    config, wanted = size.config, lora["targets"]
    hidden, inner = config.hidden_size, config.intermediate_size
    widths = {
        "q_proj": config.queries,
        "k_proj": config.keys,
        "v_proj": config.keys,
        "o_proj": config.queries,
    }
    mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), inner)
    there = widths if config.experts else widths | mlp
    chosen = [width for name, width in there.items() if wanted == "all-linear" or name in wanted]
    added = config.num_hidden_layers * sum(int(lora["rank"]) * (hidden + width) for width in chosen)
    return added + (size.head_parameters if size.head == "value" else 0)
