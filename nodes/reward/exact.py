"""A reward for giving the answer and nothing else."""

from __future__ import annotations

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, float32, op, samples, text


@op()
def exact(ctx: Context, responses: text[samples], answer: text[samples]) -> float32[samples]:
    """1.0 where the response is the answer, white space at both ends aside, else 0.0.

    Records ``reward/mean``.

    Example:
        rewards: {op: reward.exact}
    """
    scores = [
        float(response.strip() == wanted.strip()) for response, wanted in zip(responses, answer, strict=True)
    ]
    ctx.record("reward/mean", scores)
    return torch.tensor(scores, dtype=torch.float32)
