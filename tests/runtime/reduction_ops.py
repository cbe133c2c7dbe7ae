"""A user's op that reads what groups were reduced to."""

from rlgraph.ops import Context, float32, int64, op, samples


@op(rows="group")
def centred(
    ctx: Context, rewards: float32[samples], group: int64[samples], solved: float32[samples]
) -> float32[samples]:
    """Rewards less the share that is right, which must be that of the row's own group."""
    for number in group.unique():
        members = group == number
        assert (solved[members] - rewards[members].mean()).abs().max() < 1e-6
    ctx.record("checked", rewards * 0 + 1)
    return rewards - solved
