"""Rows that tests of this folder train on, and an engine on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

ROWS, PROMPT = 8, 6
ADAM = {"lr": 1e-3, "eps": 1e-3}  # an eps that keeps the rounding of small gradients small


def batch() -> dict[str, Any]:
    """Four prompts of two samples each, with 1 to 16 tokens of their own; some are not in the loss mask."""
    draw = torch.Generator().manual_seed(3)
    rows, masks = [], []
    for row in range(ROWS):
        prompt = [3 + (row // 2 + at) % 20 for at in range(PROMPT)]
        own = torch.randint(3, 22, (1 + 2 * row,), generator=draw).tolist()
        rows.append(prompt + own)
        masks.append([False] * PROMPT + [at % 5 != 3 for at in range(len(own))])
    tokens = Ragged.of(rows)
    advantages = tokens.like(torch.randn(len(tokens.values), generator=draw))
    mask = Ragged.of(masks, dtype=torch.bool)
    return {"tokens": tokens, "loss_mask": mask, "advantages": advantages}


def objective(given: Mapping[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    """Policy gradient with a bonus on the entropy."""
    mask = given["loss_mask"].values.float()
    gain = (given["logprobs"].values * given["advantages"].values * mask).sum()
    return -(gain + 0.1 * (given["entropy"].values * mask).sum()) / totals.tokens, {}


def engine(path: str, device: torch.device | str, **options: Any) -> FsdpEngine:
    """A train engine on one device."""
    return FsdpEngine.of(path, device=torch.device(device).type, **({"optimizer": ADAM} | options))


def step(trained: FsdpEngine, steps: int = 1) -> dict[str, float]:
    """Optimizer steps on all rows; the metrics of the last."""
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = trained.update(batch(), objective, torch.arange(ROWS), ROWS, entropy=True)
    return metrics


def weights(trained: FsdpEngine) -> dict[str, torch.Tensor]:
    """All parameters, on the CPU."""
    return {name: tensor.float().cpu() for name, tensor in trained.weights()}
