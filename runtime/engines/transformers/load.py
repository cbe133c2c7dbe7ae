"""Builds a transformers model for an engine: empty weights, their names, its kinds of attention."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rlgraph.runtime.engines.attention import repeat_shared_heads
from rlgraph.runtime.engines.model_files import ModelFiles

ATTENTIONS = ("full_attention", "sliding_attention")


def empty_model(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with uninitialised weights; buffers that no checkpoint holds are computed."""
    config = files.config()
    with device, no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=files.trusted)
    model.tie_weights()
    repeat_shared_heads(model, device, dtype)
    return model.eval().requires_grad_(False)


def attention_kinds(model: PreTrainedModel) -> list[str]:
    """Return the kind of attention of each layer."""
    config = model.config.get_text_config()
    single = ATTENTIONS[1] if getattr(config, "sliding_window", None) else ATTENTIONS[0]
    kinds = getattr(config, "layer_types", None) or [single] * config.num_hidden_layers
    unknown = sorted(set(kinds) - set(ATTENTIONS))
    if unknown or model._is_stateful or "position_ids" not in inspect.signature(model.forward).parameters:
        law = f"{config.model_type}: the embedded engine runs {' and '.join(ATTENTIONS)} with position_ids"
        law += f", not {', '.join(unknown) or type(model).__name__}"
        raise ValueError(f"{law}; serve it with sglang (models.NAME.serve.engine)")
    return list(kinds)


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters, a tied one once, and buffers that a checkpoint holds, by name."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict()
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in saved}


@torch.no_grad()
def copy_into(name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ValueError(f"weight {name!r} is {list(tensor.shape)}; the model's is {list(target.shape)}")
    target.copy_(tensor)
