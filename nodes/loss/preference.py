"""Learning from preferences: pairs of a chosen and a rejected response, or a label per response.

The loss of a pair couples two sequences, which may lie on different ranks and in different micro-batches. Its
gradient does so through one number per sequence alone, and that number is known before the update: so it is a
column, and what is left of the loss is a sum over tokens. Shapes: ``[pairs]`` is one entry per value of
``group``. Sums run in float64.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import NonNegativeFloat, PositiveFloat

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, boolean, float32, int64, op, other_tokens, samples, tokens

TINY = 1e-8  # the least that 1 - p may be, of a response that is certain


class Preference(NamedTuple):
    """The columns that ops of pairs write; ``preferred`` is 1 on rows of a pair in order, 0.5 of a tie."""

    preference: float32[samples, tokens]
    preferred: float32[samples]


class Graded(NamedTuple):
    """The columns that ``preference.reward`` writes."""

    preference: float32[samples]
    preferred: float32[samples]


class Mismatched(NamedTuple):
    """The columns that ``preference.mismatched`` writes."""

    kl_tokens: int64[samples, tokens]
    kl_mask: boolean[samples, tokens]


@op(rows="all")
def dpo_weights(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    ref_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    chosen: boolean[samples],
    group: int64[samples],
    *,
    beta: PositiveFloat = 0.1,
) -> Preference:
    """Write the weight of each token's log-prob in the gradient of DPO (arXiv 2305.18290, eq. 7).

    DPO's loss is the mean over pairs of -log sigmoid(m), m = beta ((lp_w - ref_w) - (lp_l - ref_l)), w the
    chosen and l the rejected response, each a sum over its loss mask. Its gradient is the mean of -beta
    sigmoid(-m) (grad lp_w - grad lp_l). So the weight is 2 beta sigmoid(-m) on the tokens of w, as much
    below 0 on those of l, and 0 where ``loss_mask`` is false; the 2 makes a mean over sequences one over
    pairs. A group that is not one chosen and one rejected response has weight 0. Records ``loss``, ``margin``
    (m, in nats) and ``accuracy`` (pairs with m > 0), means over pairs.

    Attributes:
        beta: how strongly the policy is held to the reference, above 0; the smaller the weaker.

    Example:
        preference: {op: preference.dpo, beta: 0.1}
    """
    scores = beta * (_sums(old_logprobs, loss_mask) - _sums(ref_logprobs, loss_mask))
    weights, preferred = _compared(ctx, scores, chosen, group)
    return Preference(loss_mask.where_true(beta * weights), preferred)


@op(rows="all")
def simpo_weights(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    chosen: boolean[samples],
    group: int64[samples],
    *,
    beta: PositiveFloat = 2.0,
    margin: NonNegativeFloat = 1.0,
) -> Preference:
    """Write the weight of each token's log-prob in the gradient of SimPO (arXiv 2405.14734, eq. 6).

    The loss is the mean over pairs of -log sigmoid(m), m = beta (lp_w / |w| - lp_l / |l|) - margin: mean
    log-probs of the responses, |w| and |l| tokens long, and no reference. So the weight is 2 beta sigmoid(-m)
    / |w| on the tokens of w, -2 beta sigmoid(-m) / |l| on those of l, and 0 where ``loss_mask`` is false.
    Records ``loss``, ``margin`` (m) and ``accuracy`` (pairs with m + margin > 0), means over pairs.

    Attributes:
        beta: what a nat per token counts, above 0.
        margin: by how much the chosen response is to score higher, at least 0.

    Example:
        preference: {op: preference.simpo, beta: 2.0, margin: 1.0}
    """
    mean, lengths = _means(old_logprobs, loss_mask)
    weights, preferred = _compared(ctx, beta * mean, chosen, group, margin)
    return Preference(loss_mask.where_true(beta * weights / lengths), preferred)


@op(rows="all")
def orpo_weights(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    chosen: boolean[samples],
    group: int64[samples],
    *,
    coef: PositiveFloat = 0.1,
) -> Preference:
    """Write the weight of each token's log-prob in the gradient of ORPO (arXiv 2403.07691, eq. 6 and 7).

    The loss is the mean over pairs of -log p_w - coef log sigmoid(m), m = log(p_w / (1 - p_w)) - log(p_l / (1
    - p_l)), log p a response's mean log-prob: fine-tuning on the chosen one, and odds that tell the two
    apart, with no reference. So the weight is (2 + 2 coef sigmoid(-m) / (1 - p_w)) / |w| on the tokens of w,
    -2 coef sigmoid(-m) / (1 - p_l) / |l| on those of l, and 0 where ``loss_mask`` is false. Records ``loss``
    (of the odds alone), ``margin`` (m) and ``accuracy`` (pairs with m > 0), means over pairs.

    Attributes:
        coef: weight of the odds beside the likelihood of the chosen response, above 0.

    Example:
        preference: {op: preference.orpo, coef: 0.1}
    """
    mean, lengths = _means(old_logprobs, loss_mask)
    doubt = (-torch.expm1(mean)).clamp(min=TINY)
    weights, preferred = _compared(ctx, mean - doubt.log(), chosen, group)
    per_token = (2 * chosen.double() + coef * weights / doubt) / lengths
    return Preference(loss_mask.where_true(per_token), preferred)


@op(rows="all")
def mismatched(tokens: int64[samples, other_tokens], loss_mask: boolean[samples, other_tokens]) -> Mismatched:
    """Put a response to another prompt behind each prompt: what KTO measures the drift of a policy on.

    A row's prompt is what is outside its loss mask. It gets the response of the next row that has another
    prompt, after the last row the first one's (arXiv 2402.01306, section 4); where all rows have the same
    prompt, of the next row. Score both columns with the policy and with the reference.

    Example:
        mismatched: {op: preference.mismatched}
    """
    prompts = tokens.take_where(~loss_mask.values)
    asked = [prompts[row].numpy().tobytes() for row in range(len(prompts))]
    after = [*range(1, len(asked)), 0] if asked else []
    rows = [*reversed(range(len(asked)))] * 2  # twice, as the last rows look at the first ones
    for row in rows if len({*asked}) > 1 else []:
        if asked[after[row]] == asked[row]:
            after[row] = after[after[row]]
    answers = tokens.take_where(loss_mask.values).take(torch.tensor(after, dtype=torch.int64))
    offsets = offsets_of(prompts.lengths + answers.lengths)
    mask = Ragged(torch.zeros(int(offsets[-1]), dtype=torch.bool), offsets)
    learnt = mask.place_of >= mask.spread(prompts.lengths).values
    ids = torch.empty(len(learnt), dtype=torch.int64)
    ids[~learnt], ids[learnt] = prompts.values, answers.values
    return Mismatched(mask.like(ids), mask.like(learnt))


@op(rows="all")
def kto_weights(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    ref_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    kl_logprobs: float32[samples, other_tokens],
    kl_ref_logprobs: float32[samples, other_tokens],
    kl_mask: boolean[samples, other_tokens],
    desirable: boolean[samples],
    *,
    beta: PositiveFloat = 0.1,
    weight: PositiveFloat = 1.0,
    weight_undesirable: PositiveFloat = 1.0,
) -> float32[samples, tokens]:
    """Write the weight of each token's log-prob in the gradient of KTO (arXiv 2402.01306, section 4).

    The loss is the mean over responses of l (1 - sigmoid(u)), u = beta (r - z) of a desirable one and beta (z
    - r) of another, r = lp - ref, sums over its loss mask; z = max(0, mean of lp - ref over the mismatched
    rows of preference.mismatched), an estimate of KL(policy || reference) that takes no gradient; l =
    ``weight`` or ``weight_undesirable``. So the weight is l beta sigmoid(u) sigmoid(-u) on the tokens of a
    desirable response, as much below 0 on those of another, and 0 where ``loss_mask`` is false. Records
    ``loss``, ``kl`` (z, in nats) and ``accuracy`` (responses with u > 0).

    Attributes:
        beta: how strongly the policy is held to the reference, above 0; the smaller the weaker.
        weight: what a desirable response counts, above 0.
        weight_undesirable: what another counts, above 0; the more the fewer of them there are.

    Example:
        preference: {op: preference.kto, beta: 0.1}
    """
    drift = (_sums(kl_logprobs, kl_mask) - _sums(kl_ref_logprobs, kl_mask)).sum() / max(len(desirable), 1)
    sign = desirable.double() * 2 - 1
    gain = _sums(old_logprobs, loss_mask) - _sums(ref_logprobs, loss_mask)
    u = beta * sign * (gain - drift.clamp(min=0))
    scale = torch.where(desirable, weight, weight_undesirable).double()
    ctx.record("loss", scale * torch.sigmoid(-u))
    ctx.record("kl", float(drift.clamp(min=0)), over="iterations")
    ctx.record("accuracy", u > 0, kind="share")
    return loss_mask.where_true(sign * scale * beta * torch.sigmoid(u) * torch.sigmoid(-u))


@op(rows="all")
def reward_weights(
    ctx: Context, rewards: float32[samples], chosen: boolean[samples], group: int64[samples]
) -> Graded:
    """Write the weight of each score in the gradient of a reward model's loss (arXiv 2203.02155, eq. 1).

    The loss is the mean over pairs of -log sigmoid(m), m = r_w - r_l: that of Bradley and Terry. So the
    weight is 2 sigmoid(-m) for the chosen response w, and as much below 0 for the rejected one; the 2 makes a
    mean over sequences one over pairs. A group that is not one chosen and one rejected response has weight 0.
    Records ``loss``, ``margin`` (m) and ``accuracy`` (pairs with m > 0), means over pairs.

    Example:
        preference: {op: preference.reward}
    """
    weights, preferred = _compared(ctx, rewards.double(), chosen, group)
    return Graded(weights.float(), preferred)


@op(assumes=("one_step", "sequence_sum"))
def preference(
    logprobs: float32[samples, tokens], preference: float32[samples, tokens]
) -> float32[samples, tokens]:
    """DPO, SimPO, ORPO or KTO (arXiv 2305.18290, 2405.14734, 2403.07691, 2402.01306): -w logprobs per token.

    w is the column of a ``preference`` op, from the weights before the update, and says which of them it is.
    With ``aggregate: seq-mean-token-sum``, and no other, the gradient is that of the paper's mean. It is so
    for one optimizer step per iteration, and more are refused: w would not fall as the margin grows, and the
    loss have no minimum. The value is not the paper's loss, which the op records.

    Example:
        update: {op: update.policy, model: policy, loss: {kind: preference}, aggregate: seq-mean-token-sum}
    """
    return logprobs.like(-preference.values * logprobs.values)


def _compared(
    ctx: Context, scores: torch.Tensor, chosen: torch.Tensor, group: torch.Tensor, target: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 2 sigmoid(-m) of chosen rows and -2 sigmoid(-m) of others; and 1 where a pair is in order.

    m = s_w - s_l - target; in order is a pair with s_w > s_l, and a tie counts 0.5. Both are
    ``[samples]``, the first in float64, and 0 outside whole pairs.
    """
    sign = chosen.double() * 2 - 1
    _, members, count = torch.unique(group, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=torch.float64)
    above = sums.index_add(0, members, sign * scores)
    whole = (count == 2) & (sums.index_add(0, members, sign) == 0)
    margins = above - target
    ctx.record("loss", -torch.nn.functional.logsigmoid(margins[whole]), over="pairs")
    ctx.record("margin", margins[whole], over="pairs")
    ctx.record("accuracy", above[whole] > 0, kind="share", over="pairs")
    won = (above.sign() + 1) / 2 * whole
    return sign * (2 * torch.sigmoid(-margins) * whole)[members], won[members].float()


def _sums(logprobs: Ragged, loss_mask: Ragged) -> torch.Tensor:
    """Return each row's sum over its loss mask, in float64 ``[samples]``."""
    return logprobs.like(torch.where(loss_mask.values, logprobs.values.double(), 0)).sum()


def _means(logprobs: Ragged, loss_mask: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's mean over its loss mask, and of how many tokens, at least 1: both ``[samples]``."""
    lengths = loss_mask.sum().clamp(min=1)
    return _sums(logprobs, loss_mask) / lengths, lengths
