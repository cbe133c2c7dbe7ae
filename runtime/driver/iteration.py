"""The state of an iteration: where its columns are, how their rows lie, and the reports of its steps.

An execution makes no call itself: ``step_calls.py`` says which calls a step is, and it is told what came of
them (``start``, ``submitted``, ``reported``). It holds references to columns, never their rows. A column that
only the worker that made it reads stays there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from rlgraph.ir.intervals import due
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.steps import Version
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.driver.row_buffer import Arguments, Selection
from rlgraph.runtime.driver.rows import Awaited, Rows, staying
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.messages.tasks import STORE, WORKER, ColumnRef, Place

EXECUTIONS = count()


@dataclass(frozen=True)
class FinishedStep:
    """A step that ran: its start and end on each device, in seconds since the epoch."""

    step: Step
    reports: Mapping[Place, Report]


@dataclass(frozen=True)
class Entry:
    """The start of an execution: the iteration, from 0, and the versions of the train engines before it.

    ``older`` are those that generation running ahead reads: on entry to the iteration ``schedule.staleness``
    before it, or to the first in flight.
    """

    iteration: int
    versions: Mapping[str, int]
    older: Mapping[str, int] = field(default_factory=dict)


class Execution:
    """The bookkeeping of one iteration, or of an evaluation."""

    asks: int | None = None  # rows that a round asks of its source
    yields = False  # whether a round ends before its time where others wait for that

    def __init__(
        self,
        plan: Plan,
        phase: str,
        entry: Entry,
        positions: Mapping[str, int],
        before: Execution | None = None,
        keep: frozenset[str] = frozenset(),
        controls: Mapping[str, float] | None = None,
        states: Mapping[str, str] | None = None,
    ) -> None:
        """Start an iteration.

        Args:
            plan: whose steps are carried out.
            phase: train or eval.
            entry: the iteration and its versions.
            positions: rows that each data source had given before ``before``, or before this execution.
            before: the execution of the iteration before, while that is in flight.
            keep: columns that stay in ``refs`` after their last reader.
            controls: adaptive numbers behind the iterations before ``before``, or before this execution.
            states: of each node that keeps one, its state then, as JSON.
        """
        self.plan, self.phase, self.entry, self.positions, self.before = plan, phase, entry, positions, before
        self.controls, self.states = controls or {}, states or {}
        steps = plan.steps if phase == "train" else plan.eval_steps
        every = [step for step in steps if phase == "eval" or due(step.when, entry.iteration + 1)]
        self.came = {column for step in every for column in step.writes}
        every = [self.as_it_runs(step) for step in every]
        self.pools = {column: step.pool for step in every for column in step.writes}
        self.columns, self.domains = plan.columns[phase], plan.domains[phase]
        self.streams: dict[str, Any] = {}  # of each region that was asked for rows, its ``Intake``
        self.rounds: dict[str, list[Any]] = {}  # once they are there
        self._begin([step for step in every if not repeated(step)], keep)

    def as_it_runs(self, step: Step) -> Step:
        """Return a step as it is in this iteration: what holds rows runs without new ones, too."""
        return step if self.came.issuperset(step.reads) else replace(step, reads=())

    def _begin(self, steps: Sequence[Step], keep: frozenset[str]) -> None:
        self.steps, self.keep = steps, keep
        self.rows = Rows(
            self.plan.pools, self.steps, self.columns, self.domains, self.plan.models, self.given()
        )
        self.unread = Counter(column for step in self.steps for column in {*step.reads, *step.writes})
        self.unheard = self.unread.copy()  # column -> its steps that have not reported
        self.freed = {column for step in self.steps for column in step.frees} - keep
        self.beside = {step.id for step in self.steps if step.beside}
        self.stays, self.number = staying(self.steps, self.beside) & self.freed, next(EXECUTIONS)
        self.shared = self.freed - self.stays if self.asks is None else frozenset[str]()  # none in a round
        away = {column for s in self.steps for column in s.reads if self.pools.get(column, s.pool) != s.pool}
        self.awaited = {step.id for step in self.steps if self._is_awaited(step, away)}
        self.refs: dict[str, list[ColumnRef | None]] = {}  # column -> one per device of its pool
        self.left: dict[int, list[ColumnRef]] = {}  # device -> what a round leaves unfinished
        self.unsubmitted, self.unreported = {step.id for step in self.steps}, 0
        self.happened = set[Awaited]()  # what steps may need

    def _is_awaited(self, step: Step, away: Collection[str]) -> bool:
        """Return whether the driver needs a step's rows, or another pool its columns."""
        made = step in self.rows.makers.values() and (step.reads or self.rows.given is None)
        return bool(step.filters or made) or any(column in away for column in step.writes)

    def given(self) -> int | None:
        """Return the rows that sources give, where that is known before they report."""
        return None

    @property
    def done(self) -> bool:
        """Return whether every step has a report of each of its devices."""
        return not self.unsubmitted and not self.unreported

    @property
    def ran(self) -> list[FinishedStep]:
        """Return the steps in the plan's order, their devices in order."""
        own = [FinishedStep(step, self._reports(step)) for step in self.steps]
        inner = [ran for rounds in self.rounds.values() for one in rounds for ran in one.ran]
        return sorted([*own, *inner], key=lambda ran: ran.step.id)

    def _reports(self, step: Step) -> dict[Place, Report]:
        """Return a step's reports in order; of a collect, the first with the spans of its rows."""
        reports = dict(sorted(self.rows.reports[step.id].items()))
        if step.facts.collects:
            first = next(iter(reports))
            reports[first] = replace(reports[first], spans=self.streams[step.region].spans)
        return reports

    def makes(self, step: Step, shared: str) -> tuple[ColumnRef, ...]:
        """Return where each column that a step writes goes; ``shared`` is where those do that others read."""
        kinds = {column: shared if column in self.shared else STORE for column in step.writes}
        kinds |= dict.fromkeys(self.stays.intersection(step.writes), WORKER)
        return tuple(ColumnRef(self._name(column), kind) for column, kind in kinds.items())

    def drops(self, step: Step) -> tuple[str, ...]:
        """Return the names of parts that a step is the last to need."""
        return tuple(self._name(column) for column in step.frees if column in self.stays)

    def _name(self, column: str) -> str:
        return f"{column} of execution {self.number}"

    def start(self, step: Step) -> None:
        """Note that a step's calls will be made next: steps behind it may read its columns."""
        for column in self.stays.intersection(step.writes):
            self.refs[column] = [ColumnRef(self._name(column))] * self.plan.pools[step.pool]
            self.happened.add(column)

    def submitted(self, step: Step, outputs: Mapping[Place, Sequence[Any]]) -> None:
        """Note that a step's calls were made; the references are of its columns that do not stay."""
        returned = [column for column in step.writes if column not in self.stays]
        self.happened.update(returned)
        for number, column in enumerate(returned):
            parts: list[ColumnRef | None] = [None] * self.plan.pools[step.pool]
            self.refs[column] = parts
            for (_, device), references in outputs.items():
                parts[device] = ColumnRef(self._name(column), references[number])
        if step.leaves:
            for (_, device), references in outputs.items():
                self.left[device] = [ColumnRef("", left) for left in references[len(returned) :]]
        self.unsubmitted.discard(step.id)  # a move of an engine may come again, in a slot that only fills
        self.unreported += len(outputs)
        # pools get ahead of one another, so the last to read a column need not be the one the plan names
        for column in {*step.reads, *step.writes}:
            self.unread[column] -= 1
            if not self.unread[column] and column in self.freed:
                self.refs.pop(column, None)  # a collect reads columns of rounds
        if step.facts.collects:
            self.streams[step.region].release()
            for one in self.rounds[step.region]:
                one.refs.clear()

    def reported(self, step: Step, place: Place, report: Report) -> list[tuple[str, Place]]:
        """Note a device's report of its share; return what was shared, and by whom, that is read no more."""
        reports = self.rows.reports.setdefault(step.id, {})
        reports[place] = report
        self.unreported -= 1
        if len(reports) < len(step.devices):
            return []
        self.happened.add(step.id)
        columns = {*step.reads, *step.writes}
        self.unheard.subtract(columns)
        over = [column for column in columns & self.shared if not self.unheard[column]]
        return [(self._name(column), place) for column in over for place in self.places(self.pools[column])]

    def places(self, pool: str) -> list[Place]:
        """Return the places of a pool's workers."""
        return [(pool, device) for device in range(self.plan.pools[pool])]

    def positions_after(self) -> dict[str, int]:
        """Return the rows that each source outside regions has given, this iteration's among them."""
        ins = {node: function.ins for node, function in self.plan.functions[self.phase].items()}
        sources = [step.node for step in self.steps if step.writes and ins.get(step.node) == {}]
        return {**self.positions, **{n: self.position(n) + self.rows.source_rows(n) for n in sources}}

    def measured(self) -> dict[str, float]:
        """Return the metrics of its regions."""
        return {name: v for stream in self.streams.values() for name, v in stream.values.items()}

    def holds(self, step: Step) -> set[str]:
        """Return the pools that get nothing else while a step waits: of a collect, its region's."""
        stream = self.streams.get(step.region)
        return stream.pools if stream else {step.pool, step.source} - {""}

    def versions(self, step: Step) -> dict[str, int]:
        """Return the versions that a step reads: the plan counts from those on entry to the iteration.

        An update that the iteration leaves out has made none.
        """
        return {model: self._version(model, version) for model, version in step.models.items() if version}

    def _version(self, model: str, version: Version) -> int:
        if version.is_older:
            return self.entry.older[model]
        entered = self.entry.versions.get(model, 0)
        return entered + self.plan.since_entry(model, version, self.entry.iteration + 1)

    def comes_first(self, step: Step) -> Iterable[Awaited]:
        """Return what a step waits for although Ray would: what comes late is not to block its pool."""
        return ()

    def numbers(self, domain: str) -> Any:
        """Return int64 ``[rows]``: the number of each row."""
        return np.arange(self.rows.count(domain))

    def taken_up(self, step: Step, rows: Any) -> Arguments:
        """Return the unfinished rows that a step goes on with; only a round has some."""
        return (), ()

    def part(self, column: str, device: int) -> ColumnRef:
        """Return the reference of a column's part on a device of the pool that wrote it."""
        ref = self.refs[column][device]
        assert ref, f"device {device} has no rows of {column}"
        return ref

    def selection(self, column: str) -> Selection:
        """Return all rows of a column."""
        domain = self.columns[column].domain
        lies = self.rows.layout(domain, self.columns[column].layout, self.pools[column])
        owner, place = layouts.where(lies, self.rows.count(domain))
        sizes = tuple(len(rows) for rows in lies)
        return Selection(tuple(self.refs[column]), sizes, np.cumsum((0, *sizes))[owner] + place)

    def position(self, node: str) -> int:
        """Return the rows that a data source has given before, those of iterations in flight among them."""
        if self.before is None:
            return self.positions.get(node, 0)
        return self.before.position(node) + self.before.rows.source_rows(node)


def filled(region: str) -> Awaited:
    """Return the event that the rounds of a region have kept enough rows."""
    return "region", region


def repeated(step: Step) -> bool:
    """Return whether rounds repeat a step, and it does not run once per iteration."""
    return bool(step.region) and not step.facts.collects
