"""Policy losses per token, of log-probs in nats; KL estimators; and how losses become one per mini-batch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.loss.ratio import LOG_RATIO_LIMIT, RatioLevel, ratio, ratio_of
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals, boolean, float32, op, samples, tokens

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
PolicyAggregation = Literal[Aggregation, "seq-mean-token-sum-norm"]
KlKind = Literal["k1", "k2", "k3", "abs"]

K3_LIMIT = 10.0


@op(assumes=("sampling_logprobs",))
def ppo_clip(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    clip: PositiveFloat = 0.2,
    clip_high: PositiveFloat | None = None,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
    delta: PositiveFloat | None = None,
) -> float32[samples, tokens]:
    """Clipped policy-gradient loss (PPO, arXiv 1707.06347).

    max(-A rho, -A clip(rho, 1 - clip, 1 + clip_high)), rho = exp(clamp(logprobs - old_logprobs, -20, 20));
    with ``dual_clip`` c, at most -A c where A < 0 (arXiv 1912.09729). ``clip_high`` above ``clip`` is the
    decoupled clip of DAPO (arXiv 2503.14476). With ``delta`` the first of the two terms uses min(rho, delta)
    in place of rho: two-sided clipping (INTELLECT-2, arXiv 2505.07291). If delta is above 1 + clip_high, that
    equals ``dual_clip: delta``; otherwise a ratio above delta has no gradient where A > 0 either.

    With ``level: sequence`` rho is s = exp(lp - sg(lp) + sg(mean_t(lp - old))), the mean over the sequence's
    loss mask and clamped to +-20, sg the stop of gradients: the loss of GSPO (arXiv 2507.18071), whose clip
    is far narrower. With ``level: product`` rho is exp(sum_t(lp - old)), the ratio of whole responses (RLOO,
    arXiv 2402.14740), with its own gradient; use it with ``aggregate: seq-mean-token-mean``.

    Attributes:
        level: which ratio is used: token, each token's own; sequence, the geometric mean over the sequence;
            product, the product over the sequence.
        clip: how far below 1 the ratio may count, above 0; above 1 too unless ``clip_high`` is given.
        clip_high: how far above 1 the ratio may count, above 0.
        dual_clip: the largest ratio that counts where A < 0, above 1; null: no cap.
        delta: the largest ratio before it is compared with the clipped ratio, above 0; null: no cap.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: ppo_clip, clip: 0.2, clip_high: 0.28}}
    """
    advantage, rho = advantages.values, ratio_of(logprobs, old_logprobs, loss_mask, level)
    clipped = rho.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    free = rho if delta is None else rho.clamp(max=delta)
    losses = torch.maximum(-advantage * free, -advantage * clipped)
    if dual_clip is not None:
        losses = torch.where(advantage < 0, torch.minimum(losses, -advantage * dual_clip), losses)
    return logprobs.like(losses)


@op(assumes=("behaviour_logprobs",))
def decoupled_ppo(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    rollout_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    clip: PositiveFloat = 0.2,
    clip_high: PositiveFloat | None = None,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
    delta: PositiveFloat | None = None,
    cap: PositiveFloat | None = None,
) -> float32[samples, tokens]:
    """PPO on rows of older weights: clipped around the current ones, weighted (AReaL, arXiv 2505.24298).

    w max(-A rho, -A clip(rho, 1 - clip, 1 + clip_high)), rho = exp(clamp(logprobs - old_logprobs, -20, 20)),
    w = exp(clamp(old_logprobs - rollout_logprobs, -20, 20)), at most ``cap``. The policy from which an update
    starts bounds its steps (``old_logprobs``, the proximal policy); the policy that sampled
    (``rollout_logprobs``, the behaviour policy) only decides the weight of a row. First published in arXiv
    2110.00641.

    Attributes:
        level: which ratio rho is: token, sequence or product, as in ppo_clip.
        clip: how far below 1 the ratio may count, above 0; above 1 too unless ``clip_high`` is given.
        clip_high: how far above 1 the ratio may count, above 0.
        dual_clip: as in ppo_clip; null: no cap, as in the paper.
        delta: as in ppo_clip; null: no cap.
        cap: the largest weight w of a token, above 0; null: no cap, as in the paper.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: decoupled_ppo, clip: 0.2, cap: 2.0}}
    """
    weight = ratio(old_logprobs.values, rollout_logprobs.values).clamp(max=cap or math.inf)
    losses = ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        level=level,
        clip=clip,
        clip_high=clip_high,
        dual_clip=dual_clip,
        delta=delta,
    )
    return logprobs.like(weight * losses.values)


@op(assumes=("sampling_logprobs",))
def decoupled_ppo_approx(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    staleness: PositiveFloat = 1.0,
    clip: PositiveFloat = 0.2,
    clip_high: PositiveFloat | None = None,
    cap: PositiveFloat | None = None,
) -> float32[samples, tokens]:
    """The loss of decoupled_ppo without a forward pass for the proximal policy (A-3PO, arXiv 2512.06547).

    The log-probs of the weights from which an update starts lie between those of the weights that sampled,
    ``staleness`` updates older, and those that it produces, one newer: p = old_logprobs + a (sg(logprobs) -
    old_logprobs), a = ``staleness`` / (``staleness`` + 1), sg the stop of gradients. The loss is that of
    decoupled_ppo with p in place of ``old_logprobs``, and ``old_logprobs`` in place of ``rollout_logprobs``.

    Attributes:
        level: which ratio rho is: token, sequence or product, as in ppo_clip.
        staleness: how many updates older the weights that sampled are than those from which an update starts,
            above 0: the graph's schedule.buffer.staleness.
        clip: how far below 1 the ratio may count, above 0; above 1 too unless ``clip_high`` is given.
        clip_high: how far above 1 the ratio may count, above 0.
        cap: the largest weight of a token, above 0; null: no cap.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: decoupled_ppo_approx, staleness: 1}}
    """
    between = logprobs.like(proximal(logprobs.values.detach(), old_logprobs.values, staleness))
    return decoupled_ppo(
        logprobs,
        between,
        old_logprobs,
        advantages,
        loss_mask,
        level=level,
        clip=clip,
        clip_high=clip_high,
        cap=cap,
    )


def proximal(now: torch.Tensor, sampled: torch.Tensor, staleness: float) -> torch.Tensor:
    """Return the log-probs that ``decoupled_ppo_approx`` clips around, in nats, of the shape of both."""
    return torch.lerp(sampled, now, staleness / (staleness + 1))


def sft(logprobs: float32[samples, tokens]) -> float32[samples, tokens]:
    """Supervised fine-tuning: the negative log-likelihood -logprobs of each token in the loss mask.

    Maximum likelihood, in nats; the stage before RL in InstructGPT (arXiv 2203.02155).

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: sft}}
    """
    return logprobs.like(-logprobs.values)


@op(assumes=("on_policy",))
def reinforce(
    logprobs: float32[samples, tokens], advantages: float32[samples, tokens]
) -> float32[samples, tokens]:
    """The score-function policy gradient: -A logprobs (Williams 1992, doi 10.1007/BF00992696).

    It does not correct for staleness: the samples must come from the weights that are updated.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: reinforce}}
    """
    return logprobs.like(-advantages.values * logprobs.values)


@op(assumes=("sampling_logprobs",))
def cispo(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    clip: PositiveFloat = 1.0,
    clip_high: PositiveFloat = 0.2,
    cap: PositiveFloat | None = None,
) -> float32[samples, tokens]:
    """Clipped importance weights (CISPO, from MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    -sg(clip(rho, 1 - clip, 1 + clip_high)) A logprobs, sg the stop of gradients, rho =
    exp(clamp(logprobs - old_logprobs, -20, 20)). The clip bounds a token's weight but keeps its gradient,
    while the clip of ppo_clip removes the gradient. With ``clip: 1`` there is no lower bound, as in the
    paper. ``cap`` gives the upper bound itself, which may then be 1 or less, like TRL's epsilon_high:
    clip(rho, low, cap) = min(max(rho, low), cap).

    Attributes:
        level: which ratio rho is: token, sequence or product, as in ppo_clip.
        clip: how far below 1 the weight may go, above 0; 1: no lower bound.
        clip_high: how far above 1 the weight may go, above 0; ignored if ``cap`` is given.
        cap: the largest weight, above 0; null: 1 + clip_high.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: cispo, clip_high: 0.2}}
    """
    most = 1 + clip_high if cap is None else cap
    fixed = logprobs.like(logprobs.values.detach())
    weight = ratio_of(fixed, old_logprobs, loss_mask, level).clamp(1 - clip, most)
    return logprobs.like(-weight * advantages.values * logprobs.values)


@op(assumes=("sampling_logprobs",))
def sapo(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens] | None = None,
    *,
    level: RatioLevel = "token",
    tau: PositiveFloat = 1.0,
    tau_negative: PositiveFloat = 1.05,
) -> float32[samples, tokens]:
    """Soft adaptive policy optimisation (SAPO, arXiv 2511.20347): a smooth gate in place of a clip.

    -A sigmoid(t (rho - 1)) 4 / t, t = ``tau`` where A > 0 and ``tau_negative`` elsewhere, rho =
    exp(clamp(logprobs - old_logprobs, -20, 20)). At rho = 1 its gradient is that of -A rho; it fades as rho
    moves away from 1, faster for larger t.

    Attributes:
        level: which ratio rho is: token, sequence or product, as in ppo_clip.
        tau: how fast the gradient fades where A > 0, above 0.
        tau_negative: how fast it fades where A <= 0, above 0.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: sapo}, aggregate: seq-mean-token-mean}
    """
    advantage, rho = advantages.values, ratio_of(logprobs, old_logprobs, loss_mask, level)
    steepness = torch.where(advantage > 0, tau, tau_negative).to(rho.dtype)
    return logprobs.like(-advantage * torch.sigmoid(steepness * (rho - 1)) * 4 / steepness)


@op(assumes=("sampling_logprobs",))
def dro(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    *,
    beta: PositiveFloat = 0.1,
) -> float32[samples, tokens]:
    """Direct reward optimisation (DRO, arXiv 2405.19107): no ratio, but a square that limits the gradient.

    -(A logprobs - beta / 2 (logprobs - old_logprobs)^2), for each token, as in verl. The gradient is that of
    -A logprobs while the policy has not moved, and 0 once it has moved by A / beta nats.

    Attributes:
        beta: twice the cost of a squared nat, in units of the advantage, above 0.

    Example:
        update_policy: {op: update.policy, model: policy, loss: {kind: dro, beta: 0.1}}
    """
    moved = logprobs.values - old_logprobs.values
    return logprobs.like(-advantages.values * logprobs.values + beta / 2 * moved.square())


@op(assumes=("sampling_logprobs",))
def fipo(
    logprobs: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    clip: PositiveFloat = 0.2,
    clip_high: PositiveFloat | None = None,
    half_life: PositiveFloat = 32.0,
    less: Annotated[float, Field(ge=0, le=1)] = 0.0,
    more: NonNegativeFloat = 0.2,
    limit: Annotated[float, Field(gt=1)] = 10.0,
) -> float32[samples, tokens]:
    """PPO's clipped loss, with each token weighted by what followed it (FIPO, arXiv 2603.19835).

    ppo_clip with the advantages f_t A_t and ``dual_clip: limit``; f_t = sg(clip(exp(F_t), 1 - less, 1 +
    more)), F_t = sum_{k >= t} 2^(-(k - t) / half_life) d_k, d = logprobs - old_logprobs, 0 where rho_k =
    exp(d_k) is above ``limit``. Only tokens in the loss mask are counted; sg is the stop of gradients. If an
    update has made the rest of a response more likely, the token before it counts for more. In an update's
    first optimizer step d is 0 and f is 1, so use several.

    Attributes:
        clip: how far below 1 the ratio may count, above 0; above 1 too unless ``clip_high`` is given.
        clip_high: how far above 1 the ratio may count, above 0.
        half_life: the distance in tokens at which a later token counts half, above 0.
        less: how far below 1 a token's weight may go, 0 to 1.
        more: how far above 1 a token's weight may go, at least 0.
        limit: a token with a ratio above this does not affect the weights of tokens before it; also the
            largest ratio that counts where A < 0; above 1.

    Example:
        update_policy: {op: update.policy, model: policy, minibatches: 4, loss: {kind: fipo, half_life: 32}}
    """
    moved = logprobs.values.detach() - old_logprobs.values
    heard = loss_mask.like(torch.where(moved > math.log(limit), 0, moved)).compact(loss_mask)
    weight = torch.ones_like(moved)
    heard_later = heard.discounted(2 ** (-1 / half_life)).exp()
    weight[loss_mask.values] = heard_later.clamp(1 - less, 1 + more).to(moved.dtype)
    weighed = advantages.like(weight * advantages.values)
    return ppo_clip(logprobs, old_logprobs, weighed, clip=clip, clip_high=clip_high, dual_clip=limit)


def kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KlKind) -> torch.Tensor:
    """Estimate KL(policy || reference) from the tokens that the policy drew: nats, ``[all tokens]``.

    With d = logprobs - ref_logprobs: ``k1`` d; ``k2`` d^2 / 2; ``k3`` exp(-d) + d - 1, exponent clamped to
    +-20 and value to +-10; ``abs`` |d|. ``k1`` and ``k3`` are unbiased (Schulman 2020,
    http://joschu.net/blog/kl-approx.html); ``k3`` is GRPO's (arXiv 2402.03300).
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "abs":
        return difference.abs()
    inverse = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (inverse.exp() - inverse - 1).clamp(-K3_LIMIT, K3_LIMIT)


def aggregate(
    losses: Ragged, loss_mask: Ragged, totals: Totals, how: PolicyAggregation, norm: float | None = None
) -> torch.Tensor:
    """Return a micro-batch's part of the mini-batch's loss, a scalar; parts of all ranks add up.

    ``token-mean``: sum over masked tokens / tokens of the mini-batch. ``token-sum``: the sum.
    ``seq-mean-token-sum``: the sum / sequences of the mini-batch. ``seq-mean-token-mean``: each sequence's
    mean over its masked tokens, summed, / sequences of the mini-batch; a sequence with none adds 0.
    ``seq-mean-token-sum-norm``: seq-mean-token-sum / ``norm``, a constant in tokens, above 0 (Dr. GRPO, arXiv
    2503.20783). ``totals`` counts the tokens and sequences of the whole mini-batch, over all ranks;
    ``losses`` and ``loss_mask`` are the micro-batch's. A sequence of several rows, a sample's segments,
    counts once: its mean is over the tokens of all of them, which ``totals.lengths`` has.
    """
    masked = torch.where(loss_mask.values, losses.values, 0)
    if how == "token-sum":
        return masked.sum()
    if how == "token-mean":
        return masked.sum() / max(totals.tokens, 1)
    if how == "seq-mean-token-mean":
        tokens = loss_mask.sum() if totals.lengths is None else totals.lengths
        masked = masked / loss_mask.spread(tokens.clamp(min=1)).values
    if how == "seq-mean-token-sum-norm":
        assert norm is not None, "the compiler refuses a graph without"
        masked = masked / norm
    return masked.sum() / max(totals.sequences, 1)
