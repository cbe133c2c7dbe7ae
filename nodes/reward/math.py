"""A reward for a mathematically equal answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlgraph.engines import Context
from rlgraph.op import op
from rlgraph.types import float32, samples, text


@op()
def math(
    ctx: Context,
    responses: text[samples],
    answer: text[samples],
    *,
    timeout: Annotated[float, Field(gt=0)] = 5.0,
) -> float32[samples]:
    r"""1.0 where the response's last answer equals the reference as mathematics, else 0.0 (Math-Verify).

    ``\boxed{...}`` is preferred, then LaTeX between dollars, then the last plain number; ``1/2``, ``0.5`` and
    ``\frac{1}{2}`` are equal. A response without an answer in it, or that takes longer than ``timeout``,
    scores 0. Records ``reward/mean`` and ``reward/unparsed``, the fraction of such responses.

    Attributes:
        timeout: seconds that one response may take.

    Example:
        rewards: {op: reward.math}
    """
    import torch

    from rlgraph.nodes.reward.verifier import verifier

    verdicts = verifier().judge(list(zip(responses, answer, strict=True)), timeout)
    scores = [float(verdict is True) for verdict in verdicts]
    ctx.record("reward/mean", scores)
    ctx.record("reward/unparsed", [float(verdict is None) for verdict in verdicts])
    return torch.tensor(scores, dtype=torch.float32)
