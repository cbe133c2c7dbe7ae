"""Attention on a GPU, where PyTorch's own choice would be slow or large: by names in transformers' registry.

``REPEATED`` is for float32 and models whose heads share keys and values. transformers asks PyTorch for
grouped heads (``enable_gqa``) wherever a pass has no mask. In float32 no fused kernel of CUDA takes them:
flash and cuDNN attention compute in 16 bits, and the memory-efficient kernel is built without groups. So
PyTorch would write out all scores, ``[heads, width, width]``: 34 GB for 32 heads and a row of 16k tokens.
With keys and values repeated for each head the memory-efficient kernel applies.

``PACKED`` is for packed rows in 16 bits, which need no dense mask (``needs_mask``). What a pass gives as
``attention_mask`` says what attends; transformers hands on whatever has four dimensions:

- int32 ``[1, 1, longest, rows + 1]``, the ends of rows that lie end to end: ``varlen_attn``
- a ``BlockMask``, of rows that share prompts: ``flex_attention``
- None, or a dense mask: as transformers does

Shapes: query ``[lanes, heads, width, size]``; key and value ``[lanes, groups, width, size]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from rlgraph.costs.limits import needs_mask

# most compiled graphs of one function, where torch would give up after 8 and run the rest as it is
GRAPHS = 64
REPEATED = "sdpa_repeated"
PACKED = "sdpa_packed"
OVER = "_over_"  # in a name, before the group of ranks that share the tokens: sequence/attention.py
VARLEN = frozenset(inspect.signature(varlen_attn).parameters)  # they differ between versions of torch


def kind_of(model: Any) -> str:
    """Return the name of what a transformers model attends by on one rank, whichever share its tokens."""
    name: str = model.config.get_text_config()._attn_implementation
    return name.partition(OVER)[0]


def head_size(config: Any) -> int:
    """Return the numbers of an attention head; where layers differ, those of the largest."""
    layers = getattr(config, "per_layer_config", None) or [config]
    sizes = [getattr(layer, "head_dim", None) for layer in layers]
    largest: int = max(size or config.hidden_size // config.num_attention_heads for size in sizes)
    return largest


def repeat_shared_heads(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Have a transformers model that attends by SDPA repeat its shared heads, where that is needed."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    is_float32_on_a_gpu = device.type != "cpu" and dtype == torch.float32
    if not is_float32_on_a_gpu or model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(REPEATED, attend)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)
    model.set_attn_implementation(REPEATED)


def attend_without_mask(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Have a transformers model attend to packed rows without a dense mask, where its attention allows it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation != "sdpa":
        return
    config = model.config.get_text_config()
    plain = model._supports_flash_attn and model._supports_flex_attn and not hasattr(config, "v_head_dim")
    if not plain or needs_mask(device.type, str(dtype).removeprefix("torch."), head_size(config)):
        return
    AttentionInterface.register(PACKED, attend_packed)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    model.set_attn_implementation(PACKED)


def attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as ``sdpa_attention_forward`` of transformers does: ``[lanes, width, heads, size]``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, BlockMask):
        return flex(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        ends = attention_mask[0, 0, 0]
        longest = attention_mask.shape[2]
        return end_to_end(_tokens(query), _tokens(key), _tokens(value), ends, longest, scaling)[None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)


def attend_from(
    chunks: Sequence[int],
    attend: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from some chunks of rows to all keys up to the end of each: ``[lanes, chunk, heads, size]``.

    Args:
        chunks: their numbers, of equal parts of the width.
        attend: what attends under a dense mask.
        module: the layer's attention.
        query: ``[lanes, heads, chunk, size]``, the first chunk of all rows, then the second.
        key, value: ``[rows, groups, width, size]``.
        attention_mask: as ``attend_packed`` takes it: the ends of all rows of the width, or blocks whose
            queries are those of the chunks one behind the other; dense, ``[lanes, 1, chunk, width]``.
        scaling: of the scores.
        more: for ``attend``.
    """
    if isinstance(attention_mask, BlockMask):
        end_to_end_query = torch.cat(query.chunk(len(chunks)), dim=2)
        out = flex(end_to_end_query, key, value, attention_mask, scaling).transpose(1, 2)
        return torch.cat(out.chunk(len(chunks), dim=1)), None
    outputs = []
    for place, (number, chunk) in enumerate(zip(chunks, query.chunk(len(chunks)), strict=True)):
        start = number * chunk.shape[2]
        end = (number + 1) * chunk.shape[2]
        keys = key[:, :, :end]
        values = value[:, :, :end]
        if attention_mask is None:
            out = _to_the_end(chunk, keys, values, scaling)
        elif attention_mask.dtype == torch.int32:
            ends = attention_mask[0, 0, 0]
            longest = attention_mask.shape[2]
            query_ends = ends.clamp(start, end) - start
            key_ends = ends.clamp(max=end)
            out = end_to_end(
                _tokens(chunk), _tokens(keys), _tokens(values), query_ends, longest, scaling, key_ends
            )[None]
        else:
            mask = attention_mask.chunk(len(chunks))[place][..., :end]
            out, _ = attend(module, chunk, keys, values, mask, scaling=scaling, **more)
        outputs.append(out)
    return torch.cat(outputs), None


def _tokens(heads: torch.Tensor) -> torch.Tensor:
    """Return the only lane of ``[1, heads, tokens, size]`` as ``[tokens, heads, size]``."""
    return heads[0].transpose(0, 1)


def _to_the_end(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend causally from the last tokens of rows: ``[rows, width, heads, size]``, of a wide query's.

    torch.compile knows no ``CausalBias``, and runs this as it is between two graphs (torch 2.13).
    """
    grouped = query.device.type == "cpu" or query.dtype != torch.float32
    if not grouped:
        key, value = _for_each_head(query, key, value)
    mask = causal_lower_right(query.shape[2], key.shape[2])
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend as blocks say: ``[lanes, heads, width, size]``, as the query; see ``end_to_end``."""
    compute = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out: torch.Tensor = compute(query, key, value, block_mask=blocks, scale=scale, enable_gqa=True)
    return out


@cache
def _compiled_flex() -> Any:
    """Return flex attention compiled, for any width: as it is, it would write out all scores.

    There are 4 graphs for each shape of heads: with gradients or without, of one block or several.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def end_to_end(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float | None = None,
    key_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally to rows that lie end to end: ``[tokens, heads, size]``, as the query.

    Args:
        query: ``[tokens, heads, size]``.
        key, value: ``[tokens, groups, size]``.
        ends: of each row, behind a 0: int32 ``[rows + 1]``.
        longest: tokens of the longest row.
        scale: of the scores; by default ``size ** -0.5``.
        key_ends: of each row's keys, if there are more than queries, which are its last.
    """
    keys = ends if key_ends is None else key_ends
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in VARLEN:
        options = {"window_size": (-1, 0)}
    if "enable_gqa" in VARLEN:
        options["enable_gqa"] = True
    else:
        key, value = _for_each_head(query, key, value)
    out = varlen_attn(query, key, value, ends, keys, longest, longest, scale=scale, **options)
    assert isinstance(out, torch.Tensor), "a second value comes only where it is asked for"
    return out


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
    key, value = _for_each_head(query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = query.shape[2] > 1 and attention_mask is None and causal
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal
    )
    return out.transpose(1, 2).contiguous(), None


def _for_each_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[rows, groups, ...]``, repeated for all heads ``[rows, heads, ...]``."""
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
