"""Masks of tokens: which of a sample's a loss or an estimator is about."""

import re
from bisect import bisect_left
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Tokenizer, boolean, float32, int64, op, samples, tokens


@op()
def observations(
    turn: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> boolean[samples, tokens]:
    """A mask of the tokens that answer a policy: those after the prompt that tools and users wrote.

    True where ``turn`` is above 0 and ``loss_mask`` is false. What the chat template writes around an answer
    is part of it. A loss on these tokens makes the policy predict the results of its actions (ECHO, arXiv
    2605.24517).

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
    """A mask of the tokens that end a step of a response: those that complete ``end``, and the last one.

    The texts of the tokens in ``loss_mask`` are concatenated; the mask is true on tokens that hold the last
    character of an ``end``, and on the last token. False elsewhere.

    Attributes:
        end: the text that ends a step.

    Example:
        steps: {op: mask.steps, end: "."}
    """
    out = loss_mask.like(torch.zeros_like(loss_mask.values))
    for row in range(len(tokens)):
        token_texts = [tokenizer.decode([token]) for token in tokens[row][loss_mask[row]].tolist()]
        stops = [*accumulate(map(len, token_texts))]
        step_ends = [len(token_texts) - 1] if token_texts else []
        for match in re.finditer(re.escape(end), "".join(token_texts)):
            step_ends.append(bisect_left(stops, match.end()))
        places = loss_mask[row].nonzero()[step_ends, 0]
        out[row][places] = True
    return out


@op()
def complete(
    ctx: Context, truncated: boolean[samples], loss_mask: boolean[samples, tokens]
) -> boolean[samples, tokens]:
    """The loss mask of complete samples; false for samples that a limit cut off.

    Overlong filtering (DAPO, arXiv 2503.14476, section 3.4): a sample that was cut off is rewarded for
    something that it could not finish. Use it as the ``loss_mask`` of an update: means then count none of
    those tokens, but means over sequences still count the sequences. Records ``masked``, the share of masked
    samples.

    Example:
        whole_mask: {op: mask.complete}
        update_policy: {op: update.policy, model: policy, loss: {kind: ppo_clip}, in: {loss_mask: whole_mask}}
    """
    ctx.record("masked", truncated, kind="share")
    return loss_mask.like(loss_mask.values & ~loss_mask.spread(truncated).values)


@op()
def weighed(
    weights: float32[samples, tokens], loss_mask: boolean[samples, tokens]
) -> boolean[samples, tokens]:
    """The loss mask without tokens whose weight is 0.

    An update still counts a token of weight 0 in its means; with this as its ``loss_mask`` it does not, as in
    verl's rejection by rollout correction.

    Example:
        kept_mask: {op: mask.weighed, in: {weights: rollout_weights}}
    """
    return loss_mask.like(loss_mask.values & (weights.values != 0))
