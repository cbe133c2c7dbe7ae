"""The versions of weights that another pool has, so that a sync is skipped where they are there already."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rlgraph.ir.actions import Kind
from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.step_calls import WorkerCall


class ServedVersions:
    """The version of each model that was sent last to a pool that serves it.

    Invariants:
        - A model is in ``versions`` from a sync between pools until its engine gives its weights up.
        - An engine on a pool that is lent gives up a copy: ``versions`` is of the pool that generates.
    """

    def __init__(self, lenders: Collection[str]) -> None:
        """Start without versions; ``lenders`` are the pools that are lent to generation."""
        self.lenders = lenders
        self.versions: Mapping[str, int] = {}

    def needed_calls(
        self, step: Step, calls: Sequence[WorkerCall], versions: Mapping[str, int]
    ) -> list[WorkerCall]:
        """Return the calls of a step that is about to start, and note what it changes.

        A sync between pools that brings ``versions`` which are there does nothing, on both pools alike.
        """
        gives_up_weights = step.kind is Kind.SLEEP
        if gives_up_weights and step.pool not in self.lenders:
            remaining = dict(self.versions)
            for model in step.models:
                remaining.pop(model, None)
            self.versions = remaining
        if not step.source:
            return [*calls]
        if versions.items() <= self.versions.items():
            return [replace(call, method="stay") for call in calls]
        self.versions = {**self.versions, **versions}
        return [*calls]
