"""A user's op: a reward for writing ones."""

from rlgraph.engines import Context
from rlgraph.op import op
from rlgraph.types import float32, samples, text


@op()
def ones(ctx: Context, responses: text[samples], *, per: int = 4) -> float32[samples]:
    """The number of ones in a response, divided by ``per``."""
    import torch

    rewards = torch.tensor([response.count("1") / per for response in responses], dtype=torch.float32)
    ctx.record("reward/mean", rewards)
    return rewards


@op()
def raises(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Fails in the second iteration."""
    import torch

    if ctx.iteration == 1:
        raise ArithmeticError("the abacus broke")
    return torch.zeros(len(responses))
