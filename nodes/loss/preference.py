"""Learning from preferences: pairs of a chosen and a rejected response, or a label per response.

The loss of a pair couples two sequences, which may lie on different ranks and in different micro-batches. Its
gradient does so through one number per sequence alone, and that number is known before the update: so it is a
column, and what is left of the loss is a sum over tokens. Shapes: ``[pairs]`` is one entry per value of
``group``. Sums run in float64.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.loss.pair_loss import PairScores, scores_of, sigmoid
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Context, PairLoss, boolean, float32, int64, op, other_tokens, samples, tokens

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


@op(
    rows="all",
    when={"ref_logprobs": "reference", "squares": "weighting"},
    assumes=("weighed_losses",),
)
def dpo_weights(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    ref_logprobs: float32[samples, tokens] | None,
    loss_mask: boolean[samples, tokens],
    chosen: boolean[samples],
    group: int64[samples],
    squares: float32[samples, tokens] | None,
    *,
    beta: PositiveFloat = 0.1,
    losses: dict[str, PairLoss] | None = None,
    weights: dict[str, float] | None = None,
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl",
    alpha: float = 0.5,
    tail: Annotated[float, Field(ge=0, le=1)] = 1.0,
    reference: bool = True,
    weighting: bool = False,
) -> Preference:
    """Write the weight of each token's log-prob in the gradient of DPO (arXiv 2305.18290, eq. 7) or variants.

    DPO's loss is the mean over pairs of -log sigmoid(m), m = beta ((lp_w - ref_w) - (lp_l - ref_l)), w the
    chosen and l the rejected response, each a sum over its loss mask. Its gradient is the mean of -beta
    sigmoid(-m) (grad lp_w - grad lp_l). So the weight is 2 beta sigmoid(-m) on the tokens of w, -2 beta
    sigmoid(-m) on those of l, and 0 where ``loss_mask`` is false; the 2 turns a mean over sequences into one
    over pairs. ``losses`` replaces DPO's loss by another, or by the sum of several (MPO, arXiv 2411.10442):
    the weight is then -2 times the derivative of that sum over pairs with respect to the token's log-prob. A
    group that is not one chosen and one rejected response has weight 0. Records ``loss``, ``margin`` (m, in
    nats; with a divergence, of its scores) and ``accuracy`` (pairs with m > 0), means over pairs; with
    several losses, also each loss.

    Attributes:
        beta: how strongly the policy is held to the reference, above 0; smaller is weaker.
        losses: losses of pairs, under names that you choose (``rlgraph nodes`` lists the kinds); null: {dpo:
            {kind: sigmoid}}.
        weights: the weight of each of ``losses``, by its name; 1 if not given.
        divergence: the divergence that turns log ratios into scores: reverse_kl, that of DPO, uses them
            unchanged; forward_kl, js and alpha are those of f-DPO (arXiv 2309.16240).
        alpha: the order of the divergence alpha.
        tail: the weight of a response's tokens beyond the length of the other response, 0 to 1 (LD-DPO, arXiv
            2409.06411).
        reference: whether log ratios are taken to a reference; false: plain log-probs are used, as in CPO and
            SimPO.
        weighting: whether to weight pairs by how likely the policy is to have written them (WPO, arXiv
            2406.11827); this reads ``squares`` of logprobs.squares.

    Example:
        preference: {op: preference.dpo, beta: 0.1}
    """
    with torch.enable_grad():
        logprobs = torch.where(loss_mask.values, old_logprobs.values.detach().double(), 0).requires_grad_()
        pairs = _pairs(chosen, group)
        counted = loss_mask.like(loss_mask.values * _tails(loss_mask, pairs, tail))
        policy = counted.like(logprobs * counted.values).sum()
        zeros = torch.zeros_like(policy)
        referred = zeros
        if ref_logprobs is not None:
            masked = torch.where(loss_mask.values, ref_logprobs.values.double(), 0)
            referred = counted.like(masked * counted.values).sum()
        scores = _scores(
            policy, referred, loss_mask.like(logprobs), loss_mask, pairs, beta, divergence, alpha
        )
        per_pair = torch.zeros(len(pairs), dtype=torch.float64)
        terms = losses or {"dpo": PairLoss(sigmoid, {}, {})}
        for name, loss in terms.items():
            values = loss({"pairs": scores})
            if len(terms) > 1:
                ctx.record(f"loss_{name}", values.detach(), over="pairs")
            per_pair = per_pair + (weights or {}).get(name, 1.0) * values
        if squares is not None:
            per_pair = per_pair * _confidence(old_logprobs, squares, loss_mask, pairs)
        gradient = torch.zeros_like(logprobs)
        if len(pairs):
            (gradient,) = torch.autograd.grad(per_pair.sum(), logprobs)
    margins = beta * scores.difference().detach()
    ctx.record("loss", per_pair.detach(), over="pairs")
    ctx.record("margin", margins, over="pairs")
    ctx.record("accuracy", margins > 0, kind="share", over="pairs")
    preferred = _in_order(margins, pairs, len(chosen))
    return Preference(loss_mask.like((-2 * gradient).float()), preferred)


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

    The loss is the mean over pairs of -log sigmoid(m), m = beta (lp_w / |w| - lp_l / |l|) - margin: it uses
    mean log-probs of the responses, which are |w| and |l| tokens long, and no reference. So the weight is 2
    beta sigmoid(-m) / |w| on the tokens of w, -2 beta sigmoid(-m) / |l| on those of l, and 0 where
    ``loss_mask`` is false. Records ``loss``, ``margin`` (m) and ``accuracy`` (pairs with m + margin > 0),
    means over pairs.

    Attributes:
        beta: the weight of a nat per token, above 0.
        margin: by how much the chosen response should score higher, at least 0.

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

    The loss is the mean over pairs of -log p_w - coef log sigmoid(m), where m = log(p_w / (1 - p_w)) -
    log(p_l / (1 - p_l)) and log p is a response's mean log-prob: fine-tuning on the chosen response, plus
    odds that separate the two, without a reference. So the weight is (2 + 2 coef sigmoid(-m) / (1 - p_w)) /
    |w| on the tokens of w, -2 coef sigmoid(-m) / (1 - p_l) / |l| on those of l, and 0 where ``loss_mask`` is
    false. Records ``loss`` (only of the odds), ``margin`` (m) and ``accuracy`` (pairs with m > 0), means over
    pairs.

    Attributes:
        coef: weight of the odds, relative to the likelihood of the chosen response, above 0.

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
    """Put a response to another prompt after each prompt; KTO measures the drift of a policy on such rows.

    A row's prompt is the part outside its loss mask. It gets the response of the next row that has another
    prompt; the first row follows the last (arXiv 2402.01306, section 4). If all rows have the same prompt, it
    gets the response of the next row. Score both columns with the policy and with the reference.

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


@op(rows="all", when={"kl_logprobs": "drift", "kl_ref_logprobs": "drift", "kl_mask": "drift"})
def kto_weights(
    ctx: Context,
    old_logprobs: float32[samples, tokens],
    ref_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    kl_logprobs: float32[samples, other_tokens] | None,
    kl_ref_logprobs: float32[samples, other_tokens] | None,
    kl_mask: boolean[samples, other_tokens] | None,
    desirable: boolean[samples],
    *,
    beta: PositiveFloat = 0.1,
    weight: PositiveFloat = 1.0,
    weight_undesirable: PositiveFloat = 1.0,
    drift: bool = True,
) -> float32[samples, tokens]:
    """Write the weight of each token's log-prob in the gradient of KTO (arXiv 2402.01306, section 4).

    The loss is the mean over responses of l (1 - sigmoid(u)), u = beta (r - z) for a desirable response and
    beta (z - r) for any other, r = lp - ref, summed over its loss mask; z = max(0, mean of lp - ref over the
    mismatched rows of preference.mismatched), an estimate of KL(policy || reference) without gradient; l =
    ``weight`` or ``weight_undesirable``. So the weight is l beta sigmoid(u) sigmoid(-u) on the tokens of a
    desirable response, minus that on the tokens of any other, and 0 where ``loss_mask`` is false. Without
    ``drift``, z is 0, which is APO-zero for labels (arXiv 2408.06266), and no mismatched rows are read.
    Records ``loss``, ``kl`` (z, in nats) and ``accuracy`` (responses with u > 0).

    Attributes:
        beta: how strongly the policy is held to the reference, above 0; smaller is weaker.
        weight: the weight of a desirable response, above 0.
        weight_undesirable: the weight of any other response, above 0; choose it larger if there are few of
            them.
        drift: whether a response must beat the drift z of the policy; false: only the reference.

    Example:
        preference: {op: preference.kto, beta: 0.1}
    """
    z = torch.zeros((), dtype=torch.float64)
    if drift:
        # the compiler has these three read where ``drift`` is true: see ``when`` above
        assert kl_logprobs is not None and kl_ref_logprobs is not None and kl_mask is not None
        moved = _sums(kl_logprobs, kl_mask) - _sums(kl_ref_logprobs, kl_mask)
        z = (moved.sum() / max(len(desirable), 1)).clamp(min=0)
    sign = desirable.double() * 2 - 1
    gain = _sums(old_logprobs, loss_mask) - _sums(ref_logprobs, loss_mask)
    u = beta * sign * (gain - z)
    scale = torch.where(desirable, weight, weight_undesirable).double()
    ctx.record("loss", scale * torch.sigmoid(-u))
    ctx.record("kl", float(z), over="iterations")
    ctx.record("accuracy", u > 0, kind="share")
    return loss_mask.where_true(sign * scale * beta * torch.sigmoid(u) * torch.sigmoid(-u))


@op(rows="all")
def reward_weights(
    ctx: Context, rewards: float32[samples], chosen: boolean[samples], group: int64[samples]
) -> Graded:
    """Write the weight of each score in the gradient of a reward model's loss (arXiv 2203.02155, eq. 1).

    The loss is the mean over pairs of -log sigmoid(m), m = r_w - r_l: the Bradley-Terry loss. So the weight
    is 2 sigmoid(-m) for the chosen response w, and -2 sigmoid(-m) for the rejected one; the 2 turns a mean
    over sequences into one over pairs. A group that is not one chosen and one rejected response has weight 0.
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

    w is the column of a ``preference`` op, computed from the weights before the update; the op decides which
    of these losses it is. Only with ``aggregate: seq-mean-token-sum`` is the gradient that of the paper's
    mean. That holds for one optimizer step per iteration; more are refused, since w would not fall as the
    margin grows, and the loss would have no minimum. The value is not the paper's loss, which the op records.

    Example:
        update: {op: update.policy, model: policy, loss: {kind: preference}, aggregate: seq-mean-token-sum}
    """
    return logprobs.like(-preference.values * logprobs.values)


def _pairs(chosen: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return the rows of whole pairs, int64 ``[pairs, 2]``, the chosen one first."""
    sign = chosen.long() * 2 - 1
    _, members, count = torch.unique(group, return_inverse=True, return_counts=True)
    signs = torch.zeros(len(count), dtype=torch.int64).index_add(0, members, sign)
    whole = ((count == 2) & (signs == 0))[members]
    sides = []
    for side in (chosen, ~chosen):
        rows = torch.nonzero(whole & side).flatten()
        sides.append(rows[members[rows].argsort()])
    return torch.stack(sides, dim=1)


def _tails(loss_mask: Ragged, pairs: torch.Tensor, tail: float) -> torch.Tensor:
    """Return what each token counts ``[all tokens]``: 1, or ``tail`` beyond the length of the other side."""
    lengths = loss_mask.sum()
    shorter = lengths.clone()
    shorter[pairs.flatten()] = lengths[pairs].min(dim=1).values.repeat_interleave(2)
    place = loss_mask.like(loss_mask.values.long()).so_far()
    return torch.where(place > loss_mask.spread(shorter).values, tail, 1.0).double()


def _scores(
    policy: torch.Tensor,
    referred: torch.Tensor,
    logprobs: Ragged,
    loss_mask: Ragged,
    pairs: torch.Tensor,
    beta: float,
    divergence: str,
    alpha: float,
) -> PairScores:
    """Return the scores of pairs, from responses' log-probs under policy and reference ``[samples]``."""
    won, lost = pairs.unbind(dim=1)
    ratio, lengths = policy - referred, loss_mask.sum().clamp(min=1)
    scores = scores_of(ratio, divergence, alpha)
    return PairScores(
        beta=beta,
        chosen=scores[won],
        rejected=scores[lost],
        chosen_ratio=ratio[won],
        rejected_ratio=ratio[lost],
        chosen_logprob=policy[won],
        rejected_logprob=policy[lost],
        chosen_ref=referred[won],
        rejected_ref=referred[lost],
        chosen_tokens=lengths[won],
        rejected_tokens=lengths[lost],
        chosen_likelihood=logprobs.sum()[won],
    )


def _confidence(logprobs: Ragged, squares: Ragged, loss_mask: Ragged, pairs: torch.Tensor) -> torch.Tensor:
    """Return WPO's weight of each pair: exp of the mean of log p - log sum_v p_v^2, of both sides."""
    aligned = logprobs.values.double() - squares.values.double().clamp(min=TINY).log()
    mean, _ = _means(logprobs.like(aligned), loss_mask)
    return mean.detach()[pairs].sum(dim=1).exp()


def _compared(
    ctx: Context, scores: torch.Tensor, chosen: torch.Tensor, group: torch.Tensor, target: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 2 sigmoid(-m) of chosen rows and -2 sigmoid(-m) of others; and 1 where a pair is in order.

    m = s_w - s_l - target; in order is a pair with s_w > s_l, and a tie counts 0.5. Both are
    ``[samples]``, the first in float64, and 0 outside whole pairs.
    """
    pairs = _pairs(chosen, group)
    won, lost = pairs.unbind(dim=1)
    above = scores[won] - scores[lost]
    margins = above - target
    ctx.record("loss", -torch.nn.functional.logsigmoid(margins), over="pairs")
    ctx.record("margin", margins, over="pairs")
    ctx.record("accuracy", above > 0, kind="share", over="pairs")
    weights = torch.zeros_like(scores)
    weights[won], weights[lost] = 2 * torch.sigmoid(-margins), -2 * torch.sigmoid(-margins)
    return weights, _in_order(above, pairs, len(chosen))


def _in_order(above: torch.Tensor, pairs: torch.Tensor, rows: int) -> torch.Tensor:
    """Return float32 ``[samples]``: 1 where the chosen side is above the other, 0.5 at a tie, else 0."""
    preferred = torch.zeros(rows, dtype=torch.float32)
    preferred[pairs.flatten()] = ((above.sign() + 1) / 2).float().repeat_interleave(2)
    return preferred


def _sums(logprobs: Ragged, loss_mask: Ragged) -> torch.Tensor:
    """Return each row's sum over its loss mask, in float64 ``[samples]``."""
    return logprobs.like(torch.where(loss_mask.values, logprobs.values.double(), 0)).sum()


def _means(logprobs: Ragged, loss_mask: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's mean over its loss mask, and of how many tokens, at least 1: both ``[samples]``."""
    lengths = loss_mask.sum().clamp(min=1)
    return _sums(logprobs, loss_mask) / lengths, lengths
