"""Advantages of rewards that are given step by step, compared with those of the group."""

from pydantic import PositiveFloat

from rlgraph.nodes.advantage.gae import scatter
from rlgraph.nodes.advantage.group import EPS, centred_by_group, deviation
from rlgraph.ops import boolean, float32, int64, op, samples, tokens


@op(rows="group", assumes=("groups",), when=EPS)
def process(
    rewards: float32[samples, tokens],
    steps: boolean[samples, tokens] | None,
    group: int64[samples],
    loss_mask: boolean[samples, tokens],
    *,
    scale: bool = True,
    eps: PositiveFloat = 1e-6,
) -> float32[samples, tokens]:
    """GRPO with process supervision: the sum of normalised rewards from a token on (arXiv 2402.03300, 4.1.3).

    A_t = sum over the steps that end at k >= t of (r_k - mu) / (sigma + eps), mu and sigma the mean and the
    unbiased standard deviation of the rewards of all steps of a group. A step ends where ``steps``, written
    by ``mask.steps``, is true; without that column, each token in ``loss_mask`` is a step. A group with one
    step has mu = 0 and sigma = 1. Without ``scale``, nothing is divided. 0 outside ``loss_mask``.

    Attributes:
        scale: whether to divide by the standard deviation.
        eps: added to the standard deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.process, in: {rewards: step_rewards}}
    """
    ends = loss_mask.values if steps is None else loss_mask.values & steps.values
    each = rewards.values[ends]
    centred, members, count = centred_by_group(each, group[rewards.row_of[ends]])
    if scale:
        centred = centred / (deviation(centred, members, count, alone=1.0)[members] + eps)
    normalised = scatter(centred, loss_mask.like(ends)).compact(loss_mask)
    return scatter(normalised.discounted(1.0), loss_mask)
