"""A region at run time: its rounds, the rows that wait behind them, and the iterations that take these.

A refill is a window of one round. Each iteration begins rounds, one at a time, until it has its rows:

    round 1   prompts 0-63    kept  x . x x . . x . round 2   prompts 64-99   kept  . x x x . collect   what
    waited from the iteration before, then the rounds in order: exactly ``Region.rows`` of them;
              the rest waits for the next iteration, or is dropped

A stream is a window of several iterations. Rounds go on through the iterations, some tokens for each sample:

    gen      round 7 | round 8 | sync | round 9 | round 10 ...
    host         rewards of 6, 7 ...                               of the groups that finished in it
    train    update 1: 512 rows of the buffer    | update 2 ...

While an iteration waits for rows, rounds run on a pool that the plan lends, too, over some of the groups:

    train    update 1 | lent 8 | lent 10 |   update 2     it waits for a round that is under way
    gen      round 7    round 9    round 11 ...           and goes on with what the lent ones have left

Which groups begin, which rows are taken and what is too old is what ``GroupLedger`` says: this file moves
the columns. A checkpoint has the rows that wait, and unfinished groups as they were before the oldest round
that is still under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.steps import ONE
from rlgraph.ops.buffer_policy import chosen
from rlgraph.ops.registry import load_function
from rlgraph.runtime.driver.clock import StreamClock
from rlgraph.runtime.driver.intake import Intake
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.region_plan import RegionPlan
from rlgraph.runtime.driver.round import Round
from rlgraph.runtime.driver.round_rows import IntArray, RoundInputs
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, joined, together
from rlgraph.runtime.driver.worker_shares import WorkerShares
from rlgraph.streaming.ledger import GroupLedger
from rlgraph.streaming.rules import Window

Submission = tuple[Execution, Step]

# rounds of a stream that are under way at a time: at the start, while processes beside workers start,
# and later
ROUNDS_AT_START = 2
MOST_ROUNDS = 16


class RunningRegion:
    """The rounds of one region, the groups that it has begun, and the rows that wait.

    Invariants:
        - Row i of ``buffer`` is row i of the ledger: the same prompt, begun in the same iteration.
        - A group in the ledger's ``drawing`` is either in ``unfinished`` or in a round of ``drawing_rounds``.
        - ``rounds`` are under way in the order in which they began, and their rows come in this order.
        - A pool draws one round at a time; a refill has one round at a time altogether.
        - ``wanted`` has the iterations that wait for rows, in order; the first gets its rows first.
    """

    def __init__(
        self, plan: Plan, name: str, waiting: Waiting, position: int, serving: Callable[[], Mapping[str, int]]
    ) -> None:
        """Start where a run or a checkpoint is.

        Args:
            plan: of the run.
            name: of the region.
            waiting: what a checkpoint has of rows and of unfinished groups.
            position: rows of the source that were taken.
            serving: returns the versions that were sent to generate.
        """
        self.plan = RegionPlan.of(plan, name)
        self.serving = serving
        self.ledger = self._ledger(waiting, position, plan.iterations)
        self.buffer = waiting.rows
        self.set_aside = BufferedRows()  # rows that the policy of a refill does not take in this iteration
        self.unfinished = Waiting(prompts=waiting.prompts, samples=waiting.samples)
        self.rounds: deque[Round] = deque()
        self.drawing_rounds: dict[str, Round] = {}  # pool -> the round that it draws
        self.ended_rounds: list[Round] = []  # since an iteration took rows
        self.wanted: deque[tuple[Execution, Intake]] = deque()
        self.iteration: Execution | None = None  # the one that begins rounds
        self.counted_rounds = 0  # that have ended
        self.counted_drops = 0  # rows that were dropped before the last iteration took its own
        self.lent_numbers: IntArray = np.zeros(0, np.int64)  # groups of the latest round on a lent pool
        self.clock = StreamClock()
        self.shares = WorkerShares(
            workers=plan.pools[self.plan.home],
            deals=self.plan.stream is not None and not self.ledger.in_order,
            moves=self.plan.moves_samples,
        )
        self.shares.deal(waiting.prompts.prompts.tolist(), ())

    def _ledger(self, waiting: Waiting, position: int, end: float) -> GroupLedger:
        """Return the account of what a checkpoint has."""
        window = Window.of_refill(self.plan.region)
        if self.plan.stream:
            window = Window.of_stream(self.plan.region, self.plan.stream)
        prompts = waiting.prompts
        weights = dict(zip(prompts.prompts.tolist(), prompts.iterations.tolist(), strict=True))
        return GroupLedger(
            window,
            end=end,
            next_prompt=position,
            row_weights=waiting.rows.iterations.tolist(),
            row_prompts=waiting.rows.prompts.tolist(),
            in_flight=weights,
            drawing=dict(weights),
        )

    def want(self, execution: Execution) -> None:
        """Let an iteration have its rows as soon as they are there; a stream begins rounds for the latest."""
        if not self.wanted:
            self.ledger.next_iteration = execution.entry.iteration
        intake = Intake(self.plan.steps, self.plan.pools)
        execution.streams[self.plan.region.filter] = intake
        self.wanted.append((execution, intake))
        if self.plan.stream:
            self.iteration = execution
            self.clock.ask()

    def note_sync(self, iteration: int) -> None:
        """Note that rounds of a stream that begin from now on have the weights on entry to an iteration."""
        if self.plan.stream:
            self.ledger.weights = max(self.ledger.weights, iteration)

    def is_settled(self) -> bool:
        """Return whether weights may change: in order, only where no group and no round is under way."""
        is_free = not self.ledger.in_order or not self.rounds
        return is_free and self.ledger.may_change_weights()

    def position(self) -> int:
        """Return the rows of the source that ``waiting`` and iterations have."""
        return self.rounds[0].inputs.position if self.rounds else self.ledger.next_prompt

    def waiting(self) -> Waiting:
        """Return what a checkpoint has to have: all that was begun and not used.

        A lent round goes on with a part of the groups, so the state of a group is in the oldest round that
        has it.
        """
        position = self.position()
        unfinished = [round.inputs.unfinished for round in self.rounds]
        unfinished.append(self.unfinished)
        visited = np.zeros(0, np.int64)
        oldest = list[Waiting]()
        for groups in unfinished:
            numbers = groups.prompts.prompts
            oldest.append(groups.of_groups((numbers < position) & ~np.isin(numbers, visited)))
            visited = np.concatenate([visited, numbers])
        return replace(together(oldest), rows=self.buffer)

    def advance(self) -> list[Submission]:
        """Take up what has come in; return steps of rounds that go on, and of those that begin now.

        Raises:
            RunError: the region's filter keeps too little.
        """
        # 1. Rounds whose samples are drawn: their groups are finished or go on, and the next round may begin.
        submissions = list[Submission]()
        for pool, round in [*self.drawing_rounds.items()]:
            if self._is_drawn(round):
                del self.drawing_rounds[pool]
                submissions += self._finish_drawing(round)

        # 2. Rounds whose rewards are there: the rows that the filter kept go into the buffer.
        while self.rounds and self.rounds[0].execution.done:
            self._add_rows(self.rounds.popleft())

        # 3. Iterations whose rows are in the buffer take them.
        while self.wanted:
            self._enter(self.wanted[0][0])
            places = self.ledger.take(self._arrange)
            if places is None:
                break
            self._give(np.array(places, np.int64))

        # 4. New rounds begin, as far as the window has room.
        if self.plan.stream:
            return submissions + self._begin_stream_rounds()
        return submissions + self._begin_refill_round()

    def _is_drawn(self, round: Round) -> bool:
        """Return whether groups of a round are known to be finished; a refill goes on with whole rounds."""
        return round.is_drawn if self.plan.stream else round.execution.done

    def _finish_drawing(self, round: Round) -> list[Submission]:
        """Return the steps behind the samples of a round, which are taken if some group has finished."""
        steps_behind = round.inputs.steps[self.plan.drawing_steps :]
        if not self.plan.stream:  # a source may give other numbers of rows than it was asked for
            requested = range(round.inputs.position, self.ledger.next_prompt)
            self.ledger.correct_count(requested, round.new_groups())
        unfinished = round.finish_drawing(steps_behind)
        finished = round.finished_numbers()
        self.ledger.finish_drawing(finished)
        self.unfinished = together([self.unfinished, self._give_up_old(unfinished)])
        if self.plan.stream:
            self.clock.note(finished)
            if round.pool == self.plan.home:
                round.measure_speeds(self.shares)
                under_way = self.ledger.in_flight.keys() - {*finished}
                self.shares.go_on([number for number in self.shares.homes if number in under_way])
        if not finished:
            return []
        return [(round.execution, step) for step in steps_behind]

    def _give_up_old(self, groups: Waiting) -> Waiting:
        """Return unfinished groups without those that are too old."""
        numbers = groups.prompts.prompts
        old = self.ledger.old_groups(self.ledger.next_iteration, numbers.tolist())
        self.ledger.give_up(old)
        self.clock.drop(old)
        return groups.of_groups(~np.isin(numbers, old))

    def _add_rows(self, round: Round) -> None:
        """Put the rows of a round into the buffer."""
        rows, seen_rows = round.kept_rows()
        finished = round.finished_numbers()
        self.buffer = joined([self.buffer, rows])
        self.ledger.add_rows(finished, rows.prompts.tolist())
        self.ledger.count_filtered(seen_rows, len(rows))
        self.ended_rounds.append(round)
        self.counted_rounds += 1
        round.execution.release_previous()
        if self.plan.stream:
            self.clock.note(finished)
            self.clock.drop(np.setdiff1d(finished, self.buffer.prompts).tolist())
            self._check_filter()

    def _check_filter(self) -> None:
        """Raise an error where the filter of a stream keeps nothing: it would go on for ever."""
        region = self.plan.region
        ledger = self.ledger
        patience = region.rounds * (region.keep + 1) * region.rows / region.expected
        if ledger.seen_rows > patience and not ledger.stayed_rows:
            law = f"`{region.filter}` kept none of {ledger.seen_rows} rows that were sampled for an iteration"
            raise RunError(f"{law}\n  give data that it keeps more of, or another filter")

    def _enter(self, execution: Execution) -> None:
        """Drop what is too old for an iteration; a refill begins it, where it has not yet."""
        iteration = execution.entry.iteration
        self.ledger.next_iteration = iteration
        self._drop_old_rows()
        if self.plan.stream or self.iteration is execution:
            return
        self.iteration = execution
        self.ledger.weights = iteration
        self.unfinished = self._give_up_old(self.unfinished)
        if self.plan.region.policy and len(self.buffer):
            chosen_rows, other_rows = by_policy(
                self.buffer, self.plan.region.policy, iteration, self.plan.region.rows
            )
            self.set_aside = self.buffer.take(other_rows)
            self.buffer = self.buffer.take(chosen_rows)
            self.ledger.reorder(chosen_rows.tolist())

    def _drop_old_rows(self) -> None:
        young = np.array(self.ledger.drop_old(), np.int64)
        old = np.setdiff1d(np.arange(len(self.buffer)), young)
        if len(old):
            self.clock.drop(self.buffer.prompts[old].tolist())
            self.buffer = self.buffer.retain(young)

    def _arrange(self, places: Sequence[int]) -> Sequence[int]:
        """Return some places in the buffer in the order in which a stream takes them."""
        stream = self.plan.stream
        if stream is None or stream.order == "fifo":
            return places
        if not places:
            return places
        rows = self.buffer.take(np.array(places, np.int64))
        order = by_policy(rows, stream.order, self.ledger.next_iteration, self.plan.region.rows)
        return [places[index] for index in np.concatenate(order).tolist()]

    def _give(self, places: IntArray) -> None:
        """Give the iteration that comes next the rows at some places in the buffer."""
        execution, intake = self.wanted.popleft()
        name = self.plan.region.filter
        prompts_before = self.buffer.prompts.tolist()
        intake.used = self.buffer.take(places)
        self.buffer = self.buffer.retain(np.setdiff1d(np.arange(len(self.buffer)), places))
        if self.plan.stream:
            intake.times = self.clock.use(prompts_before, self.plan.region.rows)
            values = self._stream_metrics(intake.used, execution.entry.iteration)
        else:
            values = self._refill_metrics(intake.used, execution.entry.iteration)
        intake.values = {f"{name}/{key}": value for key, value in values.items()}
        if self.plan.stream:
            weights = dict(zip(intake.used.prompts.tolist(), intake.used.iterations.tolist(), strict=True))
            intake.spans = tuple(self.clock.spans(weights))
            for device, speed in enumerate(self.shares.speeds()):
                intake.values[f"perf/speed/{self.plan.home}-{device}"] = speed
        rounds = [round.execution for round in self.ended_rounds]
        self.ended_rounds = []
        self.ledger.forget_filtered()
        self.counted_drops = self.ledger.dropped_rows
        execution.add_rounds(name, rounds)
        if not self.plan.stream:
            self._put_back()
            self._drop_old_rows()
            self.unfinished = self._give_up_old(self.unfinished)

    def _put_back(self) -> None:
        """Let rows that a policy has not taken wait for the next iteration, before all others."""
        self.ledger.put_first(self.set_aside.prompts.tolist(), self.set_aside.iterations.tolist())
        self.buffer = joined([self.set_aside, self.buffer])
        self.set_aside = BufferedRows()

    def _begin_refill_round(self) -> list[Submission]:
        """Return the steps of the next round, if an iteration waits for one."""
        if self.rounds or not self.wanted:
            return []
        if len(self.ended_rounds) == self.plan.region.rounds:
            raise RunError(self._too_few_rows())
        unfinished = self.unfinished
        self.unfinished = Waiting()
        return self._begin(self.plan.home, unfinished, self.ledger.room())

    def _begin_stream_rounds(self) -> list[Submission]:
        """Return the steps of the next rounds, on the pool that generates and on one that is lent."""
        if self.iteration is None:
            return []
        submissions = list[Submission]()
        if len(self.rounds) < min(ROUNDS_AT_START + self.counted_rounds, MOST_ROUNDS):
            lent_groups = self._lend()
            if self.plan.home not in self.drawing_rounds:
                room = self.ledger.room()
                if room or len(self.unfinished.prompts):
                    unfinished = self.unfinished
                    self.unfinished = Waiting()
                    submissions += self._begin(self.plan.home, unfinished, room)
            if len(lent_groups.prompts):
                submissions += self._begin(self.plan.lender, lent_groups, 0)
        if self.plan.home not in self.drawing_rounds:
            self.clock.stand()
        return submissions

    def _begin(self, pool: str, unfinished: Waiting, count: int) -> list[Submission]:
        """Return the steps that draw a round on a pool: so many new groups, and unfinished ones."""
        assert self.iteration
        numbers = self.ledger.begin(count)
        steps = tuple(self._on_pool(step, pool) for step in self.plan.steps)
        inputs = RoundInputs(
            steps=steps,
            source=next(step for step in steps if step.node == self.plan.region.source),
            rollout=next((step for step in steps if step.unfinished), None),
            position=numbers.start,
            requested=count,
            unfinished=unfinished,
        )
        entry = self.iteration.entry
        if self.plan.stream:
            entry = Entry(self.ledger.weights, entry.versions)
            inputs = self._stream_inputs(inputs, pool, numbers)
            self.clock.begin(numbers)
        round = Round(self.iteration, entry, inputs, self.plan.collect, pool)
        self.rounds.append(round)
        self.drawing_rounds[pool] = round
        return [(round.execution, step) for step in steps[: self.plan.drawing_steps]]

    def _stream_inputs(self, inputs: RoundInputs, pool: str, numbers: range) -> RoundInputs:
        """Return the inputs of a round of a stream: its devices and versions are those of the moment."""
        homes = None
        if pool == self.plan.home:
            self.shares.deal(numbers, inputs.unfinished.prompts.prompts.tolist())
            homes = dict(self.shares.homes)
        return replace(
            inputs,
            counts_ahead=True,
            may_end_early=self.shares.deals,
            in_turn=self.plan.in_turn,
            homes=homes,
            serving=self.serving,
        )

    def _on_pool(self, step: Step, pool: str) -> Step:
        """Return a step with a pool in place of the one that generates."""
        if step.pool != self.plan.home or pool == self.plan.home:
            return step
        devices = step.devices if step.layout == ONE else tuple(range(self.plan.sizes[pool]))
        return replace(step, pool=pool, devices=devices)

    def _lend(self) -> Waiting:
        """Take out of the unfinished groups those of the next round on a pool that is lent.

        It gets as many as its share of the devices: those that it had in its latest round come first, then
        the latest to begin. There are none where no iteration waits, or where its rows are being measured
        already.
        """
        is_idle = bool(self.plan.lender) and self.plan.lender not in self.drawing_rounds
        if not is_idle or not self.wanted:
            return Waiting()
        measured = list[int]()
        for round in self.rounds:
            measured += round.finished_numbers()
        if self.ledger.is_coming(measured):
            return Waiting()
        numbers = self.unfinished.prompts.prompts
        count = len(numbers)
        if self.plan.home not in self.drawing_rounds:
            devices = self.plan.sizes[self.plan.lender] + self.plan.sizes[self.plan.home]
            count = count * self.plan.sizes[self.plan.lender] // devices
        order = np.lexsort((numbers, np.isin(numbers, self.lent_numbers)))
        is_lent = np.isin(np.arange(len(numbers)), order[len(numbers) - count :])
        self.lent_numbers = numbers[is_lent]
        lent_groups = self.unfinished.of_groups(is_lent)
        self.unfinished = self.unfinished.of_groups(~is_lent)
        return lent_groups

    def _refill_metrics(self, used: BufferedRows, iteration: int) -> dict[str, float]:
        """Return the metrics of a refill: see docs/metrics.md."""
        values: dict[str, float] = {"rounds": len(self.ended_rounds), "surplus": len(self.buffer)}
        if self.ledger.seen_rows:
            values["stayed"] = self.ledger.stayed_rows / self.ledger.seen_rows
        if self.plan.region.keep:
            values["waited"] = float((used.iterations < iteration).mean())
        if self.plan.rollout:
            numbers = self.unfinished.prompts.prompts.tolist()
            aborted = len(self.ledger.old_groups(iteration + 1, numbers))
            values["unfinished"] = len(numbers) - aborted
            values["aborted"] = aborted
        return values

    def _stream_metrics(self, used: BufferedRows, iteration: int) -> dict[str, float]:
        """Return the metrics of a stream: see docs/metrics.md."""
        ages = iteration - used.iterations
        values = {
            "age": float(ages.mean()),
            "age_max": float(ages.max()),
            "waiting": float(len(self.buffer)),
            "unfinished": float(len(self.ledger.drawing)),
        }
        if self.ledger.seen_rows:
            values["stayed"] = self.ledger.stayed_rows / self.ledger.seen_rows
        values["dropped"] = float(self.ledger.dropped_rows - self.counted_drops)
        values["rounds"] = float(len(self.ended_rounds))
        if self.plan.lender:
            lent_rounds = [round for round in self.ended_rounds if round.pool == self.plan.lender]
            values["lent_rounds"] = float(len(lent_rounds))
            values["lent_tokens"] = float(sum(round.generated_tokens() for round in lent_rounds))
        return values

    def _too_few_rows(self) -> str:
        """Return what is wrong where a refill has had all its rounds, and what mends it."""
        region = self.plan.region
        ledger = self.ledger
        rounds = len(self.ended_rounds)
        missing = region.rows - len(self.buffer)
        share = ledger.stayed_rows / max(ledger.seen_rows, 1)
        word = "round" if rounds == 1 else "rounds"
        law = f"`{region.filter}` kept {ledger.stayed_rows} of {ledger.seen_rows} rows ({share:.1%}) in "
        law += f"{rounds} {word}; {missing} more are wanted"
        unfinished = len(self.unfinished.prompts)
        if unfinished:
            law += f", and {unfinished} groups are not finished (raise `chunk` or `enough` of their rollout)"
        settings = f"{{rounds: {2 * rounds}, expected: {max(share, 0.01):.2g}}}"
        remedy = f"more rounds, or more at a time: {region.filter}.refill={settings}"
        return f"{law}\n  {remedy}\n  or give data that it keeps more of, or fewer rows (refill.rows)"


def by_policy(rows: BufferedRows, target: str, iteration: int, wanted: int) -> tuple[IntArray, IntArray]:
    """Return int64: the places of the rows that a policy takes, in its order, and those of the others."""
    groups = rows.groups(iteration)
    places = np.arange(len(rows))
    owner = np.repeat(np.arange(len(groups)), [group.rows for group in groups])
    groups_now = chosen(load_function(target), target.rpartition("/")[2], groups, wanted)
    taken_places = np.concatenate([places[:0], *(places[owner == group] for group in groups_now)])
    return taken_places, places[~np.isin(owner, groups_now)]
