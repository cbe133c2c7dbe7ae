"""AdamW, its learning-rate schedule, and clipping over shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW
from rlgraph.runtime.engines.fsdp.shards import local
from rlgraph.syntax.settings import Optimizer


def options_of(options: Mapping[str, Any]) -> Optimizer:
    """Check options of AdamW (arXiv 1711.05101) and its schedule, whose steps are optimizer steps.

    Raises:
        ValueError: an option that is unknown, a missing ``lr``, or a decaying schedule without an end.
    """
    chosen = Optimizer.model_validate(options)
    if chosen.schedule != "constant" and "total_steps" not in options:
        raise ValueError(f"optimizer: schedule {chosen.schedule} needs total_steps")
    return chosen


def make_optimizer(
    parameters: list[torch.nn.Parameter], options: Optimizer, on_host: bool = False
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW over sharded parameters, whose device it is on unless ``on_host``, and the schedule that
    steps with it."""
    from transformers import get_scheduler

    # One fused call over all shards: a loop would pay DTensor's dispatch for every operation.
    own = options.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    optimizer = HostAdamW(parameters, **own) if on_host else torch.optim.AdamW(parameters, **own, fused=True)
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
    parameters: list[torch.nn.Parameter], max_norm: float | None, group: dist.ProcessGroup, replicas: int = 1
) -> float:
    """Scale gradients down to a global L2 norm of at most ``max_norm``, and return the norm before.

    It is over all parameters and ranks, and the same number on every rank: over replicas too, each of which
    has the same gradients, so that rounding can't tell them apart. Gradients are left as they are where it is
    not finite.
    """
    shards = [local(p.grad) for p in parameters if p.grad is not None]
    squared = torch.stack(torch._foreach_norm(shards)).double().square().sum()
    if group.size() > 1:
        dist.all_reduce(squared, group=group)
    norm = float((squared / replicas).sqrt())
    if max_norm and max_norm < norm < float("inf"):
        torch._foreach_mul_(shards, max_norm / norm)
    return norm
