"""Run a region that streams without devices: rounds, rewards, buffer, updates and syncs, group by group.

    gen      round | round | sync | round | round      a round: some tokens for every sample that is begun
    rewards        ───────          ───────            of the groups that finished in it, beside
    train    update 1  .....  sync  update 2           begins when its rows are in the buffer

What is begun and what an iteration takes is as ``Admission`` says, for the runtime too. A sample of n tokens
ends in the round that its n-th token is in, however many are begun: so a group is known to finish in a round
when it begins, and a round costs the same to simulate whether it has ten samples or ten thousand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from rlgraph.planning.admission import Admission, Stock
from rlgraph.planning.simulate import BrokenPlanError

MEASURED = 12  # iterations of which the mean is taken, once it is steady


@dataclass(frozen=True)
class RegionWork:
    """The seconds of a region's rounds on its pool."""

    rules: Admission
    lengths: Sequence[float]  # tokens of the samples that come, one after the other, again and again
    prompt: float  # tokens
    chunk: float  # tokens of a sample in a round
    servers: int
    slots: int  # samples of a server at a time
    decode: Callable[[float, float], float]  # samples of a server, tokens of each so far -> seconds of a step
    read: Callable[[float, float], float]  # samples of a server, tokens of each -> seconds to read them
    measured: tuple[float, float]  # seconds on the pool: of a round, of a row that has finished
    beside: tuple[float, float]  # elsewhere: until a round's rows are there, and of each row
    kept: float = 1.0  # the share of groups that the filter keeps
    lent: int = 0  # servers of the pool that trains, in rounds that begin while it waits for rows


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
    syncs: Sequence[float]  # when each was done
    update: float  # from when an iteration has its rows to when its update is done


class _Rounds:
    """The samples of a region that are drawn, and the seconds of its rounds."""

    def __init__(self, work: RegionWork, last: float) -> None:
        self.work, self.last, self.stock, self.round = work, last, Stock(work.rules), 0
        self.lengths: Iterator[float] = cycle(work.lengths)
        self.ending: dict[int, list[float]] = defaultdict(list)  # round -> tokens of the samples that end
        self.finishing: dict[int, list[int]] = defaultdict(list)  # round -> groups
        self.samples: dict[int, list[float]] = {}  # of each group that is drawn
        self.live, self.held = 0, 0.0  # samples that are drawn, and the tokens that they have
        self.first: dict[int, int] = {}  # group -> its first round
        self.fresh, self.credit = True, 0.0  # whether weights have changed since; groups that may be kept
        self.servers = work.servers

    def begin(self, lent: bool = False) -> tuple[float, list[int]] | None:
        """Begin a round, on the pool that is lent too or not; return its seconds and the groups that finish
        in it, or None: there is nothing."""
        new, work, before = self.stock.begin(self.last), self.work, self.servers
        self.servers = work.servers + work.lent * lent
        for number in new:
            mine = self.samples[number] = [*islice(self.lengths, work.rules.group)]
            self.first[number] = self.round
            for length in mine:
                self.ending[self._last(number, length)].append(length)
            self.finishing[self._last(number, max(mine))].append(number)
        old = self.live
        self.live += len(new) * work.rules.group
        if not self.live:
            return None
        seconds = work.read(len(new) / self.servers, work.prompt)
        if old and self.fresh:  # what samples have is read again with new weights
            seconds += work.read(old / self.servers, work.prompt + self.held / old)
        elif old and self.servers != before:  # or by the pool to which they go
            moved = old * work.lent / (work.servers + work.lent)
            seconds += work.read(moved / (work.lent if lent else work.servers), work.prompt + self.held / old)
        self.fresh = False
        return seconds + self._drawn(), self._ended()

    def _last(self, number: int, length: float) -> int:
        return self.first[number] + self._before(length)

    def _before(self, length: float) -> int:
        """Return how many rounds a sample takes before its last."""
        return max(math.ceil(length / self.work.chunk) - 1, 0)

    def _drawn(self) -> float:
        """Return the seconds of decoding: full slots until none waits, then a batch that shrinks."""
        work, ends = self.work, self.ending.get(self.round, [])
        rest = [length - self._before(length) * work.chunk for length in ends]
        full = self.live - len(ends)
        longest, tokens = (work.chunk if full else max(rest)), full * work.chunk + sum(rest)
        each = tokens / self.live
        context = work.prompt + self.held / self.live + each / 2
        samples = self.live / self.servers
        last = min(samples, work.slots)
        waits = (samples - last) * each / last * work.decode(last, context) if samples > last else 0.0
        self.held += tokens
        return waits + longest * work.decode(max(last * each / longest, 1.0), context)

    def _ended(self) -> list[int]:
        ends = self.ending.pop(self.round, [])
        self.live -= len(ends)
        self.held -= sum(ends)
        finished = self.finishing.pop(self.round, [])
        self.round += 1
        for number in finished:
            del self.samples[number], self.first[number], self.stock.unfinished[number]
        return finished

    def drop_old(self) -> None:
        """Leave out what is too old by now."""
        for number in self.stock.drop_old():
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        mine = self.samples.pop(number)
        self.finishing[self._last(number, max(mine))].remove(number)
        for length in mine:
            last = self._last(number, length)
            if last >= self.round:
                self.ending[last].remove(length)
                self.live -= 1
                self.held -= (self.round - self.first[number]) * self.work.chunk
        del self.first[number]

    def keep(self, groups: Sequence[int]) -> None:
        """Put groups whose rewards have come into the buffer, as far as the filter keeps them."""
        for number in groups:
            self.credit += self.work.kept
            kept = self.credit >= 1 - 1e-9
            self.credit -= kept
            self.stock.finish(number, self.work.rules.group if kept else 0)


def simulate_stream(work: RegionWork, update: float, sync: float) -> SteadyState:
    """Return the steady state of a region whose rows one update takes per iteration.

    Args:
        work: of its rounds.
        update: seconds from when an iteration has its rows to when its update is done.
        sync: seconds in which new weights come to the pool that generates; both pools stand still.

    Raises:
        BrokenPlanError: nothing is under way, and an iteration has not its rows.
    """
    warm = 3 * (work.rules.staleness + 2)
    run = _BothPools(work, update, sync)
    run.until(warm)
    start, busy, dropped = run.ends[-1], run.busy, run.stock.dropped
    run.ages, run.most = [], 0
    run.until(warm + MEASURED)
    seconds = (run.ends[-1] - start) / MEASURED
    lost = run.stock.dropped - dropped
    return SteadyState(
        seconds=seconds,
        generating=(run.busy - busy) / MEASURED,
        age=sum(run.ages) / len(run.ages),
        oldest=max(run.ages),
        dropped=lost / (MEASURED * work.rules.rows + lost),
        waiting=run.most,
        fill=max(start - warm * seconds, 0.0),
    )


def stream_course(
    work: RegionWork, update: float, sync: float, iterations: int, last: float = math.inf
) -> StreamCourse:
    """Return what becomes of each group in the first iterations, of a run of ``last``; other arguments are
    those of ``simulate_stream``."""
    run = _BothPools(work, update, sync, last)
    run.until(iterations)
    return StreamCourse(run.groups, run.ends[1:], update)


class _BothPools:
    """Both pools from one event to the next: a round ends, rows come, an update is done."""

    def __init__(self, work: RegionWork, update: float, sync: float, last: float = math.inf) -> None:
        self.work, self.update, self.sync, self.last = work, update, sync, last
        self.rounds = _Rounds(work, last)
        self.stock = self.rounds.stock
        self.time, self.drawn, self.trained, self.measured = 0.0, 0.0, 0.0, 0.0  # until when each is busy
        self.is_due, self.is_news = False, False  # a sync; rows that have come since one looked for them
        self.arrivals: list[tuple[float, list[int]]] = []
        self.ends, self.busy = [0.0], 0.0  # of syncs; seconds of the pool that generates
        self.ages, self.most = list[int](), 0
        self.groups: dict[int, list[float]] = {}  # as of ``StreamCourse``

    def until(self, syncs: int) -> None:
        """Go on until so many syncs are done."""
        while len(self.ends) <= syncs:
            while self.arrivals and self.arrivals[0][0] <= self.time:
                self.rounds.keep(self.arrivals.pop(0)[1])
                self.is_news = True
            self._train()
            self.most = max(self.most, len(self.stock.begun))
            if self.drawn <= self.time and not self._syncs_next():
                self._draw()
            next_one = [at for at, _ in self.arrivals[:1]]
            later = [at for at in (self.drawn, self.trained, *next_one) if at > self.time]
            if not later and len(self.ends) <= syncs:
                raise BrokenPlanError(f"iteration {self.stock.given} waits for rows, and none is under way")
            self.time = min(later, default=self.time)

    def _syncs_next(self) -> bool:
        return self.is_due and self.trained <= self.time and self.stock.may_change(self.last)

    def _train(self) -> None:
        """Sync the weights of an update that is done, or begin one whose rows are there."""
        if self._syncs_next() and self.drawn <= self.time:
            self.drawn = self.trained = self.time + self.sync
            self.busy += self.sync
            self.ends.append(self.trained)
            self.stock.now += 1
            self.is_due, self.is_news, self.rounds.fresh = False, True, True
        if self.is_news and not self.is_due and self.trained <= self.time:
            self.is_news = False
            if (taken := self.stock.take()) is not None:
                self.trained, self.is_due = self.time + self.update, True
                self.rounds.drop_old()
                self.ages += [self.stock.given - 1 - begun for _, begun in taken]
                for number in {number for number, _ in taken}:
                    self.groups[number].append(self.time)

    def _draw(self) -> None:
        """Begin a round, if anything is begun; its rows are measured one after the other.

        A pool that is lent to it is given back at its end.
        """
        first = self.stock.position
        lent = bool(self.work.lent) and not self.is_due and self.trained <= self.time
        if lent:  # unless its rows are measured already
            measured = [number for _, groups in self.arrivals for number in groups]
            known = self.stock.given, self.stock.begun, self.stock.prompts, self.stock.unused
            lent = not self.work.rules.is_coming(*known, measured)
        if (begun := self.rounds.begin(lent)) is None:
            return
        for number in range(first, self.stock.position):
            self.groups[number] = [self.stock.now, self.time]
        seconds, finished = begun
        rows = len(finished) * self.work.rules.group
        seconds += self.work.measured[0] + self.work.measured[1] * rows
        self.drawn, self.busy = self.time + seconds, self.busy + seconds
        self.trained = self.drawn if lent else self.trained
        for number in finished:
            self.groups[number].append(self.drawn)
        if finished:
            self.measured = max(self.measured, self.drawn) + self.work.beside[1] * rows
            self.arrivals.append((self.measured + self.work.beside[0], finished))
