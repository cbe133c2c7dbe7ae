"""NaN guard: ends the run at an update whose loss or gradient is not finite, instead of skipping the step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlgraph.errors import RunError
from rlgraph.ops import interfaces
from rlgraph.ops.interfaces import Batch, Objective, Totals

OnNan = Literal["stop", "dump"]


class FiniteEngine:
    """A train engine whose ``update`` ends the run where the engine itself would leave out a step."""

    def __init__(self, engine: interfaces.TrainEngine, node: str, on_nan: OnNan, path: Path) -> None:
        """Wrap the engine of an update; ``dump`` writes its rows to the file ``path`` of this rank first."""
        self.engine = engine
        self.node = node
        self.on_nan = on_nan
        self.path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update(self, columns: Batch, objective: Objective, *args: Any, **options: Any) -> dict[str, float]:
        """Train; see ``TrainEngine.update``.

        Raises:
            RunError: the loss or gradient of some mini-batch was not finite; on every rank alike.
        """
        self.path.unlink(missing_ok=True)

        def watched(batch: Batch, totals: Totals) -> tuple[Any, Mapping[str, Any]]:
            loss, metrics = objective(batch, totals)
            if self.on_nan == "dump" and not loss.isfinite():
                self._dump(rows(batch))
            return loss, metrics

        metrics = self.engine.update(columns, watched, *args, **options)
        if not metrics:
            return metrics  # it has joined an update, which will end the run
        losses = {self.node: metrics["loss"]}
        for name, value in metrics.items():
            if name.endswith("/loss"):
                losses[name.removesuffix("/loss")] = value
        not_finite = [node for node, loss in losses.items() if not math.isfinite(loss)]
        if not metrics["skipped"] and not not_finite:
            return metrics
        nodes = ", ".join(f"`{node}`" for node in not_finite or losses)
        message = f"{nodes}: a loss or gradient was not finite (schedule.on_nan: {self.on_nan})"
        if self.on_nan == "dump":
            if not not_finite:
                # a gradient can be infinite where every loss is finite: then any of the rows may be at fault
                self._dump(rows(columns))
            message += f"\n  the rows of such micro-batches: {self.path.parent}"
        raise RunError(message)

    def _dump(self, dumped: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in dumped)


def rows(batch: Batch) -> list[dict[str, Any]]:
    """Return the rows of some columns, ``[samples]`` and ``[samples, tokens]``, as numbers and lists."""
    lists = []
    for column in batch.values():
        lists.append(column.tolist() if hasattr(column, "tolist") else column)
    return [dict(zip(batch, row, strict=True)) for row in zip(*lists, strict=True)]
