"""A user's ops that read what routes have joined."""

from rlgraph.ops import Context, boolean, float32, int64, op, samples, text, tokens


@op()
def by_source(
    ctx: Context, rewards: float32[samples], responses: text[samples], source: text[samples]
) -> float32[samples]:
    """The rewards as they are, each of which must be what its source's node gave the row."""
    per = {"a": 4, "b": 2, "c": 1}
    told = [response.count("1") / per[name] for response, name in zip(responses, source, strict=True)]
    assert rewards.tolist() == told
    ctx.record("checked", rewards * 0 + 1)
    return rewards


@op()
def alike(
    ctx: Context,
    whole: float32[samples, tokens],
    merged: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
    group: int64[samples],
) -> float32[samples, tokens]:
    """What routes have merged, which must be what one node makes of all rows."""
    assert (whole.values - merged.values).abs().max() < 1e-5
    assert merged.lengths.tolist() == loss_mask.lengths.tolist()
    ctx.record("checked", group.float() * 0 + 1)
    return merged
