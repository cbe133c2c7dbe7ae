"""NaN guard: handles updates whose loss or gradient is not finite, beside skipping an optimizer step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlgraph.errors import RunError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops.interfaces import Batch, Objective, Totals, TrainEngine

OnNan = Literal["stop", "dump"]


class FiniteEngine:
    """A train engine whose ``update`` ends the run where the engine itself would leave out a step."""

    def __init__(self, engine: TrainEngine, node: str, on_nan: OnNan, path: Path) -> None:
        """Wrap an engine.

        Args:
            engine: that trains.
            node: of the update, for the error.
            on_nan: ``stop``, or ``dump``: write rows before.
            path: of the file with these rows, on this rank.
        """
        self.engine, self.node, self.on_nan, self.path = engine, node, on_nan, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update(self, columns: Batch, objective: Objective, *args: Any, **options: Any) -> dict[str, float]:
        """Train; see ``TrainEngine.update``.

        Raises:
            RunError: the loss or gradient of some mini-batch was not finite; on every rank alike.
        """
        found: list[list[dict[str, Any]]] = []

        def watched(batch: Batch, totals: Totals) -> tuple[Any, Mapping[str, tuple[float, float | None]]]:
            loss, metrics = objective(batch, totals)
            if self.on_nan == "dump" and not loss.isfinite():
                found.append(rows(batch))
            return loss, metrics

        metrics = self.engine.update(columns, watched, *args, **options)
        finite = math.isfinite(metrics["loss"])
        if metrics["skipped"] or not finite:
            if self.on_nan == "dump":
                # a gradient can be infinite where every loss is finite: then any of the rows may be at fault
                self._dump(rows(columns) if finite else [row for batch in found for row in batch])
            raise RunError(self._law())
        return metrics

    def _dump(self, dumped: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(row) + "\n" for row in dumped), encoding="utf-8")

    def _law(self) -> str:
        law = f"`{self.node}`: a loss or gradient was not finite"
        if self.on_nan == "dump":
            return f"{law} (schedule.on_nan: dump)\n  the rows of such micro-batches: {self.path.parent}"
        return f"{law} (schedule.on_nan: stop)"


def rows(batch: Batch) -> list[dict[str, Any]]:
    """Return the rows of some columns, ``[samples]`` and ``[samples, tokens]``, as numbers and lists."""
    listed = {
        name: column.tolist() if isinstance(column, Ragged) or hasattr(column, "tolist") else list(column)
        for name, column in batch.items()
    }
    return [dict(zip(listed, row, strict=True)) for row in zip(*listed.values(), strict=True)]
