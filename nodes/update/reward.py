"""The update of a reward model: a value head's score of whole sequences."""

from __future__ import annotations

from rlgraph.nodes.loss.policy import aggregate
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import behind_the_end
from rlgraph.nodes.update.update import Metrics, rows_of
from rlgraph.ops import Batch, Context, Metric, Totals, TrainEngine, float32, int64, op, samples, tokens


@op(updates=True, head="value")
def reward(
    model: TrainEngine, ctx: Context, tokens: int64[samples, tokens], preference: float32[samples]
) -> None:
    """Train a reward model in one optimizer step; writes its next version.

    L is the mean over sequences of -w r, where r is the value head's score of a whole sequence, as for
    reward.model, and w is ``preference``, from the scores before the update: with the column of
    preference.reward the gradient is that of InstructGPT's loss (arXiv 2203.02155, eq. 1). The value of L is
    not that loss, which preference.reward records. Records ``loss``, ``grad_norm``, ``lr`` and ``score``
    (mean per sequence).

    Example:
        update_reward: {op: update.reward, model: reward}
    """
    closed, end_mask = behind_the_end(tokens)
    columns = {"tokens": closed, "loss_mask": end_mask, "preference": preference}
    model.update(columns, _objective, *rows_of(ctx), record=ctx.add)


def _objective(batch: Batch, totals: Totals) -> tuple[torch.Tensor, Metrics]:
    end_mask, scores = batch["loss_mask"], batch["new_values"]
    losses = end_mask.like(-end_mask.spread(batch["preference"]).values * scores.values)
    total = torch.where(end_mask.values, scores.values.detach(), 0).double().sum()
    score = Metric("mean", "samples", {"count": end_mask.values.sum(), "total": total})
    return aggregate(losses, end_mask, totals, "seq-mean-token-sum"), {"score": score}
