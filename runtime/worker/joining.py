"""An update whose loss joins the optimizer steps of another: its call hands the loss over, and returns."""

from __future__ import annotations

from typing import Any

from rlgraph.ops.interfaces import Batch, Objective
from rlgraph.runtime.engines.contract import HostedTrainEngine
from rlgraph.runtime.engines.term import Term


class JoiningEngine:
    """A train engine whose ``update`` takes no step: what it is given is a term of the next one's."""

    def __init__(self, engine: HostedTrainEngine, node: str) -> None:
        """Wrap the engine of an update, whose metrics are recorded as the node's."""
        self.engine = engine
        self.node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update(
        self,
        columns: Batch,
        objective: Objective,
        rows: Any,
        total_rows: int,
        minibatches: int = 1,
        epochs: int = 1,
        *args: Any,
        record: Any = None,
        **options: Any,
    ) -> dict[str, float]:
        """Hand a loss over; see ``TrainEngine.update``."""
        self.engine.join(self.node, Term(columns, objective, rows, total_rows, *args, **options))
        return {}
