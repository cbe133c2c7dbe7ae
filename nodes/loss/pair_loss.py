"""Losses of pairs, which ``losses`` of preference.dpo names: from the scores of both responses, one per pair.

Each function takes the scores of all pairs and returns a tensor ``[pairs]`` in float64; the gradient goes
through the scores to each token. b is ``beta``, r_w and r_l are the scores of the chosen and the rejected
response (of the reverse KL their log ratios to the reference), m = b (r_w - r_l). Log ratios are sums over
the responses. A loss of your own is a function with the same signature, in a file: ``my_losses.py:name``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.support.lazy import torch

PerPair = (
    Any  # torch.Tensor [pairs]; the name is not torch's, as a signature is read where torch is not loaded
)
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
EXPONENT_LIMIT = 80.0  # exp of more is not a float32


@dataclass(frozen=True)
class PairScores:
    """The scores of all pairs, each a tensor ``[pairs]`` in float64 through which the gradient goes.

    ``chosen`` and ``rejected`` are scores; the ``_ratio`` their log ratios to the reference, from which the
    divergence makes scores; the ``_logprob`` and ``_ref`` the two sides of those; the ``_tokens`` lengths;
    ``chosen_likelihood`` the log-prob of the chosen response in which each token counts alike.
    """

    beta: float
    chosen: PerPair
    rejected: PerPair
    chosen_ratio: PerPair
    rejected_ratio: PerPair
    chosen_logprob: PerPair
    rejected_logprob: PerPair
    chosen_ref: PerPair
    rejected_ref: PerPair
    chosen_tokens: PerPair
    rejected_tokens: PerPair
    chosen_likelihood: PerPair

    def difference(self, mean: bool = False) -> PerPair:
        """Return r_w - r_l; with ``mean`` each divided by the tokens of its response."""
        if mean:
            return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens
        return self.chosen - self.rejected


def sigmoid(
    pairs: PairScores, *, smoothing: Smoothing = 0.0, mean: bool = False, margin: NonNegativeFloat = 0.0
) -> PerPair:
    """DPO's loss (arXiv 2305.18290), and its variants with smoothed labels, mean log-probs and a margin.

    -(1 - e) log sigmoid(m - margin) - e log sigmoid(margin - m), e = ``smoothing``: above 0 it is
    conservative DPO, for labels of which a share e is wrong. With ``mean``, m is computed from scores per
    token (arXiv 2411.15124). Without a reference that is SimPO (arXiv 2405.14734), or CPO without ``mean``
    (arXiv 2401.08417).

    Attributes:
        smoothing: the share of labels that is assumed to be wrong, at least 0 and below 0.5.
        mean: whether to divide a score by the number of tokens in its response.
        margin: by how much the chosen response should score higher, at least 0.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: sigmoid, smoothing: 0.1}}}
    """
    logits = pairs.beta * pairs.difference(mean) - margin
    return _smoothed(logits, smoothing)


def hinge(pairs: PairScores) -> PerPair:
    """The hinge loss of SLiC, on DPO's margin (arXiv 2305.10425, 2309.06657): max(0, 1 - m).

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: hinge}}}
    """
    return torch.relu(1 - pairs.beta * pairs.difference())


def ipo(pairs: PairScores, *, mean: bool = True) -> PerPair:
    """IPO (arXiv 2310.12036, eq. 17): (r_w - r_l - 1 / (2 b))^2, a margin to be met but not exceeded.

    Attributes:
        mean: whether to divide a score by the number of tokens in its response, as the authors and TRL do;
            the paper's text has the sum.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: ipo}}}
    """
    return (pairs.difference(mean) - 1 / (2 * pairs.beta)).square()


def robust(pairs: PairScores, *, smoothing: Smoothing = 0.1) -> PerPair:
    """Robust DPO (arXiv 2403.00409): unbiased if a share e of the labels is flipped.

    (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e), e = ``smoothing``.

    Attributes:
        smoothing: the share of labels that is flipped, at least 0 and below 0.5.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: robust, smoothing: 0.1}}}
    """
    logits = pairs.beta * pairs.difference()
    clean = -(1 - smoothing) * torch.nn.functional.logsigmoid(logits)
    flipped = -smoothing * torch.nn.functional.logsigmoid(-logits)
    return (clean - flipped) / (1 - 2 * smoothing)


def nca(pairs: PairScores) -> PerPair:
    """Noise contrastive alignment of pairs (arXiv 2402.05369): each response against the reference.

    -log sigmoid(b r_w) - 1/2 log sigmoid(-b r_w) - 1/2 log sigmoid(-b r_l), r the log ratios. It keeps the
    likelihood of the chosen response from falling.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: nca}}}
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    won, lost = pairs.beta * pairs.chosen_ratio, pairs.beta * pairs.rejected_ratio
    return -log_sigmoid(won) - 0.5 * log_sigmoid(-won) - 0.5 * log_sigmoid(-lost)


def bco(pairs: PairScores) -> PerPair:
    """Binary classifier optimisation of pairs (arXiv 2404.04656), without its shift of rewards.

    -log sigmoid(b r_w) - log sigmoid(-b r_l), r the log ratios.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: bco}}}
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    return -log_sigmoid(pairs.beta * pairs.chosen_ratio) - log_sigmoid(-pairs.beta * pairs.rejected_ratio)


def sppo(pairs: PairScores) -> PerPair:
    """Self-play preference optimisation with hard labels (arXiv 2405.00675, eq. 4.7).

    (r_w - 1 / (2 b))^2 + (r_l + 1 / (2 b))^2, r the log ratios: the chosen response is assumed to win always.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: sppo}}}
    """
    half = 0.5 / pairs.beta
    return (pairs.chosen_ratio - half).square() + (pairs.rejected_ratio + half).square()


def aot(pairs: PairScores, *, smoothing: Smoothing = 0.0) -> PerPair:
    """Alignment by optimal transport (arXiv 2406.05882): the policy's margins dominate the reference's.

    DPO's loss of the k-th smallest log pi_w - log pi_l minus the k-th smallest of the reference, over all
    pairs of the batch.

    Attributes:
        smoothing: the share of labels that is assumed to be wrong, at least 0 and below 0.5.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: aot}}}
    """
    policy = (pairs.chosen_logprob - pairs.rejected_logprob).sort().values
    reference = (pairs.chosen_ref - pairs.rejected_ref).sort().values
    return _smoothed(pairs.beta * (policy - reference), smoothing)


def aot_unpaired(pairs: PairScores, *, smoothing: Smoothing = 0.0) -> PerPair:
    """Alignment by optimal transport for responses that are not paired (arXiv 2406.05882).

    DPO's loss of the k-th smallest log ratio of chosen responses minus the k-th smallest of rejected ones.

    Attributes:
        smoothing: the share of labels that is assumed to be wrong, at least 0 and below 0.5.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: aot_unpaired}}}
    """
    chosen, rejected = pairs.chosen_ratio.sort().values, pairs.rejected_ratio.sort().values
    return _smoothed(pairs.beta * (chosen - rejected), smoothing)


def apo_zero(pairs: PairScores) -> PerPair:
    """Anchored preference optimisation if chosen responses are good (arXiv 2408.06266, eq. 7).

    1 - sigmoid(b r_w) + sigmoid(b r_l), r the log ratios: the chosen response becomes more likely, the
    rejected one less. It is for chosen responses that are better than the model's own.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: apo_zero}}}
    """
    return (
        1 - torch.sigmoid(pairs.beta * pairs.chosen_ratio) + torch.sigmoid(pairs.beta * pairs.rejected_ratio)
    )


def apo_down(pairs: PairScores) -> PerPair:
    """Anchored preference optimisation if no response is good (arXiv 2408.06266, eq. 8).

    sigmoid(b r_w) + 1 - sigmoid(b (r_w - r_l)), r the log ratios: both become less likely, the rejected one
    more so. It is for chosen responses that are worse than the model's own.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: apo_down}}}
    """
    apart = pairs.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    return torch.sigmoid(pairs.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(apart)


def exo(pairs: PairScores, *, smoothing: Annotated[float, Field(gt=0, lt=0.5)] = 1e-3) -> PerPair:
    """Efficient exact optimisation of pairs (arXiv 2402.00856, eq. 16): a reverse KL of choices.

    q_w (log q_w - log(1 - e)) + q_l (log q_l - log e), q_w = sigmoid(m), q_l = sigmoid(-m), e =
    ``smoothing``.

    Attributes:
        smoothing: the share of labels that is assumed to be wrong, above 0 and below 0.5.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: exo}}}
    """
    log_sigmoid = torch.nn.functional.logsigmoid
    logits = pairs.beta * pairs.difference()
    won = torch.sigmoid(logits) * (log_sigmoid(logits) - math.log1p(-smoothing))
    lost = torch.sigmoid(-logits) * (log_sigmoid(-logits) - math.log(smoothing))
    return won + lost


def discopop(pairs: PairScores, *, tau: PositiveFloat = 0.05) -> PerPair:
    """DiscoPOP, a loss that a language model discovered (arXiv 2406.08414, eq. 5).

    (1 - s) (-log sigmoid(m)) + s exp(-m), s = sigmoid(m / tau).

    Attributes:
        tau: how gradually it changes from one term to the other, above 0.

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: discopop}}}
    """
    logits = pairs.beta * pairs.difference()
    share = torch.sigmoid(logits / tau)
    exponential = (-logits).clamp(max=EXPONENT_LIMIT).exp()
    return -torch.nn.functional.logsigmoid(logits) * (1 - share) + exponential * share


def likelihood(pairs: PairScores) -> PerPair:
    """Fine-tuning on the chosen responses: the mean of -log p over their tokens in the whole batch.

    Added to another loss it is the second term of RPO (arXiv 2404.19733), CPO (2401.08417) and MPO
    (2411.10442).

    Example:
        preference: {op: preference.dpo, losses: {dpo: {kind: sigmoid}, fit: {kind: likelihood}}}
    """
    mean = -pairs.chosen_likelihood.sum() / pairs.chosen_tokens.sum()
    return mean.expand(len(pairs.chosen_likelihood))


def alphapo(
    pairs: PairScores, *, alpha: float = 0.25, margin: NonNegativeFloat = 0.0, smoothing: Smoothing = 0.0
) -> PerPair:
    """AlphaPO (arXiv 2501.03884): SimPO with a reward that is a power of the mean probability.

    DPO's loss of b (s_w - s_l) - margin, s = (1 - exp(-a l)) / a, l a response's mean log-prob per token. It
    uses no reference. As a goes to 0 it becomes SimPO.

    Attributes:
        alpha: a, not 0: above 0, unlikely responses count for more; below 0, for less.
        margin: by how much the chosen response should score higher, at least 0.
        smoothing: the share of labels that is assumed to be wrong, at least 0 and below 0.5.

    Example:
        preference: {op: preference.dpo, reference: false, beta: 2.5, losses: {dpo: {kind: alphapo}}}
    """
    chosen = pairs.chosen_logprob / pairs.chosen_tokens
    rejected = pairs.rejected_logprob / pairs.rejected_tokens
    logits = pairs.beta * (_power(chosen, -alpha) - _power(rejected, -alpha)) - margin
    return _smoothed(logits, smoothing)


def scores_of(ratio: PerPair, divergence: str, alpha: float) -> PerPair:
    """Return f'(pi / ref) of log ratios, without its constant (f-DPO, arXiv 2309.16240).

    ``reverse_kl`` log t, ``forward_kl`` 1 - 1 / t, ``js`` log(2 t / (1 + t)), ``alpha`` (t^(a - 1) - 1) /
    (a - 1), t = exp(ratio).
    """
    if divergence == "forward_kl":
        return 1 - (-ratio).clamp(max=EXPONENT_LIMIT).exp()
    if divergence == "js":
        return math.log(2) + torch.nn.functional.logsigmoid(ratio)
    if divergence == "alpha":
        return _power(ratio, alpha - 1)
    return ratio


def _power(log_value: PerPair, power: float) -> PerPair:
    """Return (t^power - 1) / power of t = exp(log_value), and its limit log t where ``power`` is 0."""
    if abs(power) < 1e-6:
        return log_value
    return (power * log_value).clamp(max=EXPONENT_LIMIT).expm1() / power


def _smoothed(logits: PerPair, smoothing: float) -> PerPair:
    """Return -(1 - e) log sigmoid(logits) - e log sigmoid(-logits)."""
    log_sigmoid = torch.nn.functional.logsigmoid
    return -log_sigmoid(logits) * (1 - smoothing) - log_sigmoid(-logits) * smoothing
