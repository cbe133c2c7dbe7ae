"""A metric accumulator: parts of metrics of micro-batches, mini-batches and ranks become numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.ops.interfaces import Recorder
from rlgraph.ops.metric import Metric, add_up

STEPS = "optimizer steps"


@dataclass
class MetricSums:
    """Metrics of one update on this rank.

    ``shared`` is the same on every rank already, and empty of a loss that joined the steps of another.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    steps: int = 0  # mini-batches that had tokens
    skipped: int = 0  # mini-batches whose gradient was not finite
    shared: dict[str, list[float]] = field(default_factory=lambda: {"grad_norm": [], "lr": []})

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Metric | tuple[Any, Any]]) -> None:
        """Add a micro-batch's loss and metrics, still on the device: nothing waits for them here."""
        self.losses.append(loss.detach())
        self.add_metrics(metrics)

    def add_metrics(self, metrics: Mapping[str, Metric | tuple[Any, Any]]) -> None:
        """Add metrics of a micro-batch alone, as of what is no part of its objective."""
        self.metrics = add_up(
            [self.metrics, {name: _detached(metric) for name, metric in metrics.items()}], ""
        )

    def numbers(
        self, group: dist.ProcessGroup, record: Recorder | None, prefix: str = ""
    ) -> dict[str, float]:
        """Return the metrics over all ranks, alike on each: a collective. The host waits for the device.

        ``record`` gets this rank's parts of them. Their names begin with the ``prefix``.
        """
        rank_metrics = self._on_host(group.rank() == 0)
        parts = {f"{prefix}{name}": metric for name, metric in rank_metrics.items()}
        if record:
            record(parts)
        return {name: metric.value for name, metric in add_up(of_ranks(parts, group), "").items()}

    def _on_host(self, is_first_rank: bool) -> dict[str, Metric]:
        """Return this rank's parts, copied from the device at once; what ranks share is of the first."""
        scalars = [value for metric in self.metrics.values() for value in metric.parts.values()]
        loss, *metric_numbers = _numbers([sum(loss.double() for loss in self.losses), *scalars])
        numbers = iter(metric_numbers)
        parts = {
            name: replace(metric, parts={part_name: next(numbers) for part_name in metric.parts})
            for name, metric in self.metrics.items()
        }
        steps = max(1, self.steps) if is_first_rank else 0
        parts["loss"] = Metric.of("mean", [loss], STEPS, steps)
        if is_first_rank and self.shared:
            for name, values in self.shared.items():  # without a step there is no mean: null
                parts[name] = Metric.of("mean", values, STEPS, len(values))
            parts["skipped"] = Metric.of("sum", [self.skipped], STEPS)
        return parts


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


def _detached(metric: Metric | tuple[Any, Any]) -> Metric:
    """Return a micro-batch's metric without its gradient; a pair is sum and count of a mean over tokens."""
    if isinstance(metric, tuple):
        metric = Metric("mean", "tokens", {"count": metric[1], "total": metric[0]})
    return replace(metric, parts={name: _scalar(part) for name, part in metric.parts.items()})


def _scalar(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
