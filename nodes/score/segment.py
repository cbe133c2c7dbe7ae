"""Samples cut into segments, the contexts that a model saw of them, each a row to train on.

Two kinds of samples are cut: conversations whose policy forgets, and episodes of agents from outside, whose
requests need not continue each other.

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
    places, counts, masks = [], [], []
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
            segments_of_row += 1
        counts.append(segments_of_row)
    token_places, token_index, count = _placed(ctx, tokens, places, counts)
    segment_mask = token_places.like(_joined(masks, torch.bool))
    segment_tokens = token_places.like(tokens.values[token_index])
    return Contexts(segment_tokens, segment_mask, token_places, count)


def _placed(
    ctx: Context, tokens: Ragged, places: list[torch.Tensor], counts: list[int]
) -> tuple[Ragged, torch.Tensor, torch.Tensor]:
    """Return the places of segments' tokens in their samples and in all tokens, and the segments per sample.

    It records how many there are. ``places`` has one tensor per segment, ``counts`` one number per sample.
    """
    ctx.record("rollout/segments", counts, over="samples")
    ctx.record("rollout/segments_", counts, kind=("min", "max"), over="samples")
    count = torch.tensor(counts, dtype=torch.int64)
    lengths = torch.tensor([len(segment) for segment in places], dtype=torch.int64)
    token_places = Ragged(_joined(places, torch.int64), offsets_of(lengths))
    row_start = token_places.spread(tokens.offsets[:-1].repeat_interleave(count)).values
    return token_places, row_start + token_places.values, count


class Paths(NamedTuple):
    """The columns that ``segment.paths`` writes."""

    tokens: int64[segments, tokens]
    loss_mask: boolean[segments, tokens]
    rollout_logprobs: float32[segments, tokens]
    segment_places: int64[segments, tokens]
    segment_count: int64[samples]


@op(makes="segments", counts="segment_count", roles={"expected": "expected", "most": "most"})
def paths(
    ctx: Context,
    episode_tokens: int64[samples, other_tokens],
    episode_parents: int64[samples, other_tokens],
    episode_calls: int64[samples, other_tokens],
    episode_logprobs: float32[samples, other_tokens],
    *,
    most: Annotated[int, Field(ge=1)],
    expected: PositiveFloat = 1.0,
) -> Paths:
    """The rows of an agent's episode: what the policy read and wrote, one row per line of its requests.

    The tokens of an episode are a tree, in which each token names the one before it (``rollout.harness``). A
    row is a path from the root to the last token of an answer that no later answer continues.
    ``loss_mask`` is true on the tokens that the policy wrote, in the first of the rows that share them, so
    that each is trained once. An episode in which the policy wrote nothing has no rows. ``segment_places`` is
    the position of each token in the episode, from 0, and ``segment_count`` the number of rows per episode.
    Records ``rollout/segments``, the rows per episode, and ``rollout/segments_min`` and
    ``rollout/segments_max``.

    Attributes:
        most: the most rows per episode; an episode with more ends the run.
        expected: the usual number of rows per episode, for the prediction of time, above 0.

    Example:
        segments: {op: segment.paths, most: 8}
    """
    places: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    counts = []
    for row in range(len(episode_tokens)):
        rows = _rows_of_tree(episode_parents[row].tolist(), episode_calls[row].tolist())
        counts.append(len(rows))
        for path, trained in rows:
            places.append(torch.tensor(path, dtype=torch.int64))
            masks.append(torch.tensor(trained, dtype=torch.bool))
    token_places, token_index, count = _placed(ctx, episode_tokens, places, counts)
    return Paths(
        tokens=token_places.like(episode_tokens.values[token_index]),
        loss_mask=token_places.like(_joined(masks, torch.bool)),
        rollout_logprobs=token_places.like(episode_logprobs.values[token_index]),
        segment_places=token_places,
        segment_count=count,
    )


def _rows_of_tree(parents: list[int], calls: list[int]) -> list[tuple[list[int], list[bool]]]:
    """Return the rows of an episode: the places of their tokens, and which of them are trained there.

    Example, of two answers to one prompt:
        >>> _rows_of_tree([-1, 0, 0], [-1, 0, 1])
        [([0, 1], [False, True]), ([0, 2], [False, True])]
    """
    continued = [False] * len(parents)  # whether something that the policy wrote stands behind a token
    for place in reversed(range(len(parents))):
        was_written = calls[place] >= 0
        if (was_written or continued[place]) and parents[place] >= 0:
            continued[parents[place]] = True
    rows = []
    is_taken = [False] * len(parents)
    for end in range(len(parents)):
        if calls[end] < 0 or continued[end]:
            continue
        path = []
        place = end
        while place >= 0:
            path.append(place)
            place = parents[place]
        path.reverse()
        trained = []
        for place in path:
            trained.append(calls[place] >= 0 and not is_taken[place])
            is_taken[place] = True
        rows.append((path, trained))
    return rows


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
