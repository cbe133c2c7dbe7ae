"""Ops that check that rows made of samples meet those samples again, and each its own."""

from rlgraph.ops import Context, float32, int64, op, samples, text


@op()
def sizes(ctx: Context, responses: text[samples], question: text[samples]) -> float32[samples]:
    """How long a verdict is, with the prompt that led to it; the columns are of one row each."""
    import torch

    ctx.record("read", [float(len(q) > 0) for q in question])
    return torch.tensor([float(len(response)) for response in responses])


@op()
def met(
    ctx: Context,
    numbers: int64[samples],
    mine: int64[samples],
    said: float32[samples],
    rewards: float32[samples],
) -> float32[samples]:
    """Rewards and what was said of them; ``numbers``, of prompts made of samples, are the samples' own."""
    assert numbers.tolist() == mine.tolist(), (numbers, mine)
    ctx.record("checked", [1.0] * len(mine))
    return rewards + 0.01 * said
