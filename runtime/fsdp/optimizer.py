"""AdamW, its learning-rate schedule, and clipping over shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (arXiv 1711.05101) with a schedule; ``lr`` is its peak.

    ``max_grad_norm`` 0 or None clips nothing. ``total_steps`` and ``warmup_steps`` count optimizer steps.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> OptimizerOptions:
        """From a mapping.

        Raises:
            ValueError: an option that is unknown, a missing ``lr``, or a decaying schedule without an end.
        """
        accepted = [field.name for field in fields(OptimizerOptions)]
        unknown = sorted(set(options) - set(accepted))
        if unknown:
            raise ValueError(f"optimizer: unknown {', '.join(unknown)}; accepted: {', '.join(accepted)}")
        if "lr" not in options:
            raise ValueError("optimizer: lr is required")
        chosen = OptimizerOptions(**{**options, "betas": tuple(options.get("betas", (0.9, 0.999)))})
        if chosen.schedule not in SCHEDULES:
            raise ValueError(f"optimizer: schedule is one of {', '.join(SCHEDULES)}, not {chosen.schedule}")
        if chosen.schedule != "constant" and chosen.total_steps is None:
            raise ValueError(f"optimizer: schedule {chosen.schedule} needs total_steps")
        return chosen


def make_optimizer(
    parameters: list[torch.nn.Parameter], options: OptimizerOptions
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW over sharded parameters, and the schedule that steps with it."""
    from transformers import get_scheduler

    # One fused call over all shards: a loop would pay DTensor's dispatch for every operation.
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    # transformers' plain constant schedule takes no warmup.
    name = "constant_with_warmup" if options.schedule == "constant" else options.schedule
    return optimizer, get_scheduler(name, optimizer, options.warmup_steps, options.total_steps)


def set_rate(scheduler: Any, rate: float) -> None:
    """Give a schedule of torch's ``LambdaLR`` another peak, where it stands."""
    scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
    for group, factor in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def clip_gradients(
    parameters: list[torch.nn.Parameter], max_norm: float | None, group: dist.ProcessGroup
) -> float:
    """Scale gradients down to a global L2 norm of at most ``max_norm``.

    Returns:
        The norm before, over all parameters and ranks: the same number on every rank. Gradients are left as
        they are where it is not finite.
    """
    shards = [_local(p.grad) for p in parameters if p.grad is not None]
    squared = torch.stack(torch._foreach_norm(shards)).double().square().sum()
    if group.size() > 1:
        dist.all_reduce(squared, group=group)
    norm = float(squared.sqrt())
    if max_norm and max_norm < norm < float("inf"):
        torch._foreach_mul_(shards, max_norm / norm)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
