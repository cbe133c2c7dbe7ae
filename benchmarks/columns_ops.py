"""Ops that hand on columns and compute nothing, for ``columns.py``: what remains is the columns' way.

Each makes its columns once and gives them again in every iteration; each touches every page that it reads.
Shapes: ``[samples, tokens]`` is a ``Ragged`` column.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import (
    Context,
    ServeEngine,
    TrainEngine,
    boolean,
    float32,
    int64,
    op,
    prompts,
    samples,
    tokens,
)

if TYPE_CHECKING:
    import torch

PAGE = 4096  # bytes


class Sampled(NamedTuple):
    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    rollout_logprobs: float32[samples, tokens]


class Estimated(NamedTuple):
    advantages: float32[samples, tokens]
    returns: float32[samples, tokens]


@op(makes="prompts", rows="all")
def ask(ctx: Context, *, batch: int) -> int64[prompts]:
    """Row numbers."""
    import torch

    return torch.arange(batch)


@op(makes="samples", times="n", rows="each")
def generate(model: ServeEngine, prompts: int64[prompts], *, n: int, tokens: int) -> Sampled:
    """``n`` samples of each prompt, each of half to one and a half times ``tokens``."""
    import torch

    rows = torch.arange(len(prompts) * n) + int(prompts[0]) * n
    offsets = offsets_of(tokens // 2 + rows * 7919 % tokens)
    total = int(offsets[-1])
    made = (filled(total, dtype) for dtype in ("int64", "bool", "float32"))
    return Sampled(*(Ragged(values, offsets) for values in made))


@op()
def score(tokens: int64[samples, tokens]) -> float32[samples]:
    """A number a row."""
    touch(tokens)
    return tokens.lengths.float()


@op()
def forward(
    model: TrainEngine, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """A number a token."""
    touch(tokens, loss_mask)
    return numbers(tokens)


@op()
def shape(
    rewards: float32[samples],
    old_logprobs: float32[samples, tokens],
    ref_logprobs: float32[samples, tokens],
    loss_mask: boolean[samples, tokens],
) -> float32[samples, tokens]:
    """A number a token."""
    touch(old_logprobs, ref_logprobs, loss_mask)
    return numbers(old_logprobs)


@op(rows="all")
def estimate(
    shaped: float32[samples, tokens], values: float32[samples, tokens], loss_mask: boolean[samples, tokens]
) -> Estimated:
    """Two numbers a token, of all rows at once."""
    touch(shaped, values, loss_mask)
    return Estimated(numbers(shaped), numbers(shaped))


@op(updates=True)
def update_critic(
    model: TrainEngine,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    values: float32[samples, tokens],
    returns: float32[samples, tokens],
    *,
    minibatches: int,
) -> None:
    """Nothing."""
    touch(tokens, loss_mask, values, returns)


@op(updates=True)
def update_policy(
    model: TrainEngine,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    old_logprobs: float32[samples, tokens],
    rollout_logprobs: float32[samples, tokens],
    advantages: float32[samples, tokens],
    *,
    minibatches: int,
) -> None:
    """Nothing."""
    touch(tokens, loss_mask, old_logprobs, rollout_logprobs, advantages)


def numbers(rows: Ragged) -> Ragged:
    """A float a token."""
    return rows.like(filled(len(rows.values), "float32"))


@cache
def filled(count: int, dtype: str) -> torch.Tensor:
    """Ones, the same tensor each time."""
    import torch

    return torch.ones(count, dtype=getattr(torch, dtype))


def touch(*columns: Ragged) -> None:
    """Read one number of every page, so that what the store gives is mapped."""
    for column in columns:
        column.values[:: PAGE // column.values.element_size()].sum()
