"""The rounds of a region in one iteration: whether another is needed, what is used, and what waits.

round 1   prompts 0-63    kept  x . x x . . x .
round 2   prompts 64-99   kept  . x x x .
collect   what waited from the iteration before, then the rounds in order: exactly ``Region.rows``
          of them; the rest waits for the next iteration, or is dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlgraph.buffer import chosen
from rlgraph.catalog import load_function
from rlgraph.errors import RunError
from rlgraph.graph import Region
from rlgraph.plan import Plan, Step
from rlgraph.runtime.rows import Collected, NotYet
from rlgraph.runtime.stock import Stock, Waiting, joined

if TYPE_CHECKING:
    from rlgraph.runtime.rounds import Round


class Stream:
    """The rounds of one region in one iteration, from 0."""

    def __init__(self, region: Region, steps: Sequence[Step], collect: Step, iteration: int) -> None:
        self.region, self.steps, self.collect, self.iteration = region, steps, collect, iteration
        self.pools = {pool for step in (*steps, collect) for pool in (step.pool, step.source)} - {""}
        self.rounds: list[Round] = []
        self.stocks: list[Stock] = []
        self.later = Stock()  # what the graph's policy does not take now
        self.begun = Waiting()  # groups that are not whole after the last round
        self.asked, self.seen, self.stayed = 0, 0, 0  # rows of the source, sampled, and kept so far
        self.used: Stock | None = None  # once there are enough behind the filter
        self.left: Waiting | None = None  # what waits for the next iteration

    def wants(self, waiting: Waiting) -> int | None:
        """New rows that the next round asks of the source; None while one runs, and where there are enough.

        Args:
            waiting: what the iteration before left.

        Raises:
            RunError: there were as many rounds as there may be.
        """
        if self.used is not None or (self.rounds and not self.rounds[-1].done):
            return None
        if self.rounds:
            self._absorb(self.rounds[-1])
        else:
            self._take(waiting)
        missing = self.region.rows - sum(map(len, self.stocks))
        if missing <= 0:
            self._enough()
            return None
        if len(self.rounds) == self.region.rounds:
            raise RunError(self._too_few(missing))
        return max(0, self.region.asks(missing, self.seen, self.stayed) - len(self.begun.prompts))

    def rows(self) -> Collected:
        """What is known of the collected rows.

        Raises:
            NotYet: there are not enough.
        """
        if self.used is None:
            raise NotYet
        return Collected(self.used.lengths, self.used.prompts)

    def prompts(self) -> int:
        """Rows that the source gave; raises as ``rows`` does."""
        self.rows()
        return self.asked

    def leaves(self) -> Waiting:
        """What waits for the next iteration; raises as ``rows`` does."""
        self.rows()
        assert self.left is not None
        return self.left

    def release(self) -> None:
        """Let go of what rounds hold, but for what waits: all else is collected, or not needed."""
        assert self.used
        for one in self.rounds:
            one.refs.clear()
        self.used, self.later = replace(self.used, columns={}), Stock()
        self.stocks = [replace(stock, columns={}) for stock in self.stocks]

    def measured(self) -> dict[str, float]:
        """Metrics: see docs/metrics.md."""
        used, left = self.used, self.leaves()
        assert used is not None
        found = {"rounds": len(self.rounds), "surplus": sum(map(len, self.stocks)) - len(used)}
        found |= {"stayed": self.stayed / self.seen} if self.seen else {}
        found |= {"waited": float((used.made < self.iteration).mean())} if self.region.keep else {}
        if any(step.leaves for step in self.steps):
            waits = len(left.prompts)
            found |= {"unfinished": waits, "aborted": len(self.begun.prompts) - waits}
        return {f"{self.region.filter}/{name}": value for name, value in found.items()}

    def _take(self, waiting: Waiting) -> None:
        """Begin with what waits and is not too old: all of it, or what the graph's policy says."""
        rows, prompts, samples = (
            self._young(stock, 0) for stock in (waiting.rows, waiting.prompts, waiting.samples)
        )
        if self.region.policy and len(rows):
            groups, policy = rows.groups(self.iteration), load_function(self.region.policy)
            name, every = self.region.policy.rpartition("/")[2], np.arange(len(rows))
            owner = np.repeat(np.arange(len(groups)), [group.rows for group in groups])
            now = chosen(policy, name, groups, self.region.rows)
            self.later = rows.take(every[~np.isin(owner, now)])
            rows = rows.take(np.concatenate([every[:0], *(every[owner == place] for place in now)]))
        self.stocks, self.begun = [rows], Waiting(prompts=prompts, samples=samples)

    def _absorb(self, done: Round) -> None:
        stock = done.kept(self.collect)
        self.asked += done.given()
        self.seen += done.sampled(self.collect)
        self.stayed += len(stock)
        self.stocks.append(stock)
        self.begun = done.unfinished()

    def _enough(self) -> None:
        every = joined(self.stocks)
        self.used = every.take(np.arange(self.region.rows))
        rest, begun = every.take(np.arange(self.region.rows, len(every))), self.begun
        left = joined([self.later, rest]), begun.prompts, begun.samples
        self.left = Waiting(*(self._young(stock, 1) for stock in left))

    def _young(self, stock: Stock, later: int) -> Stock:
        """What is not too old for this iteration, or for one ``later``."""
        young = np.flatnonzero(self.iteration + later - stock.made <= self.region.keep)
        return stock.take(young) if len(young) else Stock()

    def _too_few(self, missing: int) -> str:
        region, seen = self.region, max(self.seen, 1)
        law = f"`{region.filter}` kept {self.stayed} of {self.seen} rows ({self.stayed / seen:.1%}) in "
        law += f"{len(self.rounds)} round{'s' * (len(self.rounds) > 1)}; {missing} more are wanted"
        if len(self.begun.prompts):
            law += f", and {len(self.begun.prompts)} groups are not finished (raise `chunk` or `enough` of "
            law += "their rollout)"
        share = max(self.stayed / seen, 0.01)
        more = f"more rounds, or more at a time: {region.filter}.refill="
        more += f"{{rounds: {2 * region.rounds}, expected: {share:.2g}}}"
        return f"{law}\n  {more}\n  or give data that it keeps more of, or fewer rows (refill.rows)"


def repeated(step: Step) -> bool:
    """Whether a step is one of those that rounds repeat, and not of those that run once an iteration."""
    return bool(step.region) and step.kind != "collect"


def streams(plan: Plan, steps: Sequence[Step], iteration: int) -> dict[str, Stream]:
    """By its filter, a stream for each region whose rows are collected by one of the steps."""
    ends = {step.region: step for step in steps if step.kind == "collect"}
    inside = {name: [s for s in steps if s.region == name and repeated(s)] for name in ends}
    return {name: Stream(plan.regions[name], inside[name], end, iteration) for name, end in ends.items()}
