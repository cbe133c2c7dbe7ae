"""Run a region that streams without devices: rounds, rewards, buffer, updates and syncs, group by group.

    gen      round | round | sync | round | round      a round: some tokens for every sample that is drawn
    rewards        ───────          ───────            of the groups that finished in it, elsewhere
    train    update 1  .....  sync  update 2           begins when its rows are in the buffer

Which groups begin and which rows an iteration takes is what ``GroupLedger`` says, for runs too. A sample of n
tokens ends in the round that its n-th token is in, however many are drawn: so a group is known to finish in a
round when it begins, and a round costs the same to simulate whether it has ten samples or ten thousand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from rlgraph.streaming.ledger import GroupLedger
from rlgraph.streaming.rules import Window

STEADY_ITERATIONS = 12  # iterations of which the mean is taken, once it is steady


class StalledStreamError(AssertionError):
    """An iteration would wait for rows for ever, as no group is in flight."""


@dataclass(frozen=True)
class RegionWork:
    """The seconds of a region's rounds on its pool."""

    window: Window
    lengths: Sequence[float]  # tokens of the samples that come, one after the other, again and again
    prompt: float  # tokens
    chunk: float  # tokens of a sample in a round
    servers: int
    slots: int  # samples of a server at a time
    decode: Callable[[float, float], float]  # samples of a server, tokens of each so far -> seconds of a step
    read: Callable[[float, float], float]  # samples of a server, tokens of each -> seconds to read them
    measuring_on_pool: tuple[float, float]  # seconds on the pool: of a round, of a row that has finished
    measuring_elsewhere: tuple[float, float]  # seconds until a round's rows are there, and of each row
    kept_share: float = 1.0  # the share of groups that the filter keeps
    lent_servers: int = 0  # servers of the pool that trains, in rounds that begin while it waits for rows


@dataclass(frozen=True)
class SteadyState:
    """An iteration in the steady state: seconds, ages in updates, rows."""

    seconds: float
    generating: float  # seconds in which the pool that generates is busy
    age: float
    oldest: int
    dropped: float  # the share of rows that are dropped as they would be too old
    waiting: int  # the most rows in the buffer
    fill: float  # seconds that the first iterations take beyond as many in the steady state


@dataclass(frozen=True)
class StreamCourse:
    """Some iterations of a region, in seconds."""

    # prompt -> the iteration of the weights that it was begun with, when it was begun, drawn and used, so far
    groups: Mapping[int, Sequence[float]]
    syncs: Sequence[float]  # when each ended
    update: float  # from when an iteration has its rows to when its update is done


@dataclass
class DrawnGroup:
    """A group whose samples are drawn."""

    first_round: int
    lengths: Sequence[float]  # tokens of its samples


class RoundSimulator:
    """The samples of a region that are drawn, and the seconds of its rounds.

    Invariants:
        - ``drawing_groups`` has the groups that the ledger's ``drawing`` has.
        - ``live_samples`` and ``live_tokens`` are sums over samples whose last round has not ended.
    """

    def __init__(self, work: RegionWork, ledger: GroupLedger) -> None:
        self.work = work
        self.ledger = ledger
        self.round = 0
        self.coming_lengths: Iterator[float] = cycle(work.lengths)
        self.ending_samples: dict[int, list[float]] = defaultdict(list)  # round -> tokens of samples that end
        self.finishing_groups: dict[int, list[int]] = defaultdict(list)  # round -> prompts
        self.drawing_groups: dict[int, DrawnGroup] = {}
        self.live_samples = 0
        self.live_tokens = 0.0
        self.has_new_weights = True  # since the last round
        self.keep_credit = 0.0  # groups that the filter may keep
        self.servers = work.servers

    def begin(self, on_lent_pool: bool) -> tuple[float, list[int]] | None:
        """Begin a round; return its seconds and the groups that finish in it, or None where nothing is drawn.

        ``on_lent_pool``: whether it runs on the pool that is lent, too.
        """
        work = self.work
        servers_before = self.servers
        self.servers = work.servers + (work.lent_servers if on_lent_pool else 0)
        new_groups = self.ledger.begin_groups()
        for number in new_groups:
            self._add(number)
        old_samples = self.live_samples
        self.live_samples += len(new_groups) * work.window.group
        if not self.live_samples:
            return None
        seconds = work.read(len(new_groups) / self.servers, work.prompt)
        if old_samples:
            seconds += self._read_again(old_samples, servers_before, on_lent_pool)
        self.has_new_weights = False
        seconds += self._decode_seconds()
        return seconds, self._end_round()

    def drop_old(self) -> None:
        """Give up rows and groups that are too old by now."""
        ledger = self.ledger
        ledger.drop_old()
        old = ledger.old_groups(ledger.next_iteration, ledger.drawing)
        ledger.give_up(old)
        for number in old:
            self._remove(number)

    def add_measured(self, groups: Sequence[int]) -> None:
        """Put groups whose rewards have come into the buffer, as far as the filter keeps them."""
        kept_rows = list[int]()
        for number in groups:
            self.keep_credit += self.work.kept_share
            if self.keep_credit >= 1 - 1e-9:
                self.keep_credit -= 1
                kept_rows += [number] * self.work.window.group
        old = self.ledger.old_groups(self.ledger.next_iteration, groups)
        self.ledger.add_rows(groups, kept_rows)
        if old:
            self.ledger.drop_old()

    def _add(self, number: int) -> None:
        lengths = [*islice(self.coming_lengths, self.work.window.group)]
        group = self.drawing_groups[number] = DrawnGroup(self.round, lengths)
        for length in lengths:
            self.ending_samples[self._last_round(group, length)].append(length)
        self.finishing_groups[self._last_round(group, max(lengths))].append(number)

    def _remove(self, number: int) -> None:
        group = self.drawing_groups.pop(number)
        self.finishing_groups[self._last_round(group, max(group.lengths))].remove(number)
        for length in group.lengths:
            last_round = self._last_round(group, length)
            if last_round >= self.round:
                self.ending_samples[last_round].remove(length)
                self.live_samples -= 1
                self.live_tokens -= (self.round - group.first_round) * self.work.chunk

    def _last_round(self, group: DrawnGroup, length: float) -> int:
        return group.first_round + self._full_rounds(length)

    def _full_rounds(self, length: float) -> int:
        """Return how many rounds a sample takes before its last."""
        return max(math.ceil(length / self.work.chunk) - 1, 0)

    def _read_again(self, samples: int, servers_before: int, on_lent_pool: bool) -> float:
        """Return the seconds in which servers read what samples have, as weights are new or samples move."""
        work = self.work
        context = work.prompt + self.live_tokens / samples
        if self.has_new_weights:
            return work.read(samples / self.servers, context)
        if self.servers == servers_before:
            return 0.0
        moving = samples * work.lent_servers / (work.servers + work.lent_servers)
        readers = work.lent_servers if on_lent_pool else work.servers
        return work.read(moving / readers, context)

    def _decode_seconds(self) -> float:
        """Return the seconds of decoding: full slots until no sample waits, then a batch that shrinks."""
        work = self.work
        ends = self.ending_samples.get(self.round, [])
        last_tokens = [length - self._full_rounds(length) * work.chunk for length in ends]
        going_on = self.live_samples - len(ends)
        longest = work.chunk if going_on else max(last_tokens)
        tokens = going_on * work.chunk + sum(last_tokens)
        mean = tokens / self.live_samples
        context = work.prompt + self.live_tokens / self.live_samples + mean / 2
        samples = self.live_samples / self.servers
        batch = min(samples, work.slots)
        full_seconds = 0.0
        if samples > batch:
            full_seconds = (samples - batch) * mean / batch * work.decode(batch, context)
        self.live_tokens += tokens
        return full_seconds + longest * work.decode(max(batch * mean / longest, 1.0), context)

    def _end_round(self) -> list[int]:
        ends = self.ending_samples.pop(self.round, [])
        self.live_samples -= len(ends)
        self.live_tokens -= sum(ends)
        finished = self.finishing_groups.pop(self.round, [])
        self.round += 1
        self.ledger.finish_drawing(finished)
        for number in finished:
            del self.drawing_groups[number]
        return finished


def simulate_stream(work: RegionWork, update: float, sync: float) -> SteadyState:
    """Return the steady state of a region whose rows one update takes per iteration.

    Args:
        work: of its rounds.
        update: seconds from when an iteration has its rows to when its update is done.
        sync: seconds in which new weights come to the pool that generates; both pools stand still.

    Raises:
        StalledStreamError: no group is in flight, and an iteration misses rows.
    """
    filling_iterations = 3 * (work.window.staleness + 2)
    run = PoolSimulator(work, update, sync)
    run.until(filling_iterations)
    start = run.sync_ends[-1]
    busy_before = run.busy
    dropped_before = run.ledger.dropped_rows
    run.ages = []
    run.most_waiting = 0
    run.until(filling_iterations + STEADY_ITERATIONS)
    seconds = (run.sync_ends[-1] - start) / STEADY_ITERATIONS
    dropped = run.ledger.dropped_rows - dropped_before
    return SteadyState(
        seconds=seconds,
        generating=(run.busy - busy_before) / STEADY_ITERATIONS,
        age=sum(run.ages) / len(run.ages),
        oldest=max(run.ages),
        dropped=dropped / (STEADY_ITERATIONS * work.window.rows + dropped),
        waiting=run.most_waiting,
        fill=max(start - filling_iterations * seconds, 0.0),
    )


def stream_course(
    work: RegionWork, update: float, sync: float, iterations: int, end: float = math.inf
) -> StreamCourse:
    """Return what becomes of each group in the first iterations of a run.

    Args:
        work: as of ``simulate_stream``.
        update: as of ``simulate_stream``.
        sync: as of ``simulate_stream``.
        iterations: the iterations that are simulated.
        end: the iterations of the run.
    """
    run = PoolSimulator(work, update, sync, end)
    run.until(iterations)
    return StreamCourse(run.groups, run.sync_ends[1:], update)


class PoolSimulator:
    """Both pools from one event to the next: a round ends, rows come, an update is done.

    Invariants:
        - ``arrivals`` stand in the order of their times.
        - From the end of an update to the end of its sync, no update begins (``sync_is_due``).
        - A pool does one thing at a time: until ``generates_until`` and ``trains_until`` they are busy.
    """

    def __init__(self, work: RegionWork, update: float, sync: float, end: float = math.inf) -> None:
        self.work = work
        self.update_seconds = update
        self.sync_seconds = sync
        self.ledger = GroupLedger(work.window, end)
        self.rounds = RoundSimulator(work, self.ledger)
        self.time = 0.0
        self.generates_until = 0.0
        self.trains_until = 0.0
        self.measures_until = 0.0
        self.sync_is_due = False
        self.has_news = False  # rows or weights came since an update looked for its rows
        self.arrivals: list[tuple[float, list[int]]] = []
        self.sync_ends = [0.0]
        self.busy = 0.0  # seconds of the pool that generates
        self.ages = list[int]()
        self.most_waiting = 0
        self.groups: dict[int, list[float]] = {}  # as of ``StreamCourse``

    def until(self, syncs: int) -> None:
        """Go on until so many syncs are done."""
        while len(self.sync_ends) <= syncs:
            self._receive_rows()
            self._sync()
            self._update()
            self.most_waiting = max(self.most_waiting, len(self.ledger.row_weights))
            if self.generates_until <= self.time and not self._syncs_next():
                self._generate()
            self._wait(syncs)

    def _wait(self, syncs: int) -> None:
        """Go on to the next event."""
        times = [self.generates_until, self.trains_until]
        if self.arrivals:
            times.append(self.arrivals[0][0])
        later = [time for time in times if time > self.time]
        if not later and len(self.sync_ends) <= syncs:
            law = f"iteration {self.ledger.next_iteration} waits for rows, and no group is in flight"
            raise StalledStreamError(law)
        self.time = min(later, default=self.time)

    def _receive_rows(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.time:
            _, groups = self.arrivals.pop(0)
            self.rounds.add_measured(groups)
            self.has_news = True

    def _syncs_next(self) -> bool:
        return self.sync_is_due and self.trains_until <= self.time and self.ledger.may_change_weights()

    def _sync(self) -> None:
        """Bring the weights of an update that is done to the pool that generates."""
        if not self._syncs_next() or self.generates_until > self.time:
            return
        end = self.time + self.sync_seconds
        self.generates_until = end
        self.trains_until = end
        self.busy += self.sync_seconds
        self.sync_ends.append(end)
        self.ledger.weights += 1
        self.sync_is_due = False
        self.has_news = True
        self.rounds.has_new_weights = True

    def _update(self) -> None:
        """Begin an update whose rows are there."""
        if not self.has_news or self.sync_is_due or self.trains_until > self.time:
            return
        self.has_news = False
        row_prompts, row_weights = self.ledger.row_prompts, self.ledger.row_weights
        places = self.ledger.take()
        if places is None:
            return
        self.trains_until = self.time + self.update_seconds
        self.sync_is_due = True
        self.rounds.drop_old()
        iteration = self.ledger.next_iteration - 1
        self.ages += [iteration - row_weights[place] for place in places]
        for number in {row_prompts[place] for place in places}:
            self.groups[number].append(self.time)

    def _generate(self) -> None:
        """Begin a round, if anything is drawn; its rows are measured one after the other.

        A pool that is lent to it is given back at its end.
        """
        first_new = self.ledger.next_prompt
        is_lent = self._is_lent()
        simulated = self.rounds.begin(is_lent)
        if simulated is None:
            return
        seconds, finished = simulated
        for number in range(first_new, self.ledger.next_prompt):
            self.groups[number] = [self.ledger.weights, self.time]
        round_seconds, row_seconds = self.work.measuring_on_pool
        rows = len(finished) * self.work.window.group
        seconds += round_seconds + row_seconds * rows
        self.generates_until = self.time + seconds
        self.busy += seconds
        if is_lent:
            self.trains_until = self.generates_until
        for number in finished:
            self.groups[number].append(self.generates_until)
        if finished:
            delay, row_seconds = self.work.measuring_elsewhere
            start = max(self.measures_until, self.generates_until)
            self.measures_until = start + row_seconds * rows
            self.arrivals.append((self.measures_until + delay, finished))

    def _is_lent(self) -> bool:
        """Return whether the pool that trains waits for rows that are not measured already."""
        if not self.work.lent_servers or self.sync_is_due or self.trains_until > self.time:
            return False
        measured = [number for _, groups in self.arrivals for number in groups]
        return not self.ledger.is_coming(measured)
