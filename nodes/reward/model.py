"""Reward models: a sequence classifier's score of a whole sequence, or of each token that was written."""

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import behind_the_end
from rlgraph.ops import SPREAD, Context, TrainEngine, boolean, float32, int64, op, samples, tokens


@op(head="value")
def reward_model(ctx: Context, model: TrainEngine, tokens: int64[samples, tokens]) -> float32[samples]:
    """A reward model's score of prompt and response together (arXiv 2203.02155).

    The output of its value head at the last token of the sequence, after reading that token. The model needs
    ``head: value``, a head in its folder (a missing head is initialised at random), and the policy's
    tokenizer and chat template, since it reads exactly the ids that the policy read and wrote. Records
    ``reward/mean``.

    Example:
        rewards: {op: reward.model, model: reward}
    """
    closed, end_mask = behind_the_end(tokens)
    scores = model.values(closed, end_mask).values[end_mask.values]
    ctx.record("reward/", scores, kind=SPREAD)
    return scores


@op(head="value")
def process(
    ctx: Context, model: TrainEngine, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """A process reward model's score of each token that the policy wrote (arXiv 2305.20050, 2312.08935).

    The output of its value head at the token, after reading that token; 0 where ``loss_mask`` is false. The
    score of a step is that of its last token, which advantage.process uses. The model is as for reward.model,
    and trained to score incomplete responses as well. Records ``reward/mean``, over tokens.

    Example:
        step_rewards: {op: reward.process, model: reward}
    """
    closed, end_mask = behind_the_end(tokens)
    places = torch.arange(len(loss_mask.values), device=loss_mask.values.device)
    next_token = places + loss_mask.row_of + 1  # of each token the next one
    wanted = end_mask.like(torch.zeros_like(end_mask.values).index_put((next_token,), loss_mask.values))
    scores = model.values(closed, wanted).values[next_token].to(loss_mask.values.device)
    scores = torch.where(loss_mask.values, scores, 0)
    ctx.record("reward/mean", float(scores.double().sum()), int(loss_mask.values.sum()), over="tokens")
    return loss_mask.like(scores)
