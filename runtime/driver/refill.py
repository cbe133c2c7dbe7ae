"""Dynamic sampling: the rounds of a region in one iteration, the rows that are used, and those that wait.

round 1   prompts 0-63    kept  x . x x . . x .
round 2   prompts 64-99   kept  . x x x .
collect   what waited from the iteration before, then the rounds in order: exactly ``Region.rows``
          of them; the rest waits for the next iteration, or is dropped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlgraph.errors import RunError
from rlgraph.ir.graph import Region
from rlgraph.ir.plan import Plan, Step
from rlgraph.ops.buffer_policy import chosen
from rlgraph.ops.registry import load_function
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, joined


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round."""

    buffered: BufferedRows  # the rows that the region's filter kept
    asked: int  # new rows that the source gave
    seen: int  # rows that there were before any filter
    begun: Waiting  # the groups that are not whole yet


class Rounds:
    """The rounds of one region in one iteration, from 0."""

    spans, window = (), None

    def __init__(self, region: Region, steps: Sequence[Step], collect: Step, iteration: int) -> None:
        self.region, self.steps, self.collect, self.iteration = region, steps, collect, iteration
        self.pools = {pool for step in (*steps, collect) for pool in (step.pool, step.source)} - {""}
        self.rounds = 0  # rounds that were begun
        self.buffers: list[BufferedRows] = []
        self.later = BufferedRows()  # rows that the graph's policy does not take now
        self.begun = Waiting()  # groups that are not whole after the last round
        self.asked, self.seen, self.stayed = 0, 0, 0  # rows of the source, sampled, and kept so far
        self.used: BufferedRows | None = None  # set once there are enough behind the filter
        self.left: Waiting | None = None  # rows that wait for the next iteration

    def wants(self) -> int | None:
        """Return the new rows that the next round asks of the source; None where there are enough.

        Raises:
            RunError: there were as many rounds as there may be.
        """
        missing = self.region.rows - sum(map(len, self.buffers))
        if missing <= 0:
            self._enough()
            return None
        if self.rounds == self.region.rounds:
            raise RunError(self._too_few(missing))
        self.rounds += 1
        return max(0, self.region.asks(missing, self.seen, self.stayed) - len(self.begun.prompts))

    def leaves(self) -> Waiting:
        """Return what waits for the next iteration."""
        assert self.left is not None
        return self.left

    def release(self) -> None:
        """Release the rounds' columns but for rows that wait: all others are collected, or not needed."""
        assert self.used
        self.used, self.later = replace(self.used, columns={}), BufferedRows()
        self.buffers = [replace(buffered, columns={}) for buffered in self.buffers]

    def measured(self) -> dict[str, float]:
        """Return metrics: see docs/metrics.md."""
        used, left = self.used, self.leaves()
        assert used is not None
        values = {"rounds": self.rounds, "surplus": sum(map(len, self.buffers)) - len(used)}
        values |= {"stayed": self.stayed / self.seen} if self.seen else {}
        values |= {"waited": float((used.made < self.iteration).mean())} if self.region.keep else {}
        if any(step.leaves for step in self.steps):
            waits = len(left.prompts)
            values |= {"unfinished": waits, "aborted": len(self.begun.prompts) - waits}
        return {f"{self.region.filter}/{name}": value for name, value in values.items()}

    def take(self, waiting: Waiting) -> None:
        """Begin with the waiting rows that are not too old: all of them, or those that the policy takes."""
        rows = self._young(waiting.rows, 0)
        if self.region.policy and len(rows):
            now, later = by_policy(rows, self.region.policy, self.iteration, self.region.rows)
            self.later, rows = rows.take(later), rows.take(now)
        begun = self._young(waiting.prompts, 0), self._young(waiting.samples, 0)
        self.buffers, self.begun = [rows], Waiting(BufferedRows(), *begun)

    def absorb(self, outcome: Outcome) -> None:
        """Add the outcome of a round."""
        self.asked += outcome.asked
        self.seen += outcome.seen
        self.stayed += len(outcome.buffered)
        self.buffers.append(outcome.buffered)
        self.begun = outcome.begun

    def _enough(self) -> None:
        every = joined(self.buffers)
        self.used = every.take(np.arange(self.region.rows))
        rest, begun = every.take(np.arange(self.region.rows, len(every))), self.begun
        left = joined([self.later, rest]), begun.prompts, begun.samples
        self.left = Waiting(*(self._young(buffered, 1) for buffered in left))

    def _young(self, buffered: BufferedRows, later: int) -> BufferedRows:
        """Return rows that are not too old for this iteration, or for one ``later``."""
        young = np.flatnonzero(self.iteration + later - buffered.made <= self.region.keep)
        return buffered.left(young)

    def _too_few(self, missing: int) -> str:
        region, seen = self.region, max(self.seen, 1)
        law = f"`{region.filter}` kept {self.stayed} of {self.seen} rows ({self.stayed / seen:.1%}) in "
        law += f"{self.rounds} round{'s' * (self.rounds > 1)}; {missing} more are wanted"
        if len(self.begun.prompts):
            law += f", and {len(self.begun.prompts)} groups are not finished (raise `chunk` or `enough` of "
            law += "their rollout)"
        share = max(self.stayed / seen, 0.01)
        more = f"more rounds, or more at a time: {region.filter}.refill="
        more += f"{{rounds: {2 * region.rounds}, expected: {share:.2g}}}"
        return f"{law}\n  {more}\n  or give data that it keeps more of, or fewer rows (refill.rows)"


def by_policy(rows: BufferedRows, target: str, iteration: int, wanted: int) -> tuple[Any, Any]:
    """Return int64: the places of the rows that a policy takes, in its order, and those of the others."""
    groups, every = rows.groups(iteration), np.arange(len(rows))
    owner = np.repeat(np.arange(len(groups)), [group.rows for group in groups])
    now = chosen(load_function(target), target.rpartition("/")[2], groups, wanted)
    taken = np.concatenate([every[:0], *(every[owner == place] for place in now)])
    return taken, every[~np.isin(owner, now)]


def repeated(step: Step) -> bool:
    """Return whether rounds repeat a step, and it does not run once per iteration."""
    return bool(step.region) and not step.facts.collects


def streams(plan: Plan, steps: Sequence[Step], iteration: int, flows: Mapping[str, Any]) -> dict[str, Any]:
    """Return filter -> a stream for each region whose rows are collected by one of the steps.

    Of one that streams, it is the ``Intake`` of its ``Flow``.
    """
    ends = {step.region: step for step in steps if step.facts.collects}
    inside = {name: [s for s in steps if s.region == name and repeated(s)] for name in ends}
    return {
        name: flows[name].intake(iteration)
        if name in flows
        else Rounds(plan.regions[name], inside[name], end, iteration)
        for name, end in ends.items()
    }
