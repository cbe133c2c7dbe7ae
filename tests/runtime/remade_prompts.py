"""Prompts made of samples, by an op of a user's own, beside a number for each."""

from typing import NamedTuple

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import float32, int64, op, prompt_tokens, prompts, samples, tokens


class Asked(NamedTuple):
    asked: int64[prompts, prompt_tokens]
    numbers: int64[prompts]


@op(makes="prompts")
def ask(tokens: int64[samples, tokens], mine: int64[samples]) -> Asked:
    """What a sample is, whole, and its number."""
    return Asked(Ragged(tokens.values, tokens.offsets), mine)


@op()
def number(tokens: int64[samples, tokens], rewards: float32[samples]) -> int64[samples]:
    """A number that hardly any two samples share."""
    return tokens.like(tokens.values * (tokens.place_of + 1)).sum()
