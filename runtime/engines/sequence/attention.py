"""Attention over the tokens of all ranks that share a row, by heads and in rings.

A rank runs every layer on its part of the width. Only attention looks across tokens: there an all-to-all
trades all heads of the rank's tokens for all tokens of some heads, and another one goes back
(DeepSpeed-Ulysses, arXiv 2309.14509)::

    [rows, heads, share, size]   ->   [rows, heads / ranks, width, size]   ->   attention   ->   and back

Where key heads are too few for that, ``ranks = heads x ring``: so many consecutive ranks trade heads as
above, for the tokens of two chunks of the width, and those of a ring have other chunks of the same heads.
They gather keys and values (as Llama 3 does, arXiv 2407.21783, section 3.3.2), and the queries of a chunk
attend to all keys up to its end. Of 2 x ring chunks rank r of a ring has number r and the r-th from the end,
so that each computes as many causal scores. The two lie below each other, as rows do. Here are 4 ranks and
2 key heads::

    columns  0 1 | 2 3 | 4 5 | 6 7      ranks 0, 1: columns 0, 6 and 1, 7      ranks 2, 3: 2, 4 and 3, 5

Shapes: ``width`` tokens of a row, of which a rank has the ``share`` that is ``width / ranks``; ``lanes`` are
rows, or in a ring the chunks of rows.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from rlgraph.runtime.engines import attention
from rlgraph.runtime.engines.all_to_all import exchange
from rlgraph.runtime.engines.model_files import runs_own_code
from rlgraph.runtime.engines.sequence.groups import SequenceGroup, over_heads

BY_LENGTH = {"dynamic", "longrope"}  # kinds of position embeddings that look at the largest position given
BY_TOKEN = {"full_attention", "sliding_attention"}  # kinds of layers that look across tokens by attention


def check(model: Any, ranks: int) -> None:
    """Check, before weights are read, that a model looks across tokens only in attention that can be wrapped.

    Raises:
        ValueError: it does not.
    """
    if ranks == 1:
        return
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - BY_TOKEN
    faults = {
        "it runs Python code that came with it": runs_own_code(model),
        "its layers carry a state from token to token": getattr(model, "_is_stateful", False),
        f"it has layers of {', '.join(sorted(kinds))}": kinds,
        "it takes no positions": "position_ids" not in inspect.signature(type(model).forward).parameters,
        "its attention does not go through transformers' AttentionInterface": (
            not model._supports_attention_backend or config._attn_implementation != "sdpa"
        ),
        "its position embeddings depend on how long a row is": any(
            {*_kinds(getattr(module, "rope_type", ""))} & BY_LENGTH for module in model.modules()
        ),
        "its attention sees later tokens": not all(getattr(m, "is_causal", True) for m in model.modules()),
    }
    for fault, is_so in faults.items():
        if is_so:
            law = f"{config.model_type}: {fault}, so its sequences can't be shared by {ranks} ranks"
            raise ValueError(f"{law}; set train.sequence_parallel to 1")


def _kinds(rope: Any) -> Iterable[str]:
    """Return the kinds of position embeddings that a module has: one, or one for each kind of layer."""
    return rope.values() if isinstance(rope, Mapping) else [rope]


def share_attention(model: Any, group: SequenceGroup) -> None:
    """Have a transformers model attend over the tokens of all ranks of a group."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ranks = group.group
    if ranks is None:
        return
    group = over_heads(group, model)
    kind = model.config._attn_implementation
    name = f"{kind}{attention.OVER}{ranks.group_name}_{group.ring}"
    AttentionInterface.register(name, partial(_attend, ALL_ATTENTION_FUNCTIONS[kind], group))
    AttentionMaskInterface.register(name, partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[kind], group))
    model.set_attn_implementation(name)


def _mask(
    mask: Callable[..., Any],
    group: SequenceGroup,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    **options: Any,
) -> Any:
    """Return the mask of the whole width, or of this rank's chunks, where attention needs one; transformers
    knows of a share of it."""
    width = kv_length * group.multiple
    if group.ring == 1:
        return mask(batch_size=batch_size, q_length=q_length * group.ranks, kv_length=width, **options)
    window = options.get("local_size") or width
    if options["allow_is_causal_skip"] and window >= width:
        return None
    options |= {"batch_size": batch_size // len(group.chunks), "allow_is_causal_skip": False}
    chunk = q_length * group.heads
    offsets = ({**options, "q_offset": number * chunk} for number in group.chunks)
    return torch.cat([mask(q_length=chunk, kv_length=width, **offset) for offset in offsets])


def _attend(
    attend: Callable[..., Any],
    group: SequenceGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with some heads from the tokens of all ranks that share heads to those of the whole width.

    As transformers asks: ``[lanes, heads, share, size]`` -> ``[lanes, share, heads, size]``.
    """
    query, key, value = (_all_tokens(tensor, group) for tensor in (query, key, value))
    if group.ring > 1:
        key, value = (_all_chunks(tensor, group) for tensor in (key, value))
        attend = partial(attention.attend_from, group.chunks, attend)
    out, _ = attend(module, query, key, value, attention_mask, **options)
    return _all_heads(out, group), None


def _all_tokens(tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Trade heads for tokens: ``[lanes, heads, share, size]`` -> ``[lanes, heads / ranks, width, size]``."""
    if group.heads == 1:
        return tensor
    split = tensor.unflatten(1, (group.heads, -1)).permute(1, 3, 0, 2, 4)  # ranks, share, lanes, heads, size
    return _exchanged(split, group, _neighbours(group)).flatten(0, 1).permute(1, 2, 0, 3)


def _all_heads(tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Trade tokens for heads: ``[lanes, width, heads / ranks, size]`` -> ``[lanes, share, heads, size]``."""
    if group.heads == 1:
        return tensor
    split = tensor.unflatten(1, (group.heads, -1)).permute(1, 2, 0, 3, 4)  # ranks, share, lanes, heads, size
    return _exchanged(split, group, _neighbours(group)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _all_chunks(tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Gather all chunks, in order: ``[lanes, heads, chunk, size]`` -> ``[rows, heads, width, size]``.

    Gradients of a chunk from all ranks of the ring are added up on the one that it is from.
    """
    members = range(group.rank % group.heads, group.ranks, group.heads)
    gathered = _exchanged(tensor.expand(group.ring, *tensor.shape), group, members)
    own_chunk, second = gathered.unflatten(1, (len(group.chunks), -1)).unbind(1)
    return torch.cat([*own_chunk, *reversed(second.unbind())], dim=2)


def _neighbours(group: SequenceGroup) -> range:
    """Return the ranks with which this one trades heads."""
    start = group.rank // group.heads * group.heads
    return range(start, start + group.heads)


def _exchanged(parts: torch.Tensor, group: SequenceGroup, members: range) -> torch.Tensor:
    """Send part i of ``[members, ...]`` to the i-th of some ranks of a group, and return theirs for this one.

    Collective among the members, by zero bytes from and to the others.
    """
    sizes = [int(rank in members) for rank in range(group.ranks)] if len(members) < group.ranks else None
    return exchange(parts, sizes, sizes, group.group)
