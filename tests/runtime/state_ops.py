"""Ops that keep a state, and one that leaves something that no checkpoint can hold."""

from __future__ import annotations

import torch

from rlgraph.ops import Context, float32, op, samples


@op(rows="all", state="keeps")
def less_its_mean(ctx: Context, rewards: float32[samples], *, decay: float = 0.5) -> float32[samples]:
    """Rewards less a mean that runs over the iterations."""
    before = ctx.state.get("mean", 0.0)
    ctx.state["mean"] = decay * before + (1 - decay) * float(rewards.mean())
    ctx.state["rows"] = [*ctx.state.get("rows", []), len(rewards)]
    ctx.record("before", [before])
    return rewards - before


@op(state="reads")
def plus_the_mean(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    """Rewards and the mean that another node keeps."""
    ctx.record("read", [ctx.state.get("mean", 0.0)])
    ctx.state["mean"] = 99.0  # of a reader nothing is kept
    return rewards + ctx.state["mean"] * 0


@op(rows="all", state="keeps")
def keeps_a_tensor(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    ctx.state["mean"] = torch.zeros(1)
    return rewards


@op(rows="all", state="keeps")
def keeps_nan(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    ctx.state["mean"] = float("nan")
    return rewards
