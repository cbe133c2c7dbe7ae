"""Samples cut into segments, the contexts that a model saw of them, each a row to train on.

a sample     Q  think A  tool  think B  tool  C       thinking is forgotten once its turn has ended
segments     Q  think A                               each token that the policy wrote is trained
             Q        A  tool  think B                once, behind what it saw when it wrote it
             Q        A  tool        B  tool  C
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveFloat

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, op
from rlgraph.ops.column_types import boolean, float32, int64, other_tokens, samples, segments, tokens


class Contexts(NamedTuple):
    """The columns that ``segment.contexts`` writes."""

    segment_tokens: int64[segments, tokens]
    segment_mask: boolean[segments, tokens]
    segment_places: int64[segments, tokens]
    segment_count: int64[samples]


@op(makes="segments", counts="segment_count", roles={"expected": "expected", "most": "most"})
def contexts(
    ctx: Context,
    tokens: int64[samples, other_tokens],
    loss_mask: boolean[samples, other_tokens],
    forgotten: int64[samples, other_tokens],
    *,
    most: Annotated[int, Field(ge=1)],
    expected: PositiveFloat = 2.0,
) -> Contexts:
    """The contexts that a policy saw in a sample in which it forgot tokens, one row per context.

    When the token at position i of a sample was written, the policy saw the tokens j < i with forgotten_j = 0
    or forgotten_j > i; ``rollout.agent`` with ``forgets: true`` writes this column. A segment runs from one
    length at which something was forgotten to the next, after the tokens that were still visible;
    ``segment_mask`` is the loss mask on its own tokens, so that each token is trained once. A segment without
    tokens in its mask is left out, so a sample may have no segments. ``segment_places`` is the position of
    each token in the sample, from 0, and ``segment_count`` the number of segments per sample. Records
    ``rollout/segments``, the segments per sample, and ``rollout/segments_min`` and ``rollout/segments_max``.

    Attributes:
        most: the most segments per sample; a sample with more ends the run.
        expected: the usual number of segments per sample, for the prediction of time, above 0.

    Example:
        segments: {op: segment.contexts, most: 8}
    """
    places, lengths, counts, masks = [], [], [], []
    for row in range(len(tokens)):
        length, mask = forgotten[row], loss_mask[row]
        place = torch.arange(len(length))
        cuts = [0, *length[length > 0].unique().tolist(), len(length)]
        segments_of_row = 0
        for begin, end in pairwise(cuts):
            trained = mask & (place >= begin) & (place < end)
            if not trained.any():
                continue
            seen = (place < end) & ((length == 0) | (length >= end))
            places.append(place[seen])
            masks.append(trained[seen])
            lengths.append(int(seen.sum()))
            segments_of_row += 1
        counts.append(segments_of_row)
    ctx.record("rollout/segments", counts, over="samples")
    ctx.record("rollout/segments_", counts, kind=("min", "max"), over="samples")
    count = torch.tensor(counts, dtype=torch.int64)
    token_places = Ragged(_joined(places, torch.int64), offsets_of(torch.tensor(lengths, dtype=torch.int64)))
    row_start = token_places.spread(tokens.offsets[:-1].repeat_interleave(count)).values
    segment_mask = token_places.like(_joined(masks, torch.bool))
    segment_tokens = token_places.like(tokens.values[row_start + token_places.values])
    return Contexts(segment_tokens, segment_mask, token_places, count)


@op()
def align(
    values: float32[samples, other_tokens],
    segment_places: int64[segments, tokens],
    segment_mask: boolean[segments, tokens],
) -> float32[segments, tokens]:
    """Values of a sample's tokens, such as advantages, at the same tokens in its segments.

    The value at a token in ``segment_mask`` is the sample's value at ``segment_places``; 0 elsewhere.

    Example:
        segment_advantages: {op: segment.align, in: {values: advantages}}
    """
    row_start = segment_places.spread(values.offsets[:-1]).values
    values_of_sample = values.values[row_start + segment_places.values]
    return segment_places.like(torch.where(segment_mask.values, values_of_sample, 0))


def _joined(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *tensors])
