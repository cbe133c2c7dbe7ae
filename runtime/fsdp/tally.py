"""Sums that become means over micro-batches, mini-batches and ranks, and the largest of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Tally:
    """What one update measures on this rank.

    ``shared`` is the same on every rank already; the rest is summed over ranks.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> (sum, count)
    largest: dict[str, Any] = field(default_factory=dict)
    steps: int = 0  # mini-batches that had tokens
    skipped: int = 0  # of those, the ones whose gradient was not finite
    shared: dict[str, list[float]] = field(default_factory=lambda: {"grad_norm": [], "lr": []})

    def add(self, loss: torch.Tensor, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """A micro-batch's loss and metrics, still on the device: nothing waits for them here."""
        self.losses.append(loss.detach())
        for name, (total, count) in metrics.items():
            if count is None:
                self.largest[name] = max(self.largest.get(name, total), total)
                continue
            before, seen = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (before + _detached(total), seen + _detached(count))

    def means(self, group: dist.ProcessGroup) -> dict[str, float]:
        """The metrics over all ranks, the same on each. A collective."""
        own = {name: (float(total), float(count)) for name, (total, count) in self.metrics.items()}
        largest = {name: float(value) for name, value in self.largest.items()}
        loss = float(torch.stack(self.losses).double().sum()) if self.losses else 0.0
        ranks: list[Any] = [(loss, own, largest)]
        if group.size() > 1:
            ranks = [None] * group.size()
            dist.all_gather_object(ranks, (loss, own, largest), group=group)
        names = sorted({name for _, metrics, _ in ranks for name in metrics})
        sums = {name: [metrics.get(name, (0.0, 0.0)) for _, metrics, _ in ranks] for name in names}
        peaks = sorted({name for *_, most in ranks for name in most})
        return {
            **{
                name: sum(s for s, _ in pairs) / (sum(c for _, c in pairs) or 1.0)
                for name, pairs in sums.items()
            },
            **{name: max(most[name] for *_, most in ranks if name in most) for name in peaks},
            "loss": sum(loss for loss, *_ in ranks) / max(1, self.steps),
            **{name: sum(values) / max(1, len(values)) for name, values in self.shared.items()},
            "skipped": float(self.skipped),
        }


def over_ranks(counts: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Every rank's counts, on the host: ``[ranks, ...]``. A collective on ``device``."""
    if group.size() == 1:
        return counts[None]
    own = counts.to(device)
    ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(ranks, own, group=group)
    return torch.stack(ranks).cpu()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
