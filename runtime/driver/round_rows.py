"""The rows of one round of a region: new prompts, and the unfinished groups of earlier rounds.

Prompts are numbered by their position in the data, so that a sample's seed and the number of its group are
the same through the whole run, in whichever round and iteration they come. Groups that an earlier round did
not finish are the first rows of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Step
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.driver.row_buffer import Arguments, Waiting
from rlgraph.runtime.driver.rows import Rows

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RoundInputs:
    """The rows that a round begins with. An iteration and an evaluation have none of it."""

    steps: tuple[Step, ...]
    source: Step  # it gives the prompts
    rollout: Step | None  # it may leave samples unfinished
    position: int  # rows that the source has given before
    requested: int  # rows that the source is asked for
    unfinished: Waiting  # groups that an earlier round has begun
    counts_ahead: bool = False  # whether the source gives exactly ``requested`` rows
    may_end_early: bool = False  # whether it ends before its time where others wait for that
    in_turn: frozenset[int] | None = None  # steps that pools take in order; None: all
    homes: Mapping[int, int] | None = None  # prompt -> the device that draws its samples; None: its number
    serving: Callable[[], Mapping[str, int]] | None = None  # returns the versions that were sent to generate

    @property
    def known_rows(self) -> int | None:
        """Return the rows of the source, where they are known before it reports."""
        if not self.counts_ahead:
            return None
        return self.requested + len(self.unfinished.prompts)


class RoundRows:
    """Says which rows of a round are which prompts of the run, and which go on from an earlier round."""

    def __init__(
        self,
        inputs: RoundInputs,
        pools: Mapping[str, int],
        columns: Mapping[str, ColumnPlan],
        domains: Mapping[str, GraphDomain],
        models: Mapping[str, ModelPlan],
    ) -> None:
        self.inputs = inputs
        self.columns = columns
        self.domains = domains
        self.source_domain = columns[inputs.source.writes[0]].domain
        # a worker goes on with what it has begun, and may have more of it than its columns
        numbered = self.homes if inputs.rollout else None
        self.rows = Rows(pools, inputs.steps, columns, domains, models, inputs.known_rows, numbered)

    def numbers(self, domain: str) -> IntArray:
        """Return int64 ``[rows]``: the number of each row through the run."""
        if domain in self.rows.filters:
            origin: IntArray = self.rows.origin(domain)
            return self.numbers(self.rows.parent(domain))[origin]
        parent = self.domains[domain].parent
        times = self.domains[domain].times
        if parent is None:
            resumed = self.inputs.unfinished.prompts
            new_rows = self.rows.count(domain) - len(resumed)
            return np.concatenate([resumed.prompts, self.inputs.position + np.arange(new_rows)])
        numbers = self.numbers(parent)
        finished = self.rows.finished(domain)
        if finished is not None:
            numbers = numbers[finished]
        children: IntArray = layouts.children([numbers], times)[0]
        return children

    def homes(self, domain: str) -> IntArray:
        """Return int64 ``[rows]``: numbers by which the rows of the source are dealt to devices."""
        numbers = self.numbers(domain)
        homes = self.inputs.homes
        if homes is None:
            return numbers
        return np.array([homes.get(number, number) for number in numbers.tolist()], np.int64)

    def source_rows(self, domain: str) -> IntArray:
        """Return int64 ``[rows]``: which row of the source each row of a domain is, filtered or not."""
        rows: IntArray = self.rows.within(domain, self.source_domain)
        return rows

    def resumed(self, step: Step, rows: Any) -> Arguments:
        """Return what an earlier round left for a step on these rows: see ``Worker.run``."""
        unfinished = self.inputs.unfinished
        if not len(unfinished.prompts):
            return (), ()
        if step is self.inputs.source:
            return unfinished.prompts.gathering(step.writes)
        if step is self.inputs.rollout:
            source_rows = self.source_rows(self.columns[step.reads[0]].domain)[rows]
            groups = source_rows[source_rows < len(unfinished.prompts)]
            samples = layouts.children([groups], self.samples_per_row(step))[0]
            return unfinished.samples.take(samples).gathering([*unfinished.samples.columns])
        return (), ()

    def samples_per_row(self, step: Step) -> int:
        """Return the rows that a step makes of each row that it reads."""
        return self.domains[self.columns[step.writes[0]].domain].times
