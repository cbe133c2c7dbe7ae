"""A reward for a mathematically equal answer."""

from __future__ import annotations

from pydantic import PositiveFloat

from rlgraph.nodes.reward.per_sample import record_late
from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, float32, op, samples, text


@op(beside=True)
def math(
    ctx: Context,
    responses: text[samples],
    answer: text[samples],
    *,
    timeout: PositiveFloat = 5.0,
) -> float32[samples]:
    r"""1.0 where the response's last answer equals the reference as mathematics, else 0.0 (Math-Verify).

    ``\boxed{...}`` is preferred, then LaTeX between dollars, then the last plain number; ``1/2``, ``0.5`` and
    ``\frac{1}{2}`` are equal. A response without an answer in it scores 0, and so does one that takes longer
    than ``timeout``; the first of these is logged. Records ``reward/mean``, and the fractions of such
    responses as ``reward/unparsed`` and ``reward/late``.

    Attributes:
        timeout: seconds that one response may take.

    Example:
        rewards: {op: reward.math}
    """
    from rlgraph.nodes.reward.verifier import verifier

    verdicts = verifier().judge(list(zip(responses, answer, strict=True)), timeout)
    scores = [float(verdict == "right") for verdict in verdicts]
    ctx.record("reward/mean", scores)
    ctx.record("reward/unparsed", [float(verdict == "unparsed") for verdict in verdicts])
    record_late(ctx, [verdict == "late" for verdict in verdicts], responses)
    return torch.tensor(scores, dtype=torch.float32)
