"""Counts the optimizer steps that updates skipped; an update that skipped all of them trained nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan


class SkippedSteps:
    """Counts skipped steps by node, from the metrics of updates.

    Attributes:
        skipped: the optimizer steps that each node has skipped.
        trained: the nodes that have taken at least one.
    """

    def __init__(self, plan: Plan) -> None:
        self.nodes = [step.node for step in plan.steps if step.updated]
        self.skipped = Counter[str]()
        self.trained = set[str]()

    def add(self, values: Mapping[str, Any]) -> None:
        """Read the metrics of an iteration.

        ``grad_norm`` is a mean over the steps taken, so an iteration without one has none. A gradient of 0 is
        a step that was taken.
        """
        for node in self.nodes:
            self.skipped[node] += int(values.get(f"{node}/skipped", 0))
            norm = values.get(f"{node}/grad_norm")
            if norm is not None and not math.isnan(norm):
                self.trained.add(node)

    def check(self, note: Callable[[str], None]) -> None:
        """Tell the user how many steps were skipped.

        Raises:
            RunError: a node skipped all of them.
        """
        for node, count in self.skipped.items():
            if count == 0:
                continue
            law = f"`{node}` left out {count} optimizer steps, whose gradients were not finite"
            if node not in self.trained:
                remedy = "what was exported is as untrained as it began; schedule.on_nan=dump shows the rows"
                raise RunError(f"{law}, and took none\n  {remedy}")
            note(f"{law} (schedule.on_nan)")
