"""How many rows each domain has, and which of them lie on which device of a pool.

What that depends on are reports: how many rows a source gave, how many tokens each has, which a filter kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlgraph.plan import ColumnPlan, Step
from rlgraph.runtime import layout as layouts
from rlgraph.runtime.cluster import Place
from rlgraph.runtime.layout import Layout
from rlgraph.runtime.worker import Report


class NotYet(Exception):
    """What a step's calls depend on is not known yet: a column's place, or how many rows there are."""


@dataclass(frozen=True)
class Collected:
    """Rows that a region's rounds gave: int64 ``[rows]``, tokens of each, and the number of its prompt."""

    lengths: Any
    prompts: Any


class Rows:
    """The rows of one iteration, or of an evaluation; ``NotYet`` is raised while the reports are not here."""

    def __init__(
        self, pools: Mapping[str, int], steps: Sequence[Step], columns: Mapping[str, ColumnPlan]
    ) -> None:
        self.pools, self.columns = pools, columns
        self.parents = {column.domain: (column.parent, column.times) for column in columns.values()}
        self.makers, self.filters = _makers(steps, columns)
        self.reports: dict[int, dict[Place, Report]] = {}  # by step
        self.collected: dict[str, Collected | None] = {  # domain -> its rows, once they are known
            columns[step.writes[0]].domain: None for step in steps if step.kind == "collect"
        }
        self._layouts: dict[tuple[str, str, int], Layout] = {}  # (domain, layout, devices)
        self._origins: dict[str, Any] = {}

    def report(self, step: Step, device: int) -> Report:
        place = step.pool, device
        if place not in self.reports.get(step.id, {}):
            raise NotYet
        return self.reports[step.id][place]

    def makes(self, step: Step) -> bool:
        """Whether a step makes the rows of a domain."""
        return step in self.makers.values()

    def given(self, node: str) -> int:
        """Rows that a data source gives; 0 of any other node."""
        made = [domain for domain, step in self.makers.items() if step.node == node and not step.reads]
        return self.count(made[0]) if made else 0

    def count(self, domain: str) -> int:
        """How many there are, over all devices."""
        if domain in self.collected:
            return len(self._collected(domain).lengths)
        if domain in self.filters:
            return len(self.origin(domain))
        parent, times = self.parents[domain]
        if parent is None:
            return len(self.report(self.makers[domain], 0).lengths)
        whole = self.whole(domain)
        return times * (self.count(parent) if whole is None else len(whole))

    def layout(self, domain: str, name: str, pool: str) -> Layout:
        """Rows of each device of a pool; a balanced layout needs the lengths of the rows."""
        key = domain, name, self.pools[pool]
        if key not in self._layouts:
            self._layouts[key] = self._new_layout(domain, name, pool)
        return self._layouts[key]

    def _new_layout(self, domain: str, name: str, pool: str) -> Layout:
        devices, rows = self.pools[pool], self.count(domain)
        kind, _, minibatches = name.partition("/")
        if kind == "balanced":
            return layouts.balanced(self.lengths(domain), devices, int(minibatches))
        if kind == "one":
            return layouts.one(rows, devices)
        if domain in self.collected:
            return layouts.grouped(self._collected(domain).prompts, devices)
        parent, times = self.parents[domain]
        if parent and domain in self.filters:
            return layouts.some(self.layout(parent, name, pool), self.origin(domain))
        if parent is None:
            return layouts.even(rows, devices)
        above, whole = self.layout(parent, name, pool), self.whole(domain)
        return layouts.children(above if whole is None else layouts.some(above, whole), times)

    def lengths(self, domain: str) -> Any:
        """int64 ``[rows]``: tokens of each row, as the step that made the domain reported."""
        if domain in self.collected:
            return self._collected(domain).lengths
        if domain in self.filters:
            return self.lengths(self.above(domain))[self.origin(domain)]
        step, lengths = self.makers[domain], np.zeros(self.count(domain), np.int64)
        held = self.layout(domain, step.layout, step.pool)
        for device in step.devices:
            lengths[held[device]] = self.report(step, device).lengths
        return lengths

    def above(self, domain: str) -> str:
        """The domain of which a filtered one is a part."""
        return self.columns[self.filters[domain].reads[0]].domain

    def whole(self, domain: str) -> Any:
        """int64, ascending: the rows of which a domain was made, where some are unfinished; else None."""
        step = self.makers.get(domain)
        if step is None or not step.leaves or self.report(step, step.devices[0]).whole is None:
            return None
        held = self.layout(self.columns[step.reads[0]].domain, step.layout, step.pool)
        return np.sort(np.concatenate([held[at][self.report(step, at).whole] for at in step.devices]))

    def _collected(self, domain: str) -> Collected:
        found = self.collected[domain]
        if found is None:
            raise NotYet
        return found

    def origin(self, domain: str) -> Any:
        """int64 ``[rows]``, ascending: the parent's row of each row of a filtered domain."""
        if domain not in self._origins:
            step = self.filters[domain]
            held = self.layout(self.above(domain), step.layout, step.pool)
            stayed = [held[device][self.report(step, device).kept] for device in step.devices]
            self._origins[domain] = np.sort(np.concatenate(stayed))
        return self._origins[domain]


def _makers(
    steps: Sequence[Step], columns: Mapping[str, ColumnPlan]
) -> tuple[dict[str, Step], dict[str, Step]]:
    """The step that makes each domain; the filter that makes each part of one."""
    makers, filters = {}, {}
    for step in steps:
        if step.kind == "run" and step.writes:
            read, written = (columns[step.reads[0]].domain if step.reads else ""), columns[step.writes[0]]
            if written.domain != read:
                makers[written.domain] = step
            if step.filters:
                filters[f"{read}/{step.node}"] = step
    return makers, filters
