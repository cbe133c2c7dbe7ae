"""Counts the rows of each domain, and computes which of them lie on which device of a pool.

What that depends on are reports: how many rows a source gave, how many tokens each has, which a filter kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rlgraph.costs.plan_size import attention_share
from rlgraph.costs.workload import row_work
from rlgraph.ir.actions import IN_PLACE, Collect
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Step
from rlgraph.ir.steps import NONE, RowLayout
from rlgraph.ops.column_types import is_made_of
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.columns.layouts import Layout
from rlgraph.runtime.driver.row_buffer import BufferedRows
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.messages.tasks import Place

Awaited = int | str | tuple[str, str]  # a step has reported, a column has its references, a region its rows


class Rows:
    """The rows of one iteration, or of an evaluation, once what they are ``known_by`` has happened."""

    def __init__(
        self,
        pools: Mapping[str, int],
        steps: Sequence[Step],
        columns: Mapping[str, ColumnPlan],
        domains: Mapping[str, GraphDomain],
        models: Mapping[str, ModelPlan],
        given: int | None = None,
        numbered: Callable[[str], Any] | None = None,
    ) -> None:
        """Start without reports.

        Args:
            pools: devices of each pool. steps: of the execution. columns: of the plan's phase. domains: of
            the plan's phase. models: of the plan. given: the rows of sources, where they are known before
            these report. numbered: returns the numbers by which rows of a source are dealt to devices; None:
            by their place.
        """
        self.given = given
        self.pools, self.columns, self.domains, self.models = pools, columns, domains, models
        by_node = {step.node: step for step in steps}
        pairs = [(domain, by_node[domain.maker]) for domain in domains.values() if domain.maker in by_node]
        self.makers = {domain.name: step for domain, step in pairs if not domain.filtered}
        self.filters = {domain.name: step for domain, step in pairs if domain.filtered}
        self.reports: dict[int, dict[Place, Report]] = {}  # step -> its reports
        collects = [step for step in steps if isinstance(step.action, Collect)]
        self.collects = {columns[step.writes[0]].domain: step for step in collects}
        self.collected: dict[str, BufferedRows] = {}  # domain -> its rows, once they are known
        self.numbered = numbered
        self._layouts: dict[tuple[str, str, int], Layout] = {}  # (domain, layout, devices)
        self._origins: dict[str, Any] = {}

    def report(self, step: Step, device: int) -> Report:
        return self.reports[step.id][step.pool, device]

    def known_by(self, domain: str, layout: RowLayout = NONE) -> set[Awaited]:
        """Return what says how many rows a domain has, and which of them a device has in a layout."""
        if domain in self.collects:
            return {self.collects[domain].writes[0]}
        if domain in self.filters:
            step = self.filters[domain]
            above = self.above(domain)
            return {step.id} | self.known_by(above, step.layout) | self.known_by(above, layout)
        if parts := self.domains[domain].parts:
            return {event for part in parts for event in self.known_by(part, layout)}
        parent, maker = self.domains[domain].parent, self.makers.get(domain)
        reported = self.is_reported(domain)
        events = self.known_by(parent, maker.layout if maker and reported else NONE) if parent else set()
        counted = reported or (parent is None and self.given is None)
        if maker and (counted or layout.way == "balanced"):  # which goes by lengths
            events.add(maker.id)
        return events

    def is_reported(self, domain: str) -> bool:
        """Return whether a report says how many rows of a domain each row of its parent has become."""
        return domain in self.makers and bool(self.makers[domain].unfinished or self.domains[domain].most)

    def source_events(self, node: str) -> set[Awaited]:
        """Return what says how many rows a data source gives."""
        return {step.id for step in self.makers.values() if step.node == node and not step.reads}

    def source_rows(self, node: str) -> int:
        """Return the rows that a data source gives; 0 of any other node."""
        sources = [domain for domain, step in self.makers.items() if step.node == node and not step.reads]
        return self.count(sources[0]) if sources else 0

    def count(self, domain: str) -> int:
        """Return the number of rows over all devices."""
        if domain in self.collects:
            return len(self.collected[domain].lengths)
        if domain in self.filters:
            return len(self.origin(domain))
        own = self.domains[domain]
        if own.parts:
            return sum(map(self.count, own.parts))
        if own.parent is None and self.given is not None:
            return self.given
        if own.parent is None:
            return len(self.report(self.makers[domain], 0).lengths)
        if own.most:
            return int(self.counts(domain).sum())
        whole = self.whole(domain)
        return own.times * (self.count(own.parent) if whole is None else len(whole))

    def layout(self, domain: str, name: RowLayout, pool: str) -> Layout:
        """Return the rows of each device of a pool; a balanced layout needs the lengths of the rows."""
        key = domain, name, self.pools[pool]
        if key not in self._layouts:
            self._layouts[key] = self._laid(domain, name, pool)
        return self._layouts[key]

    def _laid(self, domain: str, name: RowLayout, pool: str) -> Layout:
        if name.way == "balanced":
            samples = self.samples(domain)
            return layouts.balanced(self.work(domain), self.pools[pool], name.minibatches, *samples)
        if name.way == "one":
            return layouts.one(self.count(domain), self.pools[pool])
        assert name.way == "even", name
        return self._even(domain, name, pool)

    def _even(self, domain: str, name: RowLayout, pool: str) -> Layout:
        """Contiguous rows for each device of a pool, those of one row of the parent together."""
        devices = self.pools[pool]
        if domain in self.collects:
            return layouts.grouped(self.collected[domain].prompts, devices)
        own = self.domains[domain]
        if own.parts:
            laid = [self._part(part, domain, self.layout(part, name, pool)) for part in own.parts]
            return [np.sort(np.concatenate(rows)) for rows in zip(*laid, strict=True)]
        if own.parent and own.filtered:
            return layouts.some(self.layout(own.parent, name, pool), self.origin(domain))
        if own.parent is None:
            if self.numbered:
                return layouts.dealt(self.numbered(domain), devices)
            return layouts.even(self.count(domain), devices)
        if own.most:
            return layouts.segments(self.layout(own.parent, name, pool), self.counts(domain))
        above, whole = self.layout(own.parent, name, pool), self.whole(domain)
        return layouts.children(above if whole is None else layouts.some(above, whole), own.times)

    def _part(self, part: str, whole: str, layout: Layout) -> Layout:
        """Return the rows of a union that those of one of its parts are."""
        rows = self.within(part, whole)
        return [rows[held] for held in layout]

    def lengths(self, domain: str) -> Any:
        """Return int64 ``[rows]``: tokens of each row, as the step that made the domain reported."""
        if domain in self.collects:
            return self.collected[domain].lengths
        if domain in self.filters:
            return self.lengths(self.above(domain))[self.origin(domain)]
        lengths = np.zeros(self.count(domain), np.int64)
        for part in self.domains[domain].parts:
            lengths[self.within(part, domain)] = self.lengths(part)
        if self.domains[domain].parts:
            return lengths
        step = self.makers[domain]
        held = self.layout(domain, step.layout, step.pool)
        for device in step.devices:
            lengths[held[device]] = self.report(step, device).lengths
        return lengths

    def work(self, domain: str) -> Any:
        """Return int64 ``[rows]``: what a model has to compute for each row, in tokens of a short one."""
        lengths = self.lengths(domain)
        return np.rint(row_work(lengths, lengths**2, attention_share(self.models))).astype(np.int64)

    def above(self, domain: str) -> str:
        """Return the domain of which another was made."""
        return str(self.domains[domain].parent)

    def counts(self, domain: str) -> Any:
        """Return int64 ``[rows of the parent]``: how many each has become, where their number varies."""
        step, above = self.makers[domain], self.above(domain)
        counts, held = np.zeros(self.count(above), np.int64), self.layout(above, step.layout, step.pool)
        for device in step.devices:
            counts[held[device]] = self.report(step, device).counts
        return counts

    def samples(self, domain: str) -> tuple[Any, int]:
        """Return int64 ``[rows]``, the number of the sample that each row is a segment of, and their count.

        Of rows that are no segments, they are themselves.
        """
        own = self.domains[domain]
        if not is_made_of(own.kind, "samples"):
            return np.arange(count := self.count(domain)), count
        number, total = self.samples(self.above(domain))
        if domain in self.filters:
            return number[self.origin(domain)], total
        return number.repeat(self.counts(domain) if own.most else own.times), total

    def whole(self, domain: str) -> Any:
        """Return int64, ascending: the rows that made a domain where some are unfinished; else None."""
        step = self.makers.get(domain)
        if step is None or not step.unfinished or self.report(step, step.devices[0]).whole is None:
            return None
        held = self.layout(self.columns[step.reads[0]].domain, step.layout, step.pool)
        return np.sort(np.concatenate([held[at][self.report(step, at).whole] for at in step.devices]))

    def within(self, domain: str, whole: str) -> Any:
        """Return int64 ``[rows]``: for each row of a domain, that of another from which filters made it.

        Rows of a union's parts are spread evenly, so that each of its mini-batches has its share of them.
        """
        if domain == whole:
            return np.arange(self.count(whole))
        if domain in (parts := self.domains[whole].parts):
            counts = [self.count(part) for part in parts]
            places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
            order, first = np.argsort(np.argsort(places, kind="stable")), np.cumsum((0, *counts))
            at = parts.index(domain)
            return order[first[at] : first[at + 1]]
        return self.within(self.above(domain), whole)[self.origin(domain)]

    def origin(self, domain: str) -> Any:
        """Return int64 ``[rows]``, ascending: the parent's row of each row of a filtered domain."""
        if domain not in self._origins:
            step = self.filters[domain]
            held = self.layout(self.above(domain), step.layout, step.pool)
            stayed = [held[device][self.report(step, device).kept] for device in step.devices]
            self._origins[domain] = np.sort(np.concatenate(stayed))
        return self._origins[domain]


def staying(steps: Sequence[Step], beside: Collection[int] = ()) -> frozenset[str]:
    """Return the columns whose every reader runs where they were made, on rows that lie as they do.

    Steps whose numbers are in ``beside`` are run by no worker.
    """
    writers = {column: step for step in steps for column in step.writes}
    away = {column for step in steps for column in step.reads if _lies_apart(step, writers.get(column))}
    away |= {column for step in steps if step.id in beside for column in (*step.reads, *step.writes)}
    return frozenset(writers.keys() - away)


def _lies_apart(reader: Step, writer: Step | None) -> bool:
    """Return whether some part of a column is read by another worker than the one that made it."""
    if writer is None or reader.kind not in IN_PLACE:
        return True
    return (reader.pool, reader.devices) != (writer.pool, writer.devices)
