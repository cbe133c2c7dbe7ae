"""Rows laid end to end, and what rows have in common read once: fewer tokens for the same scores.

The samples of a group begin with the same prompt. Here they make one unit, the prompt and then each sample's
own tokens, and units fill rows of a common width::

    prompt A | sample 1 | sample 2 | prompt B | sample 3 | ...

A token sees the prompt of its unit, its own sample up to itself, and nothing else (``cells.py``); its
position counts as if it stood alone behind the prompt. So every score is what the sample alone would have, up
to rounding. Under a dense mask that costs what causal attention would skip, and kernels without one compute
whole blocks, so a batch is packed only where that is less work. Packing as in arXiv 2107.02027; a shared
prompt as one prefix, arXiv 2506.05433.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines import attention
from rlgraph.runtime.engines.fsdp.micro_batch import places_of
from rlgraph.runtime.engines.model_files import attention_kinds, runs_own_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL = "full_attention"


@dataclass(frozen=True)
class Span:
    """The tokens of a row that a pass reads: ``prompt`` that score nothing, then those up to ``end``."""

    row: int
    prompt: int
    end: int

    @property
    def own(self) -> int:
        """Return the tokens behind the prompt."""
        return self.end - self.prompt


@dataclass(frozen=True)
class PromptGroup:
    """A unit of packing: rows with one prompt in common, at least one."""

    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        """Return the tokens of the prompt and of each row behind it."""
        return self.spans[0].prompt + sum(span.own for span in self.spans)

    def first(self, room: int) -> PromptGroup | None:
        """Return as many of its rows, from the first on, as have room; None if not one has."""
        room -= self.spans[0].prompt
        ends = accumulate(span.own for span in self.spans)
        count = sum(1 for end in ends if end <= room)
        return PromptGroup(self.spans[:count]) if count else None


PackedLane = Sequence[PromptGroup]  # what one row of the pass holds, from left to right


def packs(model: PreTrainedModel) -> bool:
    """Return whether a model takes positions and a mask of ours: it has full attention in every layer.

    Of a model with code of its own nobody knows. Biases by distance (ALiBi) count columns, not positions.
    Attention that is neither PyTorch's nor in transformers' registry may read a mask of two dimensions alone
    (openai-gpt's).
    """
    config: Any = model.config.get_text_config()
    if {*attention_kinds(config)} != {FULL}:
        return False
    if not getattr(model, "_supports_attention_backend", False) and not getattr(
        model, "_supports_sdpa", False
    ):
        return False
    parameters = inspect.signature(type(model).forward).parameters
    if not {"position_ids", "attention_mask"} <= parameters.keys():
        return False
    if attention.kind_of(model) not in ("sdpa", "eager", attention.REPEATED, attention.PACKED):
        return False
    if getattr(model, "_is_stateful", False) or getattr(config, "alibi", False):
        return False
    return not runs_own_code(model)


def has_mask(model: PreTrainedModel) -> bool:
    """Return whether a model attends to packed rows under a dense mask."""
    return attention.kind_of(model) != attention.PACKED


def attention_share(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> float:
    """Return the work of attention for a token and a column that it sees, over that of its decoder's weights.

    Two products, with keys and with values, of as many numbers as the heads have. A token multiplies with
    those of a mixture's fused experts that it chooses.
    """
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    size = attention.head_size(config)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    weights = 0.0
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if ".experts." in f".{name}":
                weights += prod(parameter.shape) * (chosen / parameter.shape[0])
            else:
                weights += prod(parameter.shape)
    share: float = 2 * len(layers) * heads * size / max(1, weights)
    return share


def _spans_of(wanted: Ragged) -> list[Span]:
    """Return each row's span, from first to before last scored token: bool ``wanted [rows, tokens]``."""
    _, row, place = places_of(wanted)
    first_scored = torch.full((len(wanted),), 2**62).scatter_reduce(0, row, place, "amin").tolist()
    last_scored = torch.zeros(len(wanted), dtype=torch.int64).scatter_reduce(0, row, place, "amax").tolist()
    spans = []
    for index, (start, end) in enumerate(zip(first_scored, last_scored, strict=True)):
        has_scores = end > 0
        spans.append(Span(index, start, end) if has_scores else Span(index, 0, 0))
    return spans


def alike(tokens: Ragged, wanted: Ragged) -> list[PromptGroup]:
    """Return rows with the same prompt together, the longest first, and units with most tokens first.

    What is ``wanted``, bool ``[rows, tokens]``, has scores; before it is the prompt.
    """
    groups: dict[bytes, list[Span]] = {}
    values = tokens.values.numpy()
    offsets = tokens.offsets.tolist()
    for span in sorted(_spans_of(wanted), key=lambda span: -span.own):
        start = offsets[span.row]
        groups.setdefault(values[start : start + span.prompt].tobytes(), []).append(span)
    return sorted((PromptGroup(tuple(group)) for group in groups.values()), key=lambda unit: -unit.length)


def lanes_of(units: Sequence[PromptGroup], width: int) -> list[PackedLane]:
    """Fill lanes of a width with what ``alike`` gives: best fit, and what fits nowhere is split.

    A part of a unit carries the prompt once more, so it is split only where that is less than the part has
    of its own. A row that is longer than ``width`` has a lane alone.
    """
    lanes: list[list[PromptGroup]] = []
    room: list[tuple[int, int]] = []  # (room, number) of each lane, ascending
    for unit in units:
        while unit.spans:
            placed, position = _fit(unit, room)
            if position < 0:
                placed = unit.first(width) or PromptGroup(unit.spans[:1])
                position = len(room)
                room.append((width, len(lanes)))
                lanes.append([])
            free, lane = room.pop(position)
            lanes[lane].append(placed)
            insort(room, (free - placed.length, lane))
            unit = PromptGroup(unit.spans[len(placed.spans) :])
    return [tuple(lane) for lane in lanes]


def _fit(unit: PromptGroup, room: Sequence[tuple[int, int]]) -> tuple[PromptGroup, int]:
    """Return the part of a unit to place next, and its lane's place in ``room``; -1 for a new lane."""
    position = bisect_left(room, (unit.length, -1))
    if position < len(room):
        return unit, position
    if not room:
        return unit, -1
    head = unit.first(room[-1][0])
    if head is None:
        return unit, -1
    own_tokens = sum(span.own for span in head.spans)
    if own_tokens <= head.spans[0].prompt:  # what carrying the prompt once more would cost
        return unit, -1
    return head, len(room) - 1
