"""Counts the rows of each domain, and computes which of them lie on which device of a pool.

Both depend on reports: how many rows a source gave, how many tokens each has, which a filter kept.
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

# an event: a step has reported, by its number; a column has its references; a region its rows: "region", name
Awaited = int | str | tuple[str, str]


class Rows:
    """The rows of one iteration, or of an evaluation.

    Invariants:
        - A method answers for a domain and a layout once their events (``known_by``) have happened.
        - Reports are not replaced, so layouts and origins are computed once.
        - A domain is a source's, or has a parent, or is a union of ``parts``. Of those with a parent,
          ``filters`` has the step that keeps some rows of it, or ``makers`` the step that makes new ones.
    """

    def __init__(
        self,
        pools: Mapping[str, int],
        steps: Sequence[Step],
        columns: Mapping[str, ColumnPlan],
        domains: Mapping[str, GraphDomain],
        models: Mapping[str, ModelPlan],
        source_count: int | None = None,
        dealt_by: Callable[[str], Any] | None = None,
    ) -> None:
        """Start without reports.

        Args:
            pools: devices of each pool.
            steps: of the execution.
            columns: of the plan's phase.
            domains: of the plan's phase.
            models: of the plan.
            source_count: the rows of sources, where they are known before these report.
            dealt_by: returns the numbers by which rows of a source are dealt to devices; None: by place.
        """
        self.source_count = source_count
        self.dealt_by = dealt_by
        self.pools = pools
        self.columns = columns
        self.domains = domains
        self.models = models
        self.makers: dict[str, Step] = {}  # domain -> the step that makes its rows
        self.filters: dict[str, Step] = {}  # domain -> the step that keeps its rows
        step_of_node = {step.node: step for step in steps}
        for domain in domains.values():
            step = step_of_node.get(domain.maker)
            if step is not None and domain.filtered:
                self.filters[domain.name] = step
            elif step is not None:
                self.makers[domain.name] = step
        self.reports: dict[int, dict[Place, Report]] = {}  # step -> its reports
        collects = [step for step in steps if isinstance(step.action, Collect)]
        self.collects = {columns[step.writes[0]].domain: step for step in collects}
        self.collected: dict[str, BufferedRows] = {}  # domain -> its rows, once they are known
        self._layouts: dict[tuple[str, RowLayout, int], Layout] = {}  # (domain, layout, devices)
        self._origins: dict[str, Any] = {}

    def report(self, step: Step, device: int) -> Report:
        return self.reports[step.id][step.pool, device]

    # What has to be known first

    def known_by(self, domain: str, layout: RowLayout = NONE) -> set[Awaited]:
        """Return the events that say how many rows a domain has, and which a device has in a layout."""
        if domain in self.collects:
            return {self.collects[domain].writes[0]}
        if domain in self.filters:
            step = self.filters[domain]
            parent = self.parent(domain)
            return {step.id} | self.known_by(parent, step.layout) | self.known_by(parent, layout)
        events = set[Awaited]()
        if self.domains[domain].parts:
            for member in self.domains[domain].parts:
                events |= self.known_by(member, layout)
            return events
        maker = self.makers.get(domain)
        is_source = self.domains[domain].parent is None
        is_reported = self.is_reported(domain)
        if not is_source:
            maker_layout = maker.layout if maker and is_reported else NONE
            events |= self.known_by(self.parent(domain), maker_layout)
        is_counted_by_source = is_source and self.source_count is None
        says_count = is_reported or is_counted_by_source
        says_lengths = layout.way == "balanced"
        if maker and (says_count or says_lengths):
            events.add(maker.id)
        return events

    def is_reported(self, domain: str) -> bool:
        """Return whether a report says how many rows of a domain each row of its parent has become."""
        maker = self.makers.get(domain)
        if maker is None:
            return False
        may_leave_rows_unfinished = bool(maker.unfinished)
        return may_leave_rows_unfinished or bool(self.domains[domain].most)

    def source_events(self, node: str) -> set[Awaited]:
        """Return the events that say how many rows a data source gives."""
        return {step.id for step in self.makers.values() if step.node == node and not step.reads}

    # How many rows

    def source_rows(self, node: str) -> int:
        """Return the rows that a data source gives; 0 of any other node."""
        for domain, step in self.makers.items():
            if step.node == node and not step.reads:
                return self.count(domain)
        return 0

    def count(self, domain: str) -> int:
        """Return the number of rows over all devices."""
        if domain in self.collects:
            return len(self.collected[domain].lengths)
        if domain in self.filters:
            return len(self.origin(domain))
        plan = self.domains[domain]
        if plan.parts:
            return sum(map(self.count, plan.parts))
        if plan.parent is None:
            if self.source_count is not None:
                return self.source_count
            return len(self.report(self.makers[domain], 0).lengths)
        if plan.most:
            return int(self.counts(domain).sum())
        finished = self.finished(domain)
        parent_count = self.count(plan.parent) if finished is None else len(finished)
        return plan.times * parent_count

    def counts(self, domain: str) -> Any:
        """Return int64 ``[rows of the parent]``: how many each has become, where their number varies."""
        step = self.makers[domain]
        parent = self.parent(domain)
        layout = self.layout(parent, step.layout, step.pool)
        counts = np.zeros(self.count(parent), np.int64)
        for device in step.devices:
            counts[layout[device]] = self.report(step, device).counts
        return counts

    # Which rows on which device

    def layout(self, domain: str, name: RowLayout, pool: str) -> Layout:
        """Return the rows of each device of a pool; a balanced layout needs the lengths of the rows."""
        key = domain, name, self.pools[pool]
        if key not in self._layouts:
            self._layouts[key] = self._computed_layout(domain, name, pool)
        return self._layouts[key]

    def _computed_layout(self, domain: str, name: RowLayout, pool: str) -> Layout:
        if name.way == "balanced":
            number, total = self.samples(domain)
            return layouts.balanced(self.work(domain), self.pools[pool], name.minibatches, number, total)
        if name.way == "one":
            return layouts.one(self.count(domain), self.pools[pool])
        assert name.way == "even", name
        return self._even(domain, name, pool)

    def _even(self, domain: str, name: RowLayout, pool: str) -> Layout:
        """Return contiguous rows for each device of a pool, those of one row of the parent together."""
        devices = self.pools[pool]
        if domain in self.collects:
            return layouts.grouped(self.collected[domain].prompts, devices)
        plan = self.domains[domain]
        if plan.parts:
            return self._even_union(domain, name, pool)
        if plan.parent is None:
            if self.dealt_by:
                return layouts.dealt(self.dealt_by(domain), devices)
            return layouts.even(self.count(domain), devices)
        parent_layout = self.layout(plan.parent, name, pool)
        if plan.filtered:
            return layouts.some(parent_layout, self.origin(domain))
        if plan.most:
            return layouts.segments(parent_layout, self.counts(domain))
        finished = self.finished(domain)
        if finished is not None:
            parent_layout = layouts.some(parent_layout, finished)
        return layouts.children(parent_layout, plan.times)

    def _even_union(self, domain: str, name: RowLayout, pool: str) -> Layout:
        """Return the layout of a union: each row is where its part of the union has it."""
        device_rows: list[list[Any]] = [[] for _ in range(self.pools[pool])]
        for member in self.domains[domain].parts:
            union_rows = self.within(member, domain)
            for device, rows in enumerate(self.layout(member, name, pool)):
                device_rows[device].append(union_rows[rows])
        return [np.sort(np.concatenate(rows)) for rows in device_rows]

    # What is known of each row

    def lengths(self, domain: str) -> Any:
        """Return int64 ``[rows]``: tokens of each row, as the step that made the domain reported."""
        if domain in self.collects:
            return self.collected[domain].lengths
        if domain in self.filters:
            return self.lengths(self.parent(domain))[self.origin(domain)]
        lengths = np.zeros(self.count(domain), np.int64)
        if self.domains[domain].parts:
            for member in self.domains[domain].parts:
                lengths[self.within(member, domain)] = self.lengths(member)
            return lengths
        step = self.makers[domain]
        layout = self.layout(domain, step.layout, step.pool)
        for device in step.devices:
            lengths[layout[device]] = self.report(step, device).lengths
        return lengths

    def work(self, domain: str) -> Any:
        """Return int64 ``[rows]``: what a model has to compute for each row, in tokens of a short one."""
        lengths = self.lengths(domain)
        work = row_work(lengths, lengths**2, attention_share(self.models))
        return np.rint(work).astype(np.int64)

    def parent(self, domain: str) -> str:
        """Return the domain of which another was made."""
        return str(self.domains[domain].parent)

    def samples(self, domain: str) -> tuple[Any, int]:
        """Return int64 ``[rows]``, the number of the sample that each row is a segment of, and their count.

        Of rows that are no segments, they are themselves.
        """
        plan = self.domains[domain]
        if not is_made_of(plan.kind, "samples"):
            count = self.count(domain)
            return np.arange(count), count
        number, total = self.samples(self.parent(domain))
        if domain in self.filters:
            return number[self.origin(domain)], total
        rows_per_parent = self.counts(domain) if plan.most else plan.times
        return number.repeat(rows_per_parent), total

    def finished(self, domain: str) -> Any:
        """Return int64, ascending: the rows that made a domain where some are unfinished; else None."""
        step = self.makers.get(domain)
        if step is None or not step.unfinished:
            return None
        if self.report(step, step.devices[0]).finished is None:
            return None
        layout = self.layout(self.columns[step.reads[0]].domain, step.layout, step.pool)
        finished = [layout[device][self.report(step, device).finished] for device in step.devices]
        return np.sort(np.concatenate(finished))

    def within(self, domain: str, base: str) -> Any:
        """Return int64 ``[rows]``: for each row of a domain, that of ``base`` from which filters made it.

        ``base`` may be a union that the domain is a part of. The rows of its parts are spread evenly, so that
        each of its mini-batches has its share of them.
        """
        if domain == base:
            return np.arange(self.count(base))
        members = self.domains[base].parts
        if domain in members:
            return self._union_rows(members)[members.index(domain)]
        return self.within(self.parent(domain), base)[self.origin(domain)]

    def _union_rows(self, members: Sequence[str]) -> list[Any]:
        """Return for each member of a union int64 ``[rows]``: which row of the union each of its rows is."""
        counts = [self.count(domain) for domain in members]
        # each member's rows lie between 0 and 1 at equal distances; the union has all rows in this order
        positions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        union_row = np.argsort(np.argsort(positions, kind="stable"))
        return np.split(union_row, np.cumsum(counts)[:-1])

    def origin(self, domain: str) -> Any:
        """Return int64 ``[rows]``, ascending: the parent's row of each row of a filtered domain."""
        if domain not in self._origins:
            step = self.filters[domain]
            layout = self.layout(self.parent(domain), step.layout, step.pool)
            selected = [layout[device][self.report(step, device).selected] for device in step.devices]
            self._origins[domain] = np.sort(np.concatenate(selected))
        return self._origins[domain]


def staying(steps: Sequence[Step], off_worker: Collection[int] = ()) -> frozenset[str]:
    """Return the columns whose every reader runs where they were made, on rows that lie as they do.

    Steps whose numbers are in ``off_worker`` are run by no worker.
    """
    writers = {column: step for step in steps for column in step.writes}
    read_elsewhere = set[str]()
    for step in steps:
        if step.id in off_worker:
            read_elsewhere.update(step.reads, step.writes)
        for column in step.reads:
            if not _reads_in_place(step, writers.get(column)):
                read_elsewhere.add(column)
    return frozenset(writers.keys() - read_elsewhere)


def _reads_in_place(reader: Step, writer: Step | None) -> bool:
    """Return whether each worker that reads some rows of a column is the one that made them."""
    if writer is None or reader.kind not in IN_PLACE:
        return False
    return (reader.pool, reader.devices) == (writer.pool, writer.devices)
