"""Learning from pairs of a chosen and a rejected response.

The loss of a pair couples two sequences, which may lie on different ranks and in different micro-batches. Its
gradient does so through one number per pair alone, and that number is known before the update: so it is a
column, and what is left of the loss is a sum over tokens. Shapes: ``[pairs]`` is one entry per value of
``group``.
"""

from __future__ import annotations

from pydantic import PositiveFloat

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, boolean, float32, int64, op, samples, tokens


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
) -> float32[samples, tokens]:
    """Write the weight of each token's log-prob in the gradient of DPO (arXiv 2305.18290).

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
    sign = chosen.double() * 2 - 1
    margins, members, whole = _margins(old_logprobs, ref_logprobs, loss_mask, sign, group)
    margins = beta * margins
    ctx.record("loss", -torch.nn.functional.logsigmoid(margins[whole]))
    ctx.record("margin", margins[whole])
    ctx.record("accuracy", margins[whole] > 0, kind="share")
    weights = sign * (2 * beta * torch.sigmoid(-margins) * whole)[members]
    return loss_mask.like((loss_mask.spread(weights).values * loss_mask.values).float())


@op(assumes=("one_step",))
def dpo(logprobs: float32[samples, tokens], preference: float32[samples, tokens]) -> float32[samples, tokens]:
    """Direct preference optimisation (DPO, arXiv 2305.18290), as a sum over tokens: -w logprobs.

    w is the column of preference.dpo, from the weights before the update. With ``aggregate:
    seq-mean-token-sum`` the gradient is that of DPO's mean over pairs. It is so for one optimizer step an
    iteration, and more are refused: w would not fall as the margin grows, and the loss have no minimum. The
    value is not DPO's loss, which preference.dpo records.

    Example:
        update: {op: update.policy, model: policy, loss: {kind: dpo}, aggregate: seq-mean-token-sum}
    """
    return logprobs.like(-preference.values * logprobs.values)


def _margins(
    logprobs: Ragged, ref_logprobs: Ragged, loss_mask: Ragged, sign: torch.Tensor, group: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (lp_w - ref_w) - (lp_l - ref_l) ``[pairs]``, each sample's pair ``[samples]``, whole pairs."""
    _, members, count = torch.unique(group, return_inverse=True, return_counts=True)
    moved = torch.where(loss_mask.values, logprobs.values.double() - ref_logprobs.values.double(), 0)
    sums = torch.zeros(len(count), dtype=torch.float64)
    margins = sums.index_add(0, members, sign * loss_mask.like(moved).sum())
    return margins, members, (count == 2) & (sums.index_add(0, members, sign) == 0)
