"""Log-probs of the tokens that a policy wrote, under any model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.engines import TrainEngine
from rlgraph.op import op
from rlgraph.types import boolean, float32, int64, samples, tokens


@op()
def logprobs(
    model: TrainEngine,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    temperature: Annotated[float, Field(gt=0)] | None = None,
    keep: bool = False,
) -> float32[samples, tokens]:
    """Log-prob of each token that the policy wrote, under a train engine's weights.

    log softmax(logits / temperature)[token] at the position before the token, in nats; 0 where ``loss_mask``
    is false. Name the node ``old_logprobs`` for the policy before its update (PPO, arXiv 1707.06347), and
    ``ref_logprobs`` for a frozen reference.

    Attributes:
        temperature: what the logits are divided by, above 0; null: the rollout's, so that both engines speak
            of the same distribution.
        keep: compute it also where the compiler could leave it out, because the update makes one optimizer
            step from the same weights; for a look at how far the engines are apart.

    Example:
        old_logprobs: {op: logprobs, model: policy}
    """
    return model.logprobs(tokens, loss_mask, 1.0 if temperature is None else temperature)
