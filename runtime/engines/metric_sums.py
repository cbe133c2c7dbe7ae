"""A metric accumulator: sums that become means over micro-batches, mini-batches and ranks, and maxima."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class MetricSums:
    """Sums of one update on this rank; ``shared`` is the same on every rank already."""

    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> (sum, count)
    largest: dict[str, Any] = field(default_factory=dict)
    steps: int = 0  # mini-batches that had tokens
    skipped: int = 0  # mini-batches whose gradient was not finite
    shared: dict[str, list[float]] = field(default_factory=lambda: {"grad_norm": [], "lr": []})

    def add(self, loss: torch.Tensor, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """Add a micro-batch's loss and metrics, still on the device: nothing waits for them here."""
        self.losses.append(loss.detach())
        self.add_metrics(metrics)

    def add_metrics(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """Add metrics of a micro-batch alone, as of what is no part of its objective."""
        for name, (total, count) in metrics.items():
            if count is None:
                value = _detached(total)
                self.largest[name] = _larger(self.largest.get(name, value), value)
                continue
            before, seen = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (before + _detached(total), seen + _detached(count))

    def means(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the metrics over all ranks, alike on each: a collective. The host waits for the device."""
        ranks = of_ranks(self._on_host(), group)
        names = sorted({name for _, metrics, _ in ranks for name in metrics})
        sums = {name: [metrics.get(name, (0.0, 0.0)) for _, metrics, _ in ranks] for name in names}
        peaks = sorted({name for *_, most in ranks for name in most})
        return {
            **{n: sum(s for s, _ in pairs) / (sum(c for _, c in pairs) or 1.0) for n, pairs in sums.items()},
            **{name: max(most[name] for *_, most in ranks if name in most) for name in peaks},
            "loss": sum(loss for loss, *_ in ranks) / max(1, self.steps),
            **{name: sum(values) / max(1, len(values)) for name, values in self.shared.items()},
            "skipped": float(self.skipped),
        }

    def _on_host(self) -> tuple[float, dict[str, tuple[float, float]], dict[str, float]]:
        """Return this rank's loss, sums with counts, and largest values, copied from the device at once."""
        sums = [value for pair in self.metrics.values() for value in pair]
        numbers = _numbers([sum(loss.double() for loss in self.losses), *sums, *self.largest.values()])
        loss, rest = numbers[0], iter(numbers[1:])
        metrics = {name: (next(rest), next(rest)) for name in self.metrics}
        return loss, metrics, dict(zip(self.largest, rest, strict=True))


def over_ranks(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return every rank's counts, which are on the host: ``[ranks, ...]``. A collective."""
    return torch.tensor(of_ranks(counts.tolist(), group))


def of_ranks(item: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the items of all ranks. A collective."""
    ranks: list[Any] = [item] * group.size()
    if len(ranks) > 1:
        dist.all_gather_object(ranks, item, group=group)
    return ranks


def _numbers(values: list[Any]) -> list[float]:
    """Return numbers and scalars of one device as numbers: the host waits for the device once."""
    scalars = [value.double() for value in values if isinstance(value, torch.Tensor)]
    copied = iter(torch.stack(scalars).tolist() if scalars else ())
    return [next(copied) if isinstance(value, torch.Tensor) else float(value) for value in values]


def _larger(one: Any, other: Any) -> Any:
    """Return the larger of two numbers or scalars, on the device where they are."""
    return torch.maximum(one, other) if isinstance(one, torch.Tensor) else max(one, other)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
