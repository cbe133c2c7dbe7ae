"""One round of a region: its steps once, with the next prompts and with unfinished groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlgraph.ir.plan import Step
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.round_rows import IntArray, RoundInputs, RoundRows
from rlgraph.runtime.driver.row_buffer import BufferedRows, Selection, Waiting
from rlgraph.runtime.driver.worker_shares import WorkerShares

GENERATED = "tokens/generated"  # the metric of rollouts


class Round:
    """A round of a region, which has an execution of its steps.

    Invariants:
        - ``finished_groups`` is None until it is known which groups have finished: that is when ``is_drawn``.
        - The execution's steps behind the samples are left out where no group has finished.
    """

    def __init__(
        self, iteration: Execution, entry: Entry, inputs: RoundInputs, collect: Step, pool: str
    ) -> None:
        """Start a round.

        Args:
            iteration: the latest that wants rows.
            entry: the iteration whose weights generate, and the versions on entry to ``iteration``.
            inputs: what the round begins with.
            collect: the step that gathers what the region's filter keeps.
            pool: the pool that draws its samples.
        """
        keep = {*collect.reads}
        if inputs.rollout:
            keep |= {*inputs.source.writes}
        self.inputs = inputs
        self.collect = collect
        self.pool = pool
        self.execution = Execution(
            plan=iteration.plan,
            phase=iteration.phase,
            entry=entry,
            positions={inputs.source.node: inputs.position},
            previous=iteration.previous,
            keep=keep,
            controls=iteration.controls,
            states=iteration.states,
            inputs=inputs,
        )
        assert self.execution.round_rows
        self.round_rows: RoundRows = self.execution.round_rows
        self.rows = self.execution.rows
        self.samples_per_prompt = iteration.plan.regions[collect.region].times
        self.finished_groups: IntArray | None = None

    @property
    def is_drawn(self) -> bool:
        """Return whether it is known which groups have finished."""
        assert self.inputs.rollout
        return {self.inputs.source.id, self.inputs.rollout.id} <= self.execution.happened

    def finished_numbers(self) -> list[int]:
        """Return the numbers of the prompts whose samples have all ended, as far as it is known."""
        return [] if self.finished_groups is None else self.finished_groups.tolist()

    def new_groups(self) -> int:
        """Return the groups that the source gave anew, once it has reported."""
        return self.rows.source_rows(self.inputs.source.node) - len(self.inputs.unfinished.prompts)

    def groups(self) -> IntArray:
        """Return int64: the numbers of its prompts."""
        return self.round_rows.numbers(self.round_rows.source_domain)

    def finish_drawing(self, steps_behind: Sequence[Step]) -> Waiting:
        """Note which groups have finished; return the others.

        Where no group has finished, the ``steps_behind`` the samples are left out.
        """
        unfinished = self.unfinished()
        self.finished_groups = np.setdiff1d(self.groups(), unfinished.prompts.prompts)
        if not len(self.finished_groups):
            self.execution.leave_out(steps_behind)
        return unfinished

    def kept_rows(self) -> tuple[BufferedRows, int]:
        """Return what the region's filter kept, and how many rows it saw, once the round is done."""
        if self.finished_groups is not None and not len(self.finished_groups):
            return BufferedRows(), 0
        columns = self.execution.columns
        reads = self.collect.reads
        kept_domain = columns[self.collect.writes[0]].domain
        seen_domain = columns[reads[0]].domain
        rows = self.rows.origin(kept_domain)
        selections = {name: self.execution.selection(name).take(rows) for name in reads}
        numbers = self.round_rows.numbers(seen_domain)[rows] // self.samples_per_prompt
        rows_kept = BufferedRows(self.rows.lengths(kept_domain), numbers, self._weights(numbers), selections)
        return rows_kept, self.rows.count(self._unfiltered(seen_domain))

    def _unfiltered(self, domain: str) -> str:
        """Return the domain from which filters made another."""
        while domain in self.rows.filters:
            domain = self.rows.parent(domain)
        return domain

    def unfinished(self) -> Waiting:
        """Return the groups some of whose samples are not finished, with what each sample has so far."""
        rollout = self.inputs.rollout
        if rollout is None:
            return Waiting()
        domain = self.execution.columns[rollout.reads[0]].domain
        layout = self.rows.layout(domain, rollout.layout, rollout.pool)
        open_rows = []
        for device in rollout.devices:
            finished = self.rows.report(rollout, device).finished
            open_rows.append(np.delete(layout[device], finished))
        rows = np.concatenate(open_rows)
        if not len(rows):
            return Waiting()
        order = np.argsort(rows)
        numbers = self.round_rows.numbers(domain)[rows[order]]
        source_rows = self.round_rows.source_rows(domain)[rows[order]]
        prompts = dict[str, Selection]()
        for name in self.inputs.source.writes:
            prompts[name] = self.execution.selection(name).take(source_rows)
        times = self.round_rows.samples_per_row(rollout)
        sizes = tuple(len(device_rows) * times for device_rows in open_rows)
        places = layouts.children([order], times)[0]
        samples = dict[str, Selection]()
        for column in range(rollout.unfinished):
            refs = tuple(self.execution.ref_table.unfinished[device][column] for device in rollout.devices)
            samples[str(column)] = Selection(refs, sizes, places)
        return Waiting(
            prompts=self._unfinished_rows(numbers, prompts),
            samples=self._unfinished_rows(numbers.repeat(times), samples),
        )

    def _unfinished_rows(self, numbers: IntArray, columns: dict[str, Selection]) -> BufferedRows:
        lengths = np.zeros(len(numbers), np.int64)
        return BufferedRows(lengths, numbers, self._weights(numbers), columns)

    def _weights(self, numbers: IntArray) -> IntArray:
        """Return the iteration with whose weights each of some prompts was begun."""
        resumed = self.inputs.unfinished.prompts
        weights = dict(zip(resumed.prompts.tolist(), resumed.iterations.tolist(), strict=True))
        iteration = self.execution.entry.iteration
        return np.array([weights.get(number, iteration) for number in numbers.tolist()], np.int64)

    def measure_speeds(self, shares: WorkerShares) -> None:
        """Note how fast each device has drawn, where the op says in each round what it has drawn."""
        rollout = self.inputs.rollout
        if rollout is None or not shares.moves:
            return
        domain = self.execution.columns[rollout.reads[0]].domain
        layout = self.rows.layout(domain, rollout.layout, rollout.pool)
        for device in rollout.devices:
            report = self.rows.report(rollout, device)
            if GENERATED in report.metrics:
                tokens = report.metrics[GENERATED].value
                shares.measure(device, tokens, len(layout[device]), report.end - report.start)
        shares.adapt()

    def generated_tokens(self) -> float:
        """Return the tokens that its devices have drawn."""
        assert self.inputs.rollout
        tokens = 0.0
        for report in self.rows.reports[self.inputs.rollout.id].values():
            if GENERATED in report.metrics:
                tokens += report.metrics[GENERATED].value
        return tokens
