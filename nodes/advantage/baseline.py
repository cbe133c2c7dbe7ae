"""Advantages over a baseline for each prompt or token: a greedy response, the samples of a group, or
those of earlier iterations.

Sums run in float64, so that the order of rows doesn't show in float32.
"""

from typing import Annotated

from pydantic import Field

from rlgraph.nodes.advantage.gae import EPSILON, scatter
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.splitmix import text_key
from rlgraph.ops import Context, boolean, float32, int64, op, samples, text, tokens


@op(assumes=("greedy_baseline",))
def remax(
    rewards: float32[samples, tokens], greedy_rewards: float32[samples], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """Return-to-go minus the reward of the greedy sample for the same prompt (ReMax, arXiv 2310.10505).

    A_t = sum of r_k over k >= t, minus ``greedy_rewards``: a baseline that depends only on the prompt, so it
    adds no bias. ``greedy_rewards`` is the reward of a second rollout of the same prompts with ``n: 1,
    temperature: 0``: one row per prompt, repeated for its samples. Returns pass through tokens outside the
    loss mask (tool output), where A is 0 and rewards don't count.

    Example:
        advantages: {op: advantage.remax, in: {rewards: shaped}}
    """
    earned = rewards.compact(loss_mask)
    return scatter(earned.discounted(1.0) - earned.spread(greedy_rewards.double()).values, loss_mask)


@op(rows="group", assumes=("groups",))
def optimal_token_baseline(
    rewards: float32[samples, tokens],
    old_logprobs: float32[samples, tokens],
    squares: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    group: int64[samples],
) -> float32[samples, tokens]:
    """Return-to-go minus the baseline of least variance at each token (OTB, arXiv 2602.07078).

    A_t = G_t - sum(G_t W_t) / (sum W_t + 1e-8), over the samples of a prompt that wrote a t-th token; G_t is
    the sum of rewards from that token on, and W_t = sum over k <= t of 1 - 2 pi_k + sum_v p_v^2, pi_k = exp
    ``old_logprobs``: an estimate of the squared norm of the gradient up to t from forward probabilities
    alone. Only tokens in the loss mask are counted: others (tool output) are skipped, and A is 0 there. A =
    G_t for a t-th token that no other sample of the group has, and in a group of one.

    Example:
        advantages: {op: advantage.optimal_token_baseline, in: {rewards: shaped}}
    """
    earned = rewards.compact(loss_mask)
    energy = 1 - 2 * old_logprobs.compact(loss_mask).values.exp() + squares.compact(loss_mask).values
    weights = earned.like(energy.clamp(min=0)).so_far()  # rounding makes some of them negative
    to_go = earned.discounted(1.0)
    _, members = torch.unique(group, return_inverse=True)
    width = max(earned.lengths.tolist(), default=0)
    together = earned.spread(members).values * width + earned.place_of  # one number for a group's t-th tokens
    count = torch.bincount(together)
    weighted_return = torch.zeros(len(count), dtype=torch.float64).index_add(0, together, to_go * weights)
    total_weight = torch.zeros(len(count), dtype=torch.float64).index_add(0, together, weights)
    baseline = torch.where(count > 1, weighted_return / (total_weight + EPSILON), 0)
    return scatter(to_go - baseline[together], loss_mask)


@op(rows="all", state="keeps")
def running(
    ctx: Context,
    rewards: float32[samples],
    question: text[samples],
    loss_mask: boolean[samples, tokens],
    *,
    decay: Annotated[float, Field(ge=0, le=1)] = 0.9,
) -> float32[samples, tokens]:
    """Reward minus a running mean over the iterations, kept for each question or for each source.

    A = r - b, where b comes from earlier iterations and so does not depend on r; then b <- ``decay`` b + (1 -
    ``decay``) times the mean r of the question's samples. This gives a single sample per prompt a baseline
    without a critic: that of single-stream policy optimisation (arXiv 2509.13232), with a constant decay. A
    new question starts from the mean over all questions; in the first iteration, from the mean of all its
    samples. Records ``baseline``.

    Attributes:
        decay: how much of a mean is kept in each iteration that has its question or source, 0 to 1.

    Example:
        advantages: {op: advantage.running, in: {question: source}}
    """
    means, now = ctx.state, rewards.double()
    mean_of_all = means.get("", float(now.mean()))
    keys = [*map(text_key, question)]
    baseline = torch.tensor([means.get(key, mean_of_all) for key in keys], dtype=torch.float64)
    members: dict[str, list[int]] = {"": [*range(len(keys))]}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    for key, rows in members.items():
        mean = float(now[rows].mean())
        means[key] = decay * means[key] + (1 - decay) * mean if key in means else mean
    ctx.record("baseline", baseline)
    return scatter(loss_mask.spread(now - baseline).values[loss_mask.values], loss_mask)
