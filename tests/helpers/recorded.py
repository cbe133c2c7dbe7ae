"""What an op has recorded, for tests that call its body."""

from __future__ import annotations

from rlgraph.ops import Context


def means(ctx: Context) -> dict[str, tuple[float, float]]:
    """Total and count of each metric that is a mean or a share."""
    parts = {name: one.parts for name, one in ctx.metrics.items() if one.kind in ("mean", "share")}
    return {name: (float(one["total"]), one["count"]) for name, one in parts.items()}
