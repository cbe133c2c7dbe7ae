"""One pass through the steps of a phase: where its columns are, how their rows lie, what the steps reported.

A walk makes no call itself: it says which calls a step is (``calls``), and is told what came of them
(``start``, ``submitted``, ``reported``). It holds references to columns, never their rows. A column that
only the worker that made it reads stays there: a ``Here`` stands for each of its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from rlgraph import catalog
from rlgraph.cadence import due
from rlgraph.plan import Plan, Step
from rlgraph.runtime import layout as layouts
from rlgraph.runtime.cluster import Place
from rlgraph.runtime.controls import adapted
from rlgraph.runtime.rows import NotYet, Rows
from rlgraph.runtime.stock import Waiting
from rlgraph.runtime.stream import repeated, streams
from rlgraph.runtime.tasks import Here
from rlgraph.runtime.worker import Report, Scope
from rlgraph.versions import is_older, since_entry

WALKS = count()
Given = tuple[tuple[Any, ...], tuple[Any, ...]]  # arguments of a call, and the parts that it reads


@dataclass(frozen=True)
class Call:
    """A method of one worker, and what it is given: behind ``args`` the parts of columns that it reads."""

    place: Place
    method: str
    args: tuple[Any, ...]
    parts: tuple[Any, ...] = ()
    leaves: int = 0  # columns that it gives beside those that its step writes


@dataclass(frozen=True)
class Ran:
    """A step that ran: when it started and ended on each device, in seconds since the epoch."""

    step: Step
    reports: Mapping[Place, Report]


@dataclass(frozen=True)
class Entry:
    """Where a walk starts: the iteration, from 0, and the versions of the train engines before it.

    ``older`` are those that generation running ahead reads: on entry to the iteration ``schedule.staleness``
    before it, or to the first in flight.
    """

    iteration: int
    versions: Mapping[str, int]
    older: Mapping[str, int] = field(default_factory=dict)


class Walk:
    """The bookkeeping of one iteration, or of an evaluation."""

    asks: int | None = None  # of a round: the rows that it asks of its source

    def __init__(
        self,
        plan: Plan,
        phase: str,
        entry: Entry,
        positions: Mapping[str, int],
        before: Walk | None = None,
        keep: frozenset[str] = frozenset(),
        waiting: Mapping[str, Waiting] | None = None,
        controls: Mapping[str, float] | None = None,
    ) -> None:
        """Start one.

        Args:
            plan: whose steps are walked.
            phase: train or eval.
            entry: the iteration and its versions.
            positions: rows that each data source had given before ``before``, or before this walk.
            before: the walk of the iteration before, while that is in flight.
            keep: columns that stay in ``refs`` after their last reader.
            waiting: of each region, what the iterations before left over.
            controls: adaptive numbers behind the iterations before ``before``, or before this walk.
        """
        self.plan, self.phase, self.entry, self.positions, self.before = plan, phase, entry, positions, before
        self.waiting, self.controls = waiting or {}, controls or {}
        every = plan.eval_steps
        if phase == "train":
            every = tuple(step for step in plan.steps if due(step.when, entry.iteration + 1))
        self.pools = {column: step.pool for step in every for column in step.writes}
        self.columns = plan.columns[phase]
        self.streams = streams(plan, every, entry.iteration)
        self._begin([step for step in every if not repeated(step)], keep)

    def _begin(self, steps: Sequence[Step], keep: frozenset[str]) -> None:
        self.steps, self.keep = steps, keep
        self.rows = Rows(self.plan.pools, self.steps, self.columns)
        self.unread = Counter(column for step in self.steps for column in {*step.reads, *step.writes})
        self.unheard = self.unread.copy()  # by column, its steps that have not reported
        self.freed = {column for step in self.steps for column in step.frees} - keep
        self.beside = {step.id for step in self.steps if self._is_beside(step)}
        self.stays, self.number = staying(self.steps, self.beside) & self.freed, next(WALKS)
        self.loans = self.freed - self.stays if self.asks is None else frozenset[str]()  # none in a round
        away = {column for s in self.steps for column in s.reads if self.pools.get(column, s.pool) != s.pool}
        self.awaited = {step.id for step in self.steps if self._is_awaited(step, away)}
        self.refs: dict[str, list[Any]] = {}  # column -> a reference for each device of its pool
        self.unsubmitted, self.unreported = {step.id for step in self.steps}, 0

    def _is_beside(self, step: Step) -> bool:
        """Whether a step's op runs beside the devices."""
        function = self.plan.functions[self.phase].get(step.node) if step.kind == "run" else None
        return function is not None and catalog.load(function.target).declared.beside

    def _is_awaited(self, step: Step, away: Collection[str]) -> bool:
        """Whether others wait for a step: the driver, for which rows there are, or another pool."""
        return bool(step.filters) or self.rows.makes(step) or any(column in away for column in step.writes)

    @property
    def done(self) -> bool:
        """Whether every step has a report of each of its devices."""
        return not self.unsubmitted and not self.unreported

    @property
    def ran(self) -> list[Ran]:
        """The steps in the plan's order, their devices in order."""
        own = [Ran(step, dict(sorted(self.rows.reports[step.id].items()))) for step in self.steps]
        rounds = [one for stream in self.streams.values() for one in stream.rounds]
        return sorted([*own, *(ran for one in rounds for ran in one.ran)], key=lambda ran: ran.step.id)

    def calls(self, step: Step) -> list[Call]:
        """What a step is on each of its devices.

        Raises:
            NotYet: that depends on reports which are not here.
        """
        return KINDS[step.kind](self, step)

    def keeps(self, step: Step) -> tuple[str, ...]:
        """For each column that a step writes, the name that its parts stay by, or nothing."""
        return tuple(self._name(column) if column in self.stays else "" for column in step.writes)

    def lends(self, step: Step) -> tuple[str, ...]:
        """For each column that a step writes and that does not stay, the name that it may be lent by."""
        made = [column for column in step.writes if column not in self.stays]
        return tuple(self._name(column) if column in self.loans else "" for column in made)

    def drops(self, step: Step) -> tuple[str, ...]:
        """The names of parts that a step is the last to need."""
        return tuple(self._name(column) for column in step.frees if column in self.stays)

    def _name(self, column: str) -> str:
        return f"{column} of walk {self.number}"

    def start(self, step: Step) -> None:
        """A step's calls will be made next: what stays of it may be read behind it."""
        for column in self.stays.intersection(step.writes):
            self.refs[column] = [Here(self._name(column))] * self.plan.pools[step.pool]

    def submitted(self, step: Step, made: Mapping[Place, Sequence[Any]]) -> None:
        """A step's calls were made; the references are of the columns that it writes and that do not stay."""
        returned = [column for column in step.writes if column not in self.stays]
        for number, column in enumerate(returned):
            parts = self.refs[column] = [None] * self.plan.pools[step.pool]
            for (_, device), references in made.items():
                parts[device] = references[number]
        if step.leaves:
            self.left = {device: refs[len(returned) :] for (_, device), refs in made.items()}
        self.unsubmitted.discard(step.id)  # a move of an engine may come again, in a slot that only fills
        self.unreported += len(made)
        # pools get ahead of one another, so the last to read a column need not be the one the plan names
        for column in {*step.reads, *step.writes}:
            self.unread[column] -= 1
            if not self.unread[column] and column in self.freed:
                self.refs.pop(column, None)  # of a collect, what it read is a round's
        if step.kind == "collect":
            self.streams[step.region].release()

    def reported(self, step: Step, place: Place, report: Report) -> list[tuple[str, Place]]:
        """A device's share of a step is done; what was lent, and by whom, that nobody reads any more."""
        reports = self.rows.reports.setdefault(step.id, {})
        reports[place] = report
        self.unreported -= 1
        if len(reports) < len(step.devices):
            return []
        columns = {*step.reads, *step.writes}
        self.unheard.subtract(columns)
        over = [column for column in columns & self.loans if not self.unheard[column]]
        return [(self._name(column), place) for column in over for place in self._places(self.pools[column])]

    def _places(self, pool: str) -> list[Place]:
        return [(pool, device) for device in range(self.plan.pools[pool])]

    def positions_after(self) -> dict[str, int]:
        """Rows that each data source has given, this iteration's among them."""
        sources = [step.node for step in self.steps if step.kind == "run" and not step.reads and step.writes]
        sources += [stream.region.source for stream in self.streams.values()]
        return {**self.positions, **{node: self.position(node) + self._given(node) for node in sources}}

    def waiting_after(self) -> dict[str, Waiting]:
        """Of each region, what it leaves for the next iteration."""
        found = {**self.waiting, **{name: stream.leaves() for name, stream in self.streams.items()}}
        return {name: waiting for name, waiting in found.items() if waiting.parts()}

    def measured(self) -> dict[str, float]:
        """Metrics of its regions."""
        return {name: v for stream in self.streams.values() for name, v in stream.measured().items()}

    def holds(self, step: Step) -> set[str]:
        """The pools that get nothing else while a step waits: of a collect, those of its whole region."""
        stream = self.streams.get(step.region)
        return stream.pools if stream else {step.pool, step.source} - {""}

    def versions(self, step: Step) -> dict[str, int]:
        """The versions that a step reads: the plan counts from those on entry to the iteration.

        An update that the iteration leaves out has made none.
        """
        return {model: self._version(model, version) for model, version in step.models.items()}

    def _version(self, model: str, version: str) -> int:
        if is_older(version):
            return self.entry.older[model]
        entered = self.entry.versions.get(model, 0)
        return entered + since_entry(self.plan, model, version, self.entry.iteration + 1)

    def _each(self, step: Step, method: str, given: Callable[[int], Given]) -> list[Call]:
        return [Call((step.pool, device), method, *given(device)) for device in step.devices]

    def _run(self, step: Step) -> list[Call]:
        domain = self.columns[step.reads[0]].domain if step.reads else ""
        rows = self.rows.layout(domain, step.layout, step.pool) if domain else None
        total = self.rows.count(domain) if domain else 0
        position, versions, now = self.position(step.node), self.versions(step), adapted(self, step)

        def given(device: int) -> Given:
            held = () if rows is None else rows[device]
            begun, left = self.taken_up(step, held)
            scope = Scope(
                phase=self.phase,
                iteration=self.entry.iteration,
                rows=() if rows is None else self.numbers(domain)[held],
                total_rows=total,
                position=position,
                versions=versions,
                adapted=now,
                asks=self.asks if rows is None else None,
                resumes=self.asks is not None,
                begun=begun,
            )
            parts = [self._part(column, device) for column in step.reads]
            return (step.node, scope), (*parts, *left)

        leaves = 0 if self.asks is None else step.leaves
        return [replace(call, leaves=leaves) for call in self._each(step, "run", given)]

    def numbers(self, domain: str) -> Any:
        """int64 ``[rows]``: what each row is numbered by."""
        return np.arange(self.rows.count(domain))

    def taken_up(self, step: Step, rows: Any) -> Given:
        """What a step on these rows goes on with: nothing but in a round."""
        return (), ()

    def _sync(self, step: Step) -> list[Call]:
        ((model, version),) = self.versions(step).items()
        if not step.source:
            return self._each(step, "sync", lambda device: ((model, version), ()))
        sent = [Call(place, "send", (model, version)) for place in self._places(step.source)]
        return [*sent, *self._each(step, "receive", lambda device: ((model, version), ()))]

    def _transition(self, step: Step) -> list[Call]:
        model = next(iter(step.models))
        return self._each(step, "transition", lambda device: ((step.kind, model, step.parts), ()))

    def _select(self, step: Step) -> list[Call]:
        (column,), (copy,) = step.reads, step.writes
        held = self.rows.layout(self.columns[column].domain, step.layout, step.pool)
        kept = self.rows.origin(self.columns[copy].domain)

        def given(device: int) -> Given:
            return (np.flatnonzero(np.isin(held[device], kept)),), (self._part(column, device),)

        return self._each(step, "select", given)

    def _repeat(self, step: Step) -> list[Call]:
        (column,), (copy,) = step.reads, step.writes
        times, whole = self.columns[copy].times, self.rows.whole(self.columns[copy].domain)
        if whole is None:
            return self._each(step, "repeat", lambda device: ((times,), (self._part(column, device),)))
        held = self.rows.layout(self.columns[column].domain, step.layout, step.pool)

        def given(device: int) -> Given:
            places = np.flatnonzero(np.isin(held[device], whole)).repeat(times)
            return (places,), (self._part(column, device),)

        return self._each(step, "select", given)

    def _repartition(self, step: Step) -> list[Call]:
        """Every device gathers its rows of the new layout from the parts that hold them, on any pool."""
        domain = self.columns[step.reads[0]].domain
        target = self.rows.layout(domain, step.layout, step.pool)
        origin = {}
        for column in step.reads:
            held = self.rows.layout(domain, self.columns[column].layout, self.pools[column])
            origin[column] = held, *layouts.where(held, self.rows.count(domain))

        def given(device: int) -> Given:
            picks, counts, parts = [], [], []
            for column, (held, owner, place) in origin.items():
                wanted = target[device]
                sources = sorted(set(owner[wanted].tolist())) or [0]
                start = np.cumsum([0] + [len(held[source]) for source in sources])
                shift = np.zeros(len(held), np.int64)
                shift[sources] = start[:-1]
                picks.append(shift[owner[wanted]] + place[wanted])
                counts.append(len(sources))
                parts += [self._part(column, source) for source in sources]
            return (picks, counts), tuple(parts)

        return self._each(step, "repartition", given)

    def _collect(self, step: Step) -> list[Call]:
        """Every device gathers its share of the rows that a region kept, from the rounds' parts."""
        stream, domain = self.streams[step.region], self.columns[step.writes[0]].domain
        self.rows.collected[domain] = stream.rows()
        held = self.rows.layout(domain, step.layout, step.pool)
        assert stream.used
        used = stream.used
        return self._each(step, "repartition", lambda at: used.take(held[at]).gathering(step.reads))

    def _part(self, column: str, device: int) -> Any:
        """The reference of a column's part on a device of the pool that wrote it."""
        if column not in self.refs:
            raise NotYet
        return self.refs[column][device]

    def position(self, node: str) -> int:
        """Rows that a data source has given before, those of iterations in flight among them."""
        if self.before is None:
            return self.positions.get(node, 0)
        return self.before.position(node) + self.before._given(node)

    def _given(self, node: str) -> int:
        """Rows that a data source gives in this iteration."""
        for stream in self.streams.values():
            if stream.region.source == node:
                return stream.prompts()
        return self.rows.given(node)

    def waits(self, region: str) -> Waiting:
        """What the iterations before have left over; raises ``NotYet`` while they are not through."""
        return self.waiting.get(region, Waiting()) if self.before is None else self.before._leaves(region)

    def _leaves(self, region: str) -> Waiting:
        """What is left over behind this iteration."""
        return self.streams[region].leaves() if region in self.streams else self.waits(region)


def staying(steps: Sequence[Step], beside: Collection[int] = ()) -> frozenset[str]:
    """The columns whose every reader runs where they were made, on rows that lie as they do.

    Args:
        steps: of an iteration.
        beside: the numbers of those that no worker runs.
    """
    writers = {column: step for step in steps for column in step.writes}
    away = {column for step in steps for column in step.reads if _lies_apart(step, writers.get(column))}
    away |= {column for step in steps if step.id in beside for column in (*step.reads, *step.writes)}
    return frozenset(writers.keys() - away)


def _lies_apart(reader: Step, writer: Step | None) -> bool:
    """Whether some part of a column is read by another worker than the one that made it."""
    if writer is None or reader.kind not in ("run", "repeat", "select"):
        return True
    return (reader.pool, reader.devices) != (writer.pool, writer.devices)


KINDS: dict[str, Callable[[Walk, Step], list[Call]]] = {
    "run": Walk._run,
    "sync": Walk._sync,
    "repeat": Walk._repeat,
    "select": Walk._select,
    "collect": Walk._collect,
    "repartition": Walk._repartition,
    **dict.fromkeys(("load", "offload", "wake", "sleep"), Walk._transition),
}
