"""A user's op that reads a column of the prompts."""

from rlgraph.ops import Context, float32, op, samples, text


@op()
def near(ctx: Context, responses: text[samples], answer: text[samples]) -> float32[samples]:
    """How many characters a response has in common with the answer."""
    import torch

    pairs = zip(responses, answer, strict=True)
    rewards = torch.tensor([len({*response} & {*right}) for response, right in pairs], dtype=torch.float32)
    ctx.record("reward/mean", rewards)
    return rewards


@op()
def scaled(ctx: Context, responses: text[samples]) -> float32[samples]:
    """The number of ones in a response, times what the environment says."""
    import os

    import torch

    scale = float(os.environ.get("REWARD_SCALE", "1"))
    rewards = torch.tensor([scale * response.count("1") for response in responses], dtype=torch.float32)
    ctx.record("reward/mean", rewards)
    return rewards
