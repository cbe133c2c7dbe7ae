"""Ops that wait instead of computing, for ``overlap.py``: what remains is how a plan lets them overlap."""

import time

from rlgraph.ops import Context, ServeEngine, TrainEngine, float32, int64, op, prompts, samples


@op(makes="prompts", rows="all")
def numbers(ctx: Context, *, batch: int) -> int64[prompts]:
    """Row numbers."""
    import torch

    return torch.arange(batch)


@op(makes="samples", times="n", rows="each")
def generate(model: ServeEngine, numbers: int64[prompts], *, n: int, seconds: float) -> float32[samples]:
    """``n`` samples of each number, after a while."""
    time.sleep(seconds)
    return numbers.float().repeat_interleave(n)


@op(updates=True)
def train(model: TrainEngine, rollout: float32[samples], *, seconds: float) -> None:
    """Nothing, after a while."""
    time.sleep(seconds)
