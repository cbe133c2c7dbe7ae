"""Masks of tokens: which of a sample's a loss or an estimator is about."""

import re
from bisect import bisect_left
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Tokenizer, boolean, int64, op, samples, tokens


@op()
def observations(
    turn: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> boolean[samples, tokens]:
    """What a policy was answered: the tokens behind the prompt that tools and users wrote.

    True where ``turn`` is above 0 and ``loss_mask`` is false. What stands around an answer, as the chat
    template writes it, is part of it. A loss on these tokens has the policy predict what its actions lead to
    (ECHO, arXiv 2605.24517).

    Example:
        observed: {op: mask.observations}
    """
    return Ragged((turn.values > 0) & ~loss_mask.values, turn.offsets)


@op()
def steps(
    tokenizer: Tokenizer,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    end: Annotated[str, Field(min_length=1)] = "\n\n",
) -> boolean[samples, tokens]:
    """Where the steps of a response end: at tokens that complete the text ``end``, and at the last.

    Of the tokens in ``loss_mask``, whose texts are laid end to end, those that hold the last character of an
    ``end``, and the last one. False elsewhere.

    Attributes:
        end: what a step ends with.

    Example:
        steps: {op: mask.steps, end: "."}
    """
    out = loss_mask.like(torch.zeros_like(loss_mask.values))
    for row in range(len(tokens)):
        pieces = [tokenizer.decode([token]) for token in tokens[row][loss_mask[row]].tolist()]
        stops = [*accumulate(map(len, pieces))]
        ends = [match.end() for match in re.finditer(re.escape(end), "".join(pieces))]
        last = [len(pieces) - 1] if pieces else []
        out[row][loss_mask[row].nonzero()[[*last, *(bisect_left(stops, at) for at in ends)], 0]] = True
    return out
