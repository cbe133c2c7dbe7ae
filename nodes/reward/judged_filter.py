"""A filter that drops the samples whose reward failed."""

from __future__ import annotations

from rlgraph.ops import Context, boolean, op, samples


@op(filters=True)
def judged(ctx: Context, failed: boolean[samples]) -> boolean[samples]:
    """Keep the samples whose reward did not fail: how a graph drops the others (``on_error: drop``).

    It may cut groups: what is left of one is a smaller group. Records ``kept``, the fraction of samples that
    stay.

    Example:
        judged: {op: filter.judged}
    """
    ctx.record("kept", (~failed).float())
    return ~failed
