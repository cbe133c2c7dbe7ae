"""The bookkeeping of an execution: an iteration, an evaluation, or one round of a region.

An execution makes no call itself. ``step_calls.py`` says which calls a step is; the driver makes them and
tells the execution what came of them (``start``, ``submitted``, ``reported``). It holds references to
columns, never their rows. A column that only the worker that made it reads stays there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlgraph.ir.actions import Collect
from rlgraph.ir.intervals import due
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.steps import Version
from rlgraph.runtime.driver.column_refs import RefTable
from rlgraph.runtime.driver.intake import Intake
from rlgraph.runtime.driver.round_rows import IntArray, RoundInputs, RoundRows
from rlgraph.runtime.driver.row_buffer import Arguments, BufferedRows, Selection
from rlgraph.runtime.driver.rows import Awaited, Rows
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.messages.tasks import ColumnRef, Place


@dataclass(frozen=True)
class FinishedStep:
    """A step that ran: its start and end on each device, in seconds since the epoch."""

    step: Step
    reports: Mapping[Place, Report]


@dataclass(frozen=True)
class Entry:
    """The start of an execution: the iteration, from 0, and the versions of the train engines before it.

    ``older`` are those that generation running ahead reads: on entry to the iteration ``schedule.ahead``
    before it, or to the first in flight.
    """

    iteration: int
    versions: Mapping[str, int]
    older: Mapping[str, int] = field(default_factory=dict)


class Execution:
    """The steps of an iteration, an evaluation or a round, and what is known of them so far.

    Invariants:
        - A step is in ``unsubmitted`` until its calls are made; ``unreported`` counts calls without a report.
        - ``happened`` only grows: events that other steps may need.
        - ``previous`` is the iteration before as long as that is in flight. Once it is complete,
          ``positions``, ``controls`` and ``states`` are what it has left.
        - ``inputs`` is None of everything but a round. A round has neither ``streams`` nor ``rounds``.
        - ``rounds[region]`` has the executions of the rounds whose rows ``streams[region]`` has.
    """

    def __init__(
        self,
        plan: Plan,
        phase: str,
        entry: Entry,
        positions: Mapping[str, int],
        previous: Execution | None = None,
        keep: Collection[str] = frozenset(),
        controls: Mapping[str, float] | None = None,
        states: Mapping[str, str] | None = None,
        inputs: RoundInputs | None = None,
    ) -> None:
        """Start an execution.

        Args:
            plan: the plan whose steps are carried out.
            phase: train or eval.
            entry: the iteration and its versions.
            positions: rows that each data source had given before ``previous``, or before this execution.
            previous: the execution of the iteration before, while that is in flight.
            keep: columns that stay in ``refs`` after their last reader.
            controls: adaptive numbers behind the iterations before ``previous``, or before this execution.
            states: for each node that keeps a state, that state then, as JSON.
            inputs: what a round begins with; None: an iteration or an evaluation, whose steps the plan has.
        """
        self.plan = plan
        self.phase = phase
        self.entry = entry
        self.positions = positions
        self.previous = previous
        self.controls = controls or {}
        self.states = states or {}
        self.inputs = inputs
        self.columns = plan.columns[phase]
        self.domains = plan.domains[phase]
        self.streams: dict[str, Intake] = {}  # for each region that was asked for rows
        self.rounds: dict[str, list[Execution]] = {}  # for each region whose rows are there

        planned = self._planned_steps()
        self.written = {*_pools_of(planned)}
        planned = [self.as_it_runs(step) for step in planned]
        self.pools = _pools_of(planned)
        self.round_rows: RoundRows | None = None
        if inputs:
            self.steps: Sequence[Step] = inputs.steps
            self.pools |= _pools_of(inputs.steps)
            self.round_rows = RoundRows(inputs, plan.pools, self.columns, self.domains, plan.models)
            self.rows = self.round_rows.rows
        else:
            self.steps = [step for step in planned if not repeated(step)]
            self.rows = Rows(plan.pools, self.steps, self.columns, self.domains, plan.models)

        self.off_worker = {step.id for step in self.steps if step.on_host}
        self.ref_table = RefTable(
            self.steps, plan.pools, self.pools, keep, self.off_worker, may_share=inputs is None
        )
        read_elsewhere = self._read_elsewhere()
        self.awaited = {step.id for step in self.steps if self._is_awaited(step, read_elsewhere)}
        self.unsubmitted = {step.id for step in self.steps}
        self.unreported = 0
        self.happened = set[Awaited]()

    def _planned_steps(self) -> list[Step]:
        """Return the plan's steps that are due in this iteration, or those of an evaluation."""
        if self.phase == "eval":
            return [*self.plan.eval_steps]
        return [step for step in self.plan.steps if due(step.when, self.entry.iteration + 1)]

    def as_it_runs(self, step: Step) -> Step:
        """Return a step as it is in this iteration: what holds rows runs without new ones, too."""
        if self.written.issuperset(step.reads):
            return step
        return replace(step, reads=())

    def _read_elsewhere(self) -> set[str]:
        """Return the columns that another pool reads than the one that writes them."""
        columns = set[str]()
        for step in self.steps:
            for column in step.reads:
                if self.pools.get(column, step.pool) != step.pool:
                    columns.add(column)
        return columns

    def _is_awaited(self, step: Step, read_elsewhere: set[str]) -> bool:
        """Return whether the driver needs a step's rows, or another pool its columns."""
        is_filter = step.run is not None and step.run.filters
        if is_filter or not read_elsewhere.isdisjoint(step.writes):
            return True
        if step not in self.rows.makers.values():
            return False
        is_counted_source = not step.reads and self.rows.source_count is not None
        return not is_counted_source

    @property
    def refs(self) -> dict[str, list[ColumnRef | None]]:
        """Return the references of each column's chunks, one per device of its pool."""
        return self.ref_table.refs

    @property
    def done(self) -> bool:
        """Return whether every step has a report of each of its devices."""
        return not self.unsubmitted and not self.unreported

    @property
    def finished_steps(self) -> list[FinishedStep]:
        """Return the steps in the plan's order, their devices in order, with those of the rounds."""
        finished = [FinishedStep(step, self._reports(step)) for step in self.steps]
        for rounds in self.rounds.values():
            for execution in rounds:
                finished += execution.finished_steps
        return sorted(finished, key=lambda item: item.step.id)

    def _reports(self, step: Step) -> dict[Place, Report]:
        """Return a step's reports in order; of a collect, the first with the spans of its rows."""
        reports = dict(sorted(self.rows.reports[step.id].items()))
        if isinstance(step.action, Collect):
            place = next(iter(reports))
            reports[place] = replace(reports[place], spans=self.streams[step.region].spans)
        return reports

    def start(self, step: Step) -> None:
        """Note that a step's calls will be made next: steps behind it may read its columns."""
        self.happened |= self.ref_table.start(step)

    def submitted(self, step: Step, outputs: Mapping[Place, Sequence[Any]]) -> None:
        """Note that a step's calls were made; the references are of its columns that do not stay."""
        self.happened.update(self.ref_table.add_outputs(step, outputs))
        self.unsubmitted.discard(step.id)  # a move of an engine may come again, in a slot that only fills
        self.unreported += len(outputs)
        if isinstance(step.action, Collect):
            self.streams[step.region].release()
            for execution in self.rounds[step.region]:
                execution.refs.clear()

    def reported(self, step: Step, place: Place, report: Report) -> list[tuple[str, Place]]:
        """Note a device's report of its share; return what was shared, and by whom, that is read no more."""
        reports = self.rows.reports.setdefault(step.id, {})
        reports[place] = report
        self.unreported -= 1
        if len(reports) < len(step.devices):
            return []
        self.happened.add(step.id)
        return self.ref_table.finish(step)

    def add_recorded(self, step: Step, references: Mapping[str, Any], report: Report | None) -> None:
        """Count a step as done without a call: its columns are those that an earlier run has recorded.

        Args:
            step: of this execution; it was not submitted, and runs on one device.
            references: of each column that it writes, whose only chunk has all rows.
            report: what that device would have reported; None of a step that writes no columns.
        """
        self.unsubmitted.discard(step.id)
        for column, reference in references.items():
            self.refs[column] = [ColumnRef(column, reference)]
        self.happened |= {step.id, *references}
        if report is None:
            return
        self.rows.reports[step.id] = {(step.pool, 0): report}
        if isinstance(step.action, Collect):
            domain = self.columns[step.writes[0]].domain
            assert report.lengths is not None
            prompts = np.zeros(len(report.lengths), np.int64)  # only rounds ask whose rows they are
            self.rows.collected[domain] = BufferedRows(report.lengths, prompts)

    def leave_out(self, steps: Iterable[Step]) -> None:
        """Leave out steps that were not submitted: no row has come to them."""
        unneeded = {step.id for step in steps}
        self.steps = [step for step in self.steps if step.id not in unneeded]
        self.unsubmitted -= unneeded

    def follow_completed(
        self, positions: Mapping[str, int], controls: Mapping[str, float], states: Mapping[str, str]
    ) -> None:
        """Go on from what the iteration before has left, now that it is complete."""
        self.previous = None
        self.positions = positions
        self.controls = controls
        self.states = states

    def release_previous(self) -> None:
        """Let go of the iterations before, of which a round that has ended needs nothing."""
        self.previous = None

    def add_rounds(self, region: str, rounds: list[Execution]) -> None:
        """Note that a region has the rows of this iteration, which these rounds have made."""
        self.rounds[region] = rounds
        self.happened.add(filled(region))

    def places(self, pool: str) -> list[Place]:
        """Return the places of a pool's workers."""
        return [(pool, device) for device in range(self.plan.pools[pool])]

    def positions_after(self) -> dict[str, int]:
        """Return the rows that each source outside regions has given, this iteration's among them."""
        functions = self.plan.functions[self.phase]
        positions = dict(self.positions)
        for step in self.steps:
            is_source = step.node in functions and functions[step.node].ins == {}
            if step.writes and is_source:
                positions[step.node] = self.position(step.node) + self.rows.source_rows(step.node)
        return positions

    def position(self, node: str) -> int:
        """Return the rows that a data source has given before, those of iterations in flight among them."""
        if self.previous is None or self.inputs:
            return self.positions.get(node, 0)
        return self.previous.position(node) + self.previous.rows.source_rows(node)

    def measured(self) -> dict[str, float]:
        """Return the metrics of its regions."""
        values: dict[str, float] = {}
        for intake in self.streams.values():
            values |= intake.values
        return values

    def versions(self, step: Step) -> dict[str, int]:
        """Return the versions that a step reads: the plan counts from those on entry to the iteration.

        An update that the iteration leaves out has made none. A round of a stream reads those that generation
        was sent last.
        """
        sent_versions: Mapping[str, int] = {}
        if self.inputs and self.inputs.serving:
            sent_versions = self.inputs.serving()
        versions = {}
        for model, version in step.models.items():
            if model in sent_versions:
                versions[model] = sent_versions[model]
            elif version:
                versions[model] = self._version(model, version)
        return versions

    def _version(self, model: str, version: Version) -> int:
        if version.is_older:
            return self.entry.older[model]
        entered = self.entry.versions.get(model, 0)
        return entered + self.plan.since_entry(model, version, self.entry.iteration + 1)

    def holds(self, step: Step) -> set[str]:
        """Return the queues that get nothing else while a step waits.

        These are those of the step's pools; for a collect, of the pools of its region. A step behind the
        samples of a round holds up its round alone.
        """
        intake = self.streams.get(step.region)
        pools = {step.pool, step.source} - {""}
        if intake:
            pools = {*intake.pools}
        if self._keeps_turn(step):
            return pools
        return {f"{pool} in round {self.ref_table.number}" for pool in pools}

    def comes_first(self, step: Step) -> list[Awaited]:
        """Return events that a step waits for in the driver, since a call that waits in Ray blocks its pool.

        A step behind the samples of a round waits so for the steps elsewhere whose columns it reads:
        generation goes on until they are done.
        """
        if self._keeps_turn(step):
            return []
        events = list[Awaited]()
        makers = {column: maker for maker in self.steps for column in maker.writes}
        for column in step.reads:
            maker = makers.get(column)
            if maker is None:
                continue
            if maker.on_host or maker.pool != step.pool:
                events.append(maker.id)
        return events

    def _keeps_turn(self, step: Step) -> bool:
        """Return whether pools take a step in its turn; those behind the samples of a round need not wait."""
        if self.inputs is None or self.inputs.in_turn is None:
            return True
        return step.id in self.inputs.in_turn

    def numbers(self, domain: str) -> IntArray:
        """Return int64 ``[rows]``: the number of each row; in a round, that through the run."""
        if self.round_rows:
            return self.round_rows.numbers(domain)
        return np.arange(self.rows.count(domain))

    def resumed(self, step: Step, rows: Any) -> Arguments:
        """Return the unfinished rows that a step goes on with; only a round has some."""
        if self.round_rows:
            return self.round_rows.resumed(step, rows)
        return (), ()

    def reference(self, column: str, device: int) -> ColumnRef:
        """Return the reference of a column's chunk on a device of the pool that wrote it."""
        return self.ref_table.reference(column, device)

    def selection(self, column: str) -> Selection:
        """Return all rows of a column."""
        return self.ref_table.selection(column, self.rows)


def _pools_of(steps: Iterable[Step]) -> dict[str, str]:
    """Return the pool of each column that some steps write."""
    pools: dict[str, str] = {}
    for step in steps:
        pools |= dict.fromkeys(step.writes, step.pool)
    return pools


def filled(region: str) -> Awaited:
    """Return the event that the rounds of a region have kept enough rows."""
    return "region", region


def repeated(step: Step) -> bool:
    """Return whether rounds repeat a step, and it does not run once per iteration."""
    return bool(step.region) and not isinstance(step.action, Collect)
