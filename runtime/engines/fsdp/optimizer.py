"""AdamW or Muon, the learning-rate schedule, and clipping over shards."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.costs.muon import MatrixShape
from rlgraph.engines.optimizers import OPTIMIZERS
from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW
from rlgraph.runtime.engines.fsdp.muon import Muon
from rlgraph.runtime.engines.fsdp.shards import gradient_shards
from rlgraph.syntax.model_settings import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # fields of the state of AdamW, two, and of Muon


def options_of(options: Mapping[str, Any]) -> Optimizer:
    """Check options of an optimizer and its schedule, whose steps are optimizer steps.

    Raises:
        ValueError: an option that is unknown, a missing ``lr``, or a decaying schedule without an end.
    """
    chosen = Optimizer.model_validate(options)
    if "total_steps" in options:
        return chosen
    if chosen.schedule != "constant":
        raise ValueError(f"optimizer: schedule {chosen.schedule} needs total_steps")
    if isinstance(chosen.warmup_steps, float):
        raise ValueError("optimizer: a share of it needs total_steps")
    return chosen


@dataclass(frozen=True)
class Stepped:
    """The parameters that an optimizer steps, and their place.

    Attributes:
        parameters: all that train, sharded.
        matrices: those of them that Muon orthogonalises (``body_matrices``), with the shape of each matrix.
        group: the ranks over which they are sharded; None where nothing is orthogonalised.
        dtype: that matrices are orthogonalised in.
        on_host: whether the step is made in host memory.
    """

    parameters: list[torch.nn.Parameter]
    matrices: Mapping[torch.nn.Parameter, MatrixShape]
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    on_host: bool


def _adamw(stepped: Stepped, options: Optimizer) -> torch.optim.Optimizer:
    settings = options.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    if stepped.on_host:
        return HostAdamW(stepped.parameters, **settings)
    adamw_parameters = [p for p in stepped.parameters if p not in stepped.matrices]
    # One fused call over all shards: a loop would pay DTensor's dispatch for every operation.
    return torch.optim.AdamW(adamw_parameters, **settings, fused=True)


def _muon(stepped: Stepped, options: Optimizer) -> torch.optim.Optimizer:
    rest = _adamw(stepped, options)
    if not stepped.matrices:
        return rest
    assert stepped.group
    return Muon(stepped.matrices, rest, options, stepped.group, stepped.dtype)


OptimizerMaker = Callable[[Stepped, Optimizer], torch.optim.Optimizer]


def with_every_optimizer(makers: Mapping[str, OptimizerMaker]) -> Mapping[str, OptimizerMaker]:
    """Return a table of makers; a ``TypeError`` where an optimizer of the registry has none, so that a new
    one is not stepped as another."""
    missing = sorted(OPTIMIZERS.keys() - makers.keys())
    if missing:
        raise TypeError(f"nothing makes the optimizer {', '.join(missing)}; add it to MAKERS")
    return makers


MAKERS = with_every_optimizer({"adamw": _adamw, "muon": _muon})


def make_optimizer(
    parameters: list[torch.nn.Parameter],
    options: Optimizer,
    matrices: Mapping[torch.nn.Parameter, MatrixShape] | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    on_host: bool = False,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer of sharded parameters by its name in ``MAKERS``, and the schedule that steps with
    it. The arguments are those of ``Stepped``.
    """
    stepped = Stepped(parameters, matrices or {}, group, dtype, on_host)
    optimizer = MAKERS[options.kind](stepped, options)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, partial(factor_of, options))


def factor_of(options: Optimizer, step: int) -> float:
    """Return the factor on the learning rate of an optimizer step, counted from 0: a warm-up, then a fall.

    From ``total_steps`` on it stays as it is then.

    Example:
        >>> falls = Optimizer(lr=1, schedule="linear", warmup_steps=0.2, min_lr_ratio=0.1, total_steps=10)
        >>> [round(factor_of(falls, step), 3) for step in (0, 1, 2, 6, 10)]
        [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    warm = options.warmup_steps
    total = options.total_steps
    if isinstance(warm, float):
        warm = int(warm * total)
    if step < warm:
        return step / warm
    progress = min((step - warm) / max(total - warm, 1), 1.0)
    shapes = {
        "constant": 1.0,
        "linear": max(0.0, 1 - progress),
        "cosine": max(0.0, 0.5 * (1 + math.cos(2 * math.pi * options.cycles * progress))),
    }
    return options.min_lr_ratio + (1 - options.min_lr_ratio) * shapes[options.schedule]


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of an optimizer's state that average the gradients of a group of its parameters."""
    return MOMENTS[:2] if "betas" in group else MOMENTS[2:]


def set_rate(scheduler: Any, rate: float) -> None:
    """Give a schedule of torch's ``LambdaLR`` another peak, where it stands."""
    scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
    for group, factor in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def clip_gradients(
    parameters: list[torch.nn.Parameter],
    max_norm: float | None,
    group: dist.ProcessGroup,
    replicas: int = 1,
    shares: list[float] | None = None,
) -> float:
    """Scale gradients down to a global L2 norm of at most ``max_norm``, and return the norm before.

    It is over all parameters and ranks, and the same number on every rank: over replicas too, each of which
    has the same gradients, so that rounding can't tell them apart. Gradients are left as they are where it is
    not finite. ``shares`` are those of a rank in each parameter: less than 1 of what several ranks of a copy
    have alike.
    """
    with_gradient = [index for index, p in enumerate(parameters) if p.grad is not None]
    shards = gradient_shards(parameters)
    squares = torch.stack(torch._foreach_norm(shards)).double().square()
    if shares:
        squares *= squares.new_tensor([shares[index] for index in with_gradient])
    squared = squares.sum()
    if group.size() > 1:
        dist.all_reduce(squared, group=group)
    norm = float((squared / replicas).sqrt())
    if max_norm and max_norm < norm < float("inf"):
        torch._foreach_mul_(shards, max_norm / norm)
    return norm
