"""Ops of a user that record no metric: rewards, filters, an estimator."""

from typing import NamedTuple

import torch

from rlgraph.ops import boolean, float32, int64, op, samples, text, tokens


class Scored(NamedTuple):
    """Rewards, and the samples that have none."""

    rewards: float32[samples]
    failed: boolean[samples]


class Two(NamedTuple):
    """Two rewards of one op."""

    rewards: float32[samples]
    short: float32[samples]


def _ones(responses: list[str], per: int) -> torch.Tensor:
    return torch.tensor([response.count("1") / per for response in responses], dtype=torch.float32)


@op()
def sometimes(responses: text[samples], group: int64[samples]) -> Scored:
    """The same; samples of prompts with an odd number have no reward."""
    return Scored(_ones(responses, 4) + 7 * (group % 2), group % 2 == 1)


@op()
def never(responses: text[samples]) -> Scored:
    """No sample has a reward."""
    return Scored(torch.zeros(len(responses)), torch.ones(len(responses), dtype=torch.bool))


@op()
def two(responses: text[samples]) -> Two:
    """The same, and 1 for a short response."""
    short = torch.tensor([float(len(response) < 3) for response in responses])
    return Two(_ones(responses, 4), short)


@op()
def each_token(
    responses: text[samples], tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """The same, divided among the tokens of a response."""
    written = loss_mask.sum().clamp(min=1)
    return loss_mask.where_true(_ones(responses, 4) / written)


@op()
def length(loss_mask: boolean[samples, tokens]) -> float32[samples]:
    """Tokens of a response: a number that is not a reward."""
    return loss_mask.sum().float()


@op(filters=True)
def at_least(rewards: float32[samples], *, least: float) -> boolean[samples]:
    """Keep the samples that earn at least ``least``."""
    return rewards >= least


@op(rows="all")
def my_advantage(rewards: float32[samples], loss_mask: boolean[samples, tokens]) -> float32[samples, tokens]:
    """The rewards less their mean."""
    return loss_mask.where_true(rewards - rewards.mean())


@op(rows="all")
def by_token(
    rewards: float32[samples, tokens], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """The rewards of each token as they are."""
    return rewards


@op()
def certain(entropy: float32[samples, tokens], loss_mask: boolean[samples, tokens]) -> float32[samples]:
    """How sure the policy was: less the mean entropy of a response's tokens (RENT, arXiv 2505.22660)."""
    return -(entropy.sum() / loss_mask.sum().clamp(min=1))


@op()
def at_forks(
    logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    entropy: float32[samples, tokens],
    *,
    least: float,
) -> float32[samples, tokens]:
    """-A lp at the tokens whose entropy is at least ``least``, in nats, and 0 at others."""
    losses = -advantages.values * logprobs.values
    return logprobs.like(losses * (entropy.values >= least))


@op()
def sum_of_both(
    first: float32[samples, tokens], second: float32[samples, tokens]
) -> float32[samples, tokens]:
    """The sum of two advantages."""
    return first.like(first.values + second.values)
