"""A user's op: a reward for writing ones."""

from typing import Any

from rlgraph.engines import Batch, Context, ServeEngine, Totals, TrainEngine
from rlgraph.op import op
from rlgraph.types import boolean, float32, int64, samples, text, tokens


@op()
def ones(ctx: Context, responses: text[samples], *, per: int = 4) -> float32[samples]:
    """The number of ones in a response, divided by ``per``."""
    import torch

    rewards = torch.tensor([response.count("1") / per for response in responses], dtype=torch.float32)
    ctx.record("reward/mean", rewards)
    return rewards


@op()
def ones_served(
    model: ServeEngine, ctx: Context, responses: text[samples], *, per: int = 4
) -> float32[samples]:
    """The same, on the engine that generates; records the version of its weights."""
    ctx.record("served/version", [model.version])
    return ones(ctx, responses, per=per)


@op(updates=True)
def imitate(
    model: TrainEngine, ctx: Context, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> None:
    """A user's own update: one step towards what was sampled."""
    import torch

    def objective(batch: Batch, totals: Totals) -> tuple[Any, dict[str, tuple[float, float]]]:
        return -batch["logprobs"].values[batch["loss_mask"].values].sum() / totals.tokens, {}

    columns = {"tokens": tokens, "loss_mask": loss_mask}
    metrics = model.update(columns, objective, torch.tensor(list(ctx.rows)), ctx.total_rows)
    ctx.record("loss", metrics["loss"], count=1)


@op()
def raises(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Fails in the second iteration."""
    import torch

    if ctx.iteration == 1:
        raise ArithmeticError("the abacus broke")
    return torch.zeros(len(responses))


@op()
def dies(ctx: Context, responses: text[samples]) -> float32[samples]:
    """Ends its process in the second iteration."""
    import os

    import torch

    if ctx.iteration == 1:
        os._exit(1)
    return torch.zeros(len(responses))
