"""A reward model: a sequence classifier's score of a whole sequence."""

from __future__ import annotations

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import SPREAD, Context, TrainEngine, float32, int64, op, samples, tokens


@op(head="value")
def reward_model(ctx: Context, model: TrainEngine, tokens: int64[samples, tokens]) -> float32[samples]:
    """A reward model's score of prompt and response together (arXiv 2203.02155).

    The output of its value head at the last token of the sequence, that token read. The model needs ``head:
    value``, a head in its folder (one that is missing is drawn at random), and the policy's tokenizer and
    chat template: it reads the very ids that the policy read and wrote. Records ``reward/mean``.

    Example:
        rewards: {op: reward.model, model: reward}
    """
    closed, last = behind_the_end(tokens)
    scores = model.values(closed, last).values[last.values]
    ctx.record("reward/", scores, kind=SPREAD)
    return scores


def behind_the_end(tokens: Ragged) -> tuple[Ragged, Ragged]:
    """Return rows with one more token each, and a loss mask that is true on it alone.

    An engine's value of a token is what the model says before it reads that token. So that of one behind the
    end, which may be any, is what it says of the whole row.
    """
    offsets = offsets_of(tokens.lengths + 1)
    last = torch.zeros(int(offsets[-1]), dtype=torch.bool, device=tokens.values.device)
    last[offsets[1:] - 1] = True
    ids = torch.zeros(len(last), dtype=torch.int64, device=tokens.values.device)
    ids[~last] = tokens.values
    return Ragged(ids, offsets), Ragged(last, offsets)
