"""A filter of the samples whose reward could not be had."""

from __future__ import annotations

from rlgraph.engines import Context
from rlgraph.op import op
from rlgraph.types import boolean, samples


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
