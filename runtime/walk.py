"""One pass through the steps of a phase: where its columns are, how their rows lie, what the steps reported.

A walk makes no call itself: it says which calls a step is (``calls``), and is told what came of them
(``submitted``, ``reported``). It holds references to columns, never their rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlgraph.plan import Plan, Step
from rlgraph.runtime import layout as layouts
from rlgraph.runtime.cluster import Place
from rlgraph.runtime.rows import NotYet, Rows
from rlgraph.runtime.worker import Report, Scope


@dataclass(frozen=True)
class Call:
    """A method of one worker, and what it is given."""

    place: Place
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Ran:
    """A step that ran: when it started and ended on each device, in seconds since the epoch."""

    step: Step
    reports: Mapping[Place, Report]


@dataclass(frozen=True)
class Entry:
    """Where a walk starts: the iteration, from 0, and the versions of the train engines before it.

    ``oldest`` are those that the first iteration in flight started with: no engine serves older ones.
    """

    iteration: int
    versions: Mapping[str, int]
    oldest: Mapping[str, int] = field(default_factory=dict)


class Walk:
    """The bookkeeping of one iteration, or of an evaluation."""

    def __init__(
        self,
        plan: Plan,
        phase: str,
        entry: Entry,
        positions: Mapping[str, int],
        before: Walk | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        """Start one.

        Args:
            plan: whose steps are walked.
            phase: train or eval.
            entry: the iteration and its versions.
            positions: rows that each data source had given before ``before``, or before this walk.
            before: the walk of the iteration before, while that is in flight.
            keep: columns that stay in ``refs`` after their last reader.
        """
        self.plan, self.phase, self.entry, self.positions, self.before = plan, phase, entry, positions, before
        self.steps = plan.steps if phase == "train" else plan.eval_steps
        self.columns = plan.columns[phase]
        self.rows = Rows(plan.pools, self.steps, self.columns)
        self.pools = {column: step.pool for step in self.steps for column in step.writes}
        self.unread = Counter(column for step in self.steps for column in {*step.reads, *step.writes})
        self.keep = keep
        self.freed = {column for step in self.steps for column in step.frees} - keep
        self.refs: dict[str, list[Any]] = {}  # column -> a reference for each device of its pool
        self.unsubmitted, self.unreported = {step.id for step in self.steps}, 0

    @property
    def done(self) -> bool:
        """Whether every step has a report of each of its devices."""
        return not self.unsubmitted and not self.unreported

    @property
    def ran(self) -> list[Ran]:
        """The steps in the plan's order, their devices in order."""
        return [Ran(step, dict(sorted(self.rows.reports[step.id].items()))) for step in self.steps]

    def calls(self, step: Step) -> list[Call]:
        """What a step is on each of its devices.

        Raises:
            NotYet: that depends on reports which are not here.
        """
        return KINDS[step.kind](self, step)

    def submitted(self, step: Step, made: Mapping[Place, Sequence[Any]]) -> None:
        """A step's calls were made; the references are of its report and of each column that it writes."""
        for number, column in enumerate(step.writes, 1):
            parts = self.refs[column] = [None] * self.plan.pools[step.pool]
            for (_, device), references in made.items():
                parts[device] = references[number]
        self.unsubmitted.discard(step.id)  # a move of an engine may come again, in a slot that only fills
        self.unreported += len(made)
        # pools get ahead of one another, so the last to read a column need not be the one the plan names
        for column in {*step.reads, *step.writes}:
            self.unread[column] -= 1
            if not self.unread[column] and column in self.freed:
                del self.refs[column]

    def reported(self, step: Step, place: Place, report: Report) -> None:
        """A device's share of a step is done."""
        self.rows.reports.setdefault(step.id, {})[place] = report
        self.unreported -= 1

    def positions_after(self) -> dict[str, int]:
        """Rows that each data source has given, this iteration's among them."""
        sources = [step.node for step in self.steps if step.kind == "run" and not step.reads and step.writes]
        return {**self.positions, **{node: self._position(node) + self.rows.given(node) for node in sources}}

    def versions(self, step: Step) -> dict[str, int]:
        """The versions that a step reads: the plan counts from those on entry to the iteration."""
        return {model: self._version(model, version) for model, version in step.models.items()}

    def _version(self, model: str, version: str) -> int:
        more = int(version.removeprefix("v") or 0)
        found = self.entry.versions.get(model, 0) + more
        return max(found, self.entry.oldest.get(model, 0)) if more < 0 else found

    def _each(self, step: Step, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[Call]:
        return [Call((step.pool, device), method, arguments(device)) for device in step.devices]

    def _run(self, step: Step) -> list[Call]:
        domain = self.columns[step.reads[0]].domain if step.reads else ""
        rows = self.rows.layout(domain, step.layout, step.pool) if domain else None
        total = self.rows.count(domain) if domain else 0
        position, versions = self._position(step.node), self.versions(step)

        def arguments(device: int) -> tuple[Any, ...]:
            held = () if rows is None else rows[device]
            scope = Scope(self.phase, self.entry.iteration, held, total, position, versions)
            return (step.node, scope, *(self._part(column, device) for column in step.reads))

        return self._each(step, "run", arguments)

    def _sync(self, step: Step) -> list[Call]:
        ((model, version),) = self.versions(step).items()
        if not step.source:
            return self._each(step, "sync", lambda device: (model, version))
        senders = [(step.source, device) for device in range(self.plan.pools[step.source])]
        sent = [Call(place, "send", (model, version)) for place in senders]
        return [*sent, *self._each(step, "receive", lambda device: (model, version))]

    def _transition(self, step: Step) -> list[Call]:
        model = next(iter(step.models))
        return self._each(step, "transition", lambda device: (step.kind, model, step.parts))

    def _select(self, step: Step) -> list[Call]:
        (column,), (copy,) = step.reads, step.writes
        held = self.rows.layout(self.columns[column].domain, step.layout, step.pool)
        kept = self.rows.origin(self.columns[copy].domain)

        def arguments(device: int) -> tuple[Any, ...]:
            return np.flatnonzero(np.isin(held[device], kept)), self._part(column, device)

        return self._each(step, "select", arguments)

    def _repeat(self, step: Step) -> list[Call]:
        (column,), (copy,) = step.reads, step.writes
        times = self.columns[copy].times
        return self._each(step, "repeat", lambda device: (times, self._part(column, device)))

    def _repartition(self, step: Step) -> list[Call]:
        """Every device gathers its rows of the new layout from the parts that hold them, on any pool."""
        domain = self.columns[step.reads[0]].domain
        target = self.rows.layout(domain, step.layout, step.pool)
        origin = {}
        for column in step.reads:
            held = self.rows.layout(domain, self.columns[column].layout, self.pools[column])
            origin[column] = held, *layouts.where(held, self.rows.count(domain))

        def arguments(device: int) -> tuple[Any, ...]:
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
            return (picks, counts, *parts)

        return self._each(step, "repartition", arguments)

    def _part(self, column: str, device: int) -> Any:
        """The reference of a column's part on a device of the pool that wrote it."""
        if column not in self.refs:
            raise NotYet
        return self.refs[column][device]

    def _position(self, node: str) -> int:
        """Rows that a data source has given before, those of iterations in flight among them."""
        if self.before is None:
            return self.positions.get(node, 0)
        return self.before._position(node) + self.before.rows.given(node)


KINDS: dict[str, Callable[[Walk, Step], list[Call]]] = {
    "run": Walk._run,
    "sync": Walk._sync,
    "repeat": Walk._repeat,
    "select": Walk._select,
    "repartition": Walk._repartition,
    **dict.fromkeys(("load", "offload", "wake", "sleep"), Walk._transition),
}
