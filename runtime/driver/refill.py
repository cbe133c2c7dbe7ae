"""The rounds of a region, and the rows that wait behind them, through a run.

round 1   prompts 0-63    kept  x . x x . . x .
round 2   prompts 64-99   kept  . x x x .
collect   what waited from the iteration before, then the rounds in order: exactly ``Region.rows``
          of them; the rest waits for the next iteration, or is dropped

Where a region does not stream, an iteration begins rounds, one after the other, once the one before has its
rows, and ends them when it has its own. One that streams adds to this: see flow.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.ops.buffer_policy import chosen
from rlgraph.ops.registry import load_function
from rlgraph.runtime.driver.iteration import Execution, filled
from rlgraph.runtime.driver.refill_round import Round
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, joined


@dataclass
class Intake:
    """The rows of a region in one iteration."""

    steps: Sequence[Step]  # of its rounds
    pools: Collection[str]  # those that get nothing else until the rows are here
    used: BufferedRows | None = None  # set once they are
    values: dict[str, float] = field(default_factory=dict)  # metrics: see docs/metrics.md
    spans: Any = ()  # of one that streams, a ``GroupSpan`` when each group was drawn, and when it waited
    window: Any = None  # of one that streams, its ``Window``

    def release(self) -> None:
        """Release the columns: all are collected."""
        assert self.used
        self.used = replace(self.used, columns={})


class Rounds:
    """The rounds of one region, what they have begun, and the rows that wait."""

    models: Collection[str] = frozenset()  # those of which it has to know when they are synced
    is_settled = True  # whether nothing that must end before weights change is unfinished

    def __init__(self, plan: Plan, name: str, waiting: Waiting, position: int) -> None:
        """Start where ``position`` rows of the source were taken, with what a checkpoint has left waiting."""
        every = [step for step in plan.steps if step.region == name]
        self.region, self.steps = plan.regions[name], [step for step in every if not step.facts.collects]
        self.collect = next(step for step in every if step.facts.collects)
        self.pools = {pool for step in every for pool in (step.pool, step.source)} - {""}
        self.sooner = self.pools  # on which rounds come before the steps that wait
        self.buffer, self.position = waiting.rows, position
        self.later = BufferedRows()  # rows that the graph's policy does not take now
        self.begun = Waiting(prompts=waiting.prompts, samples=waiting.samples)  # groups that are not whole
        self.open: deque[Any] = deque()  # rounds that are under way
        self.past: list[Round] = []  # rounds that have ended since an iteration took rows
        self.wanted: deque[tuple[Execution, Intake]] = deque()
        self.whole: Execution | None = None  # the iteration that begins rounds
        self.given = 0  # iterations that have rows
        self.seen, self.stayed = 0, 0  # rows since an iteration took some

    def want(self, execution: Execution) -> None:
        """Let an iteration have its rows as soon as they are here."""
        intake = execution.streams[self.region.filter] = Intake(self.steps, self.pools)
        self.wanted.append((execution, intake))

    def waiting(self) -> Waiting:
        """Return what a checkpoint has to have: all that was begun and not used."""
        return replace(self.open[0].begun if self.open else self.begun, rows=self.buffer)

    def taken(self) -> int:
        """Return the rows of the source that ``waiting`` and iterations have."""
        return self.open[0].first if self.open else self.position

    def advance(self) -> list[tuple[Execution, Step]]:
        """Take up what has come in; return the steps of the next round, where one may begin.

        Raises:
            RunError: the region's filter keeps too little.
        """
        while self.open and self.open[0].done:
            ended = self.open.popleft()
            self.position, self.begun = ended.first + ended.drawn(), ended.unfinished()
            self._absorb(ended)
        while self.wanted and not self.open:
            if self.whole is not self.wanted[0][0]:
                self._enter(self.wanted[0][0])
            if (missing := self.region.rows - len(self.buffer)) > 0:
                return self._next(missing)
            self._give(np.arange(self.region.rows))
            self.buffer, self.later = joined([self.later, self.buffer]), BufferedRows()
            self._drop_old(self.given)
        return []

    def _enter(self, execution: Execution) -> None:
        """Begin an iteration with what waits and is not too old: all of it, or what the policy takes."""
        self.whole, iteration = execution, execution.entry.iteration
        self._drop_old(iteration)
        if self.region.policy and len(self.buffer):
            now, later = by_policy(self.buffer, self.region.policy, iteration, self.region.rows)
            self.later, self.buffer = self.buffer.take(later), self.buffer.take(now)

    def _next(self, missing: int) -> list[tuple[Execution, Step]]:
        """Return the steps of a round that is to give so many rows more."""
        if len(self.past) == self.region.rounds:
            raise RunError(self._too_few(missing))
        assert self.whole
        asks = max(0, self.region.asks(missing, self.seen, self.stayed) - len(self.begun.prompts))
        self.open.append(Round(self.whole, self.steps, self.collect, self.begun, self.position, asks))
        return [(self.open[0], step) for step in self.steps]

    def _absorb(self, ended: Any) -> None:
        """Put the rows of a round into the buffer."""
        kept, seen = ended.outcome()
        self.buffer = joined([self.buffer, kept])
        self.seen += seen
        self.stayed += len(kept)
        self.past.append(ended)
        ended.before = None  # which would hold the iterations before

    def _give(self, places: Any) -> None:
        """Give the iteration that comes next the rows at some places in the buffer."""
        execution, intake = self.wanted.popleft()
        iteration, name = execution.entry.iteration, self.region.filter
        intake.used = self.buffer.take(places)
        self.buffer = self.buffer.left(np.setdiff1d(np.arange(len(self.buffer)), places))
        values = self._measured(intake.used, iteration)
        intake.values = {f"{name}/{key}": value for key, value in values.items()}
        execution.rounds[name], self.past = self.past, []
        self.given, self.seen, self.stayed = iteration + 1, 0, 0
        execution.happened.add(filled(name))

    def _drop_old(self, iteration: int) -> None:
        """Drop what is too old for an iteration."""
        self.buffer = self.buffer.left(np.flatnonzero(self._are_young(self.buffer, iteration)))
        self.begun = some(self.begun, self._are_young(self.begun.prompts, iteration))

    def _are_young(self, rows: BufferedRows, iteration: int) -> Any:
        """Return bool: of each row whether it may be used in an iteration."""
        return iteration - rows.made <= self.region.keep

    def _measured(self, used: BufferedRows, iteration: int) -> dict[str, float]:
        values = {"rounds": len(self.past), "surplus": len(self.buffer)}
        values |= {"stayed": self.stayed / self.seen} if self.seen else {}
        values |= {"waited": float((used.made < iteration).mean())} if self.region.keep else {}
        if any(step.leaves for step in self.steps):
            young = self._are_young(self.begun.prompts, iteration + 1)
            values |= {"unfinished": int(young.sum()), "aborted": int((~young).sum())}
        return values

    def _too_few(self, missing: int) -> str:
        region, rounds = self.region, len(self.past)
        share = self.stayed / max(self.seen, 1)
        law = f"`{region.filter}` kept {self.stayed} of {self.seen} rows ({share:.1%}) in "
        law += f"{rounds} round{'s' * (rounds > 1)}; {missing} more are wanted"
        if len(self.begun.prompts):
            law += f", and {len(self.begun.prompts)} groups are not finished (raise `chunk` or `enough` of "
            law += "their rollout)"
        more = f"more rounds, or more at a time: {region.filter}.refill="
        more += f"{{rounds: {2 * rounds}, expected: {max(share, 0.01):.2g}}}"
        return f"{law}\n  {more}\n  or give data that it keeps more of, or fewer rows (refill.rows)"


def some(begun: Waiting, mine: Any) -> Waiting:
    """Return some of what was begun, by bool of each group."""
    if mine.all():
        return begun
    each = np.isin(begun.samples.prompts, begun.prompts.prompts[mine])
    return Waiting(
        prompts=begun.prompts.left(np.flatnonzero(mine)), samples=begun.samples.left(np.flatnonzero(each))
    )


def by_policy(rows: BufferedRows, target: str, iteration: int, wanted: int) -> tuple[Any, Any]:
    """Return int64: the places of the rows that a policy takes, in its order, and those of the others."""
    groups, every = rows.groups(iteration), np.arange(len(rows))
    owner = np.repeat(np.arange(len(groups)), [group.rows for group in groups])
    now = chosen(load_function(target), target.rpartition("/")[2], groups, wanted)
    taken = np.concatenate([every[:0], *(every[owner == place] for place in now)])
    return taken, every[~np.isin(owner, now)]
