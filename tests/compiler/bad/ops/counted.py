"""Ops of segments that say too little."""

from typing import NamedTuple

from rlgraph.ops import boolean, float32, int64, op, other_tokens, samples, segments, tokens


class Cut(NamedTuple):
    """Segments whose number nobody says."""

    segment_tokens: int64[segments, tokens]
    segment_mask: boolean[segments, tokens]
    segment_places: int64[segments, tokens]
    segment_count: int64[samples]


@op(makes="segments", counts="segment_count")
def cut(tokens: int64[samples, other_tokens]) -> Cut:
    """Says how many a sample has, and not how many that may be."""
    raise NotImplementedError


@op(rows="group")
def longest(segment_tokens: int64[segments, tokens]) -> float32[samples]:
    """Can't tell the samples that have no segment."""
    raise NotImplementedError


@op(filters=True)
def long(segment_tokens: int64[segments, tokens]) -> boolean[segments]:
    """Keeps segments of more than four tokens."""
    return segment_tokens.lengths > 4
