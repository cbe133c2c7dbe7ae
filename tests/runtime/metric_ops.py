"""A user's ops that record metrics of each kind."""

from rlgraph.ops import Context, float32, op, samples


@op()
def kinds(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    """Rewards as they are; records a number of each row in every way that there is."""
    import torch

    values = torch.tensor([*map(float, ctx.rows)], dtype=torch.float64).mul(0.7).add(ctx.iteration).sin()
    ctx.record("level/", values, kind=("mean", "std", "min", "max", "p10", "p50"))
    ctx.record("level/over_half", values > 0.5, kind="share")
    ctx.record("level/rows", len(values), kind="sum")
    return rewards


@op()
def largest(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    """Rewards as they are; records a mean of its own, and as a max what ``kinds`` records as a mean."""
    ctx.record("level/over_half", rewards, kind="max")
    return rewards


@op()
def more_rows(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    """Rewards as they are; adds to a sum of ``kinds``, and has a mean beside its own."""
    ctx.record("level/rows", len(rewards), kind="sum")
    ctx.record("level/mean", rewards * 0 + 3)
    return rewards
