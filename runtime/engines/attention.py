"""Attention in float32 on a GPU, for models whose heads share keys and values.

transformers asks PyTorch for grouped heads (``enable_gqa``) wherever a pass has no mask. In float32 no fused
kernel of CUDA takes them: flash and cuDNN attention compute in 16 bits, and the memory-efficient kernel is
built without groups. So PyTorch would write out all scores, ``[heads, width, width]``: 34 GB for 32 heads and
a row of 16k tokens. With keys and values repeated for each head the memory-efficient kernel applies.

Shapes: query ``[rows, heads, width, size]``; key and value ``[rows, groups, width, size]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "sdpa_repeated"  # its name in transformers' registry


def repeat_shared_heads(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Have a transformers model that attends by SDPA repeat its shared heads, where that is needed."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if device.type == "cpu" or dtype != torch.float32 or model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' ``sdpa_attention_forward`` does: ``[rows, width, heads, size]``, no weights."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = query.shape[2] > 1 and attention_mask is None and causal
    options = {"attn_mask": attention_mask, "scale": scaling, "is_causal": causal}
    return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).contiguous(), None
