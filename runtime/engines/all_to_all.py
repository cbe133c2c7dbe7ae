"""An all-to-all among ranks that gradients take back."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Sizes = list[int] | None  # rows for or from each rank; None: as many for each


def exchange(rows: torch.Tensor, there: Sizes, here: Sizes, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send rows ``[rows, ...]`` to ranks, as many to each as ``there`` says, and return those that they send
    to this one, as many from each as ``here`` says. Their gradients go back the same way. Collective."""
    return cast(torch.Tensor, _Exchange.apply(rows, there, here, group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, there: Sizes, here: Sizes, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.way = there, here, group
        return _exchanged(rows, there, here, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        there, here, group = ctx.way
        return _exchanged(gradient, here, there, group), None, None, None


def _exchanged(
    rows: torch.Tensor, there: Sizes, here: Sizes, group: dist.ProcessGroup | None
) -> torch.Tensor:
    out = rows.new_empty(len(rows) if here is None else sum(here), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), here, there, group=group)
    return out
