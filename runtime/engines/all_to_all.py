"""An all-to-all among ranks that gradients take back."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Sizes = list[int] | None  # rows for or from each rank; None: as many for each


def exchange(
    rows: torch.Tensor, sizes_out: Sizes, sizes_in: Sizes, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send rows ``[rows, ...]`` to ranks, and return those that they send to this one. Collective.

    ``sizes_out`` says how many go to each rank, ``sizes_in`` how many come from each. Gradients go back the
    same way.
    """
    received = _Exchange.apply(rows, sizes_out, sizes_in, group)  # type: ignore[no-untyped-call]  # torch gives it no types
    return cast(torch.Tensor, received)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes_out: Sizes, sizes_in: Sizes, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.way = sizes_out, sizes_in, group
        return _exchanged(rows, sizes_out, sizes_in, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sizes_out, sizes_in, group = ctx.way
        return _exchanged(gradient, sizes_in, sizes_out, group), None, None, None


def _exchanged(
    rows: torch.Tensor, sizes_out: Sizes, sizes_in: Sizes, group: dist.ProcessGroup | None
) -> torch.Tensor:
    out = rows.new_empty(len(rows) if sizes_in is None else sum(sizes_in), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), sizes_in, sizes_out, group=group)
    return out
