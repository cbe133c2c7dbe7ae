"""Optimizer steps that updates left out, over a run: one that took none has trained nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan


class SkippedSteps:
    """Counts them by node, out of what the updates record."""

    def __init__(self, plan: Plan) -> None:
        self.nodes = [step.node for step in plan.steps if step.updates]
        self.steps, self.trained = Counter[str](), set[str]()

    def add(self, values: Mapping[str, Any]) -> None:
        """Note the metrics of an iteration; ``grad_norm``, a mean over steps taken, is none without one."""
        for node in self.nodes:
            self.steps[node] += int(values.get(f"{node}/skipped", 0))
            norm = values.get(f"{node}/grad_norm")
            if norm is not None and not math.isnan(norm):  # a gradient of 0 is a step that was taken
                self.trained.add(node)

    def check(self, note: Callable[[str], None]) -> None:
        """Say how many steps were left out.

        Raises:
            RunError: a node left out all of them.
        """
        for node, count in (+self.steps).items():
            law = f"`{node}` left out {count} optimizer steps, whose gradients were not finite"
            if node not in self.trained:
                remedy = "what was exported is as untrained as it began; schedule.on_nan=dump shows the rows"
                raise RunError(f"{law}, and took none\n  {remedy}")
            note(f"{law} (schedule.on_nan)")
