"""A term: one of the losses that an optimizer step adds up, as an op hands it to a train engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlgraph.nodes.support.ragged import same
from rlgraph.ops.interfaces import Batch, Objective

READ = ("tokens", "routing")  # the columns that a pass reads, whatever it is scored for


@dataclass(frozen=True)
class Term:
    """A loss on rows of this rank; the fields are those of ``TrainEngine.update``."""

    columns: Batch
    objective: Objective
    rows: torch.Tensor
    total_rows: int
    temperature: float = 1.0
    entropy: bool = False
    merged: bool = False
    weight: float = 1.0

    def reads_as(self, another: Term) -> bool:
        """Return whether one pass gives both what they need: the same tokens at the same temperature."""
        if self.temperature != another.temperature or self.total_rows != another.total_rows:
            return False
        if not self.rows.equal(another.rows):
            return False
        return all(same(self.columns.get(name), another.columns.get(name)) for name in READ)
