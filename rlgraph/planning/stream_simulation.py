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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random

from rlgraph.planning.admission import Admission
from rlgraph.planning.simulate import BrokenPlanError

MEASURED = 12  # iterations of which the mean is taken, once it is steady
SEED = 20  # of the order in which lengths come


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
    reads_again: float  # how often a round reads what a sample has; 0: where weights have changed alone
    measured: tuple[float, float]  # seconds on the pool: of a round, of a row that has finished
    beside: tuple[float, float]  # the same elsewhere
    kept: float = 1.0  # the share of groups that the filter keeps


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


@dataclass
class Stock:
    """What was begun and not used: the same account as the runtime keeps, with numbers alone.

    Example:
        >>> stock = Stock(Admission(rows=4, group=2, staleness=0))
        >>> [*stock.begin()], stock.begin(), stock.take()
        ([0, 1], range(2, 2), None)
        >>> stock.finish(1, 2), stock.finish(0, 2), stock.take()
        (None, None, [(1, 0), (1, 0), (0, 0), (0, 0)])
    """

    rules: Admission
    begun: list[int] = field(default_factory=list)  # of each row in the buffer, when it was begun
    prompts: list[int] = field(default_factory=list)
    unused: dict[int, int] = field(default_factory=dict)  # prompt of a group that is not there -> the same
    unfinished: dict[int, int] = field(default_factory=dict)  # those that are still drawn
    position: int = 0  # the next prompt
    now: int = 0  # the iteration whose weights generate
    given: int = 0  # the iteration that has its rows next
    dropped: int = 0  # rows

    def room(self, last: float = math.inf) -> int:
        """Return how many groups more may be begun, in a run of ``last`` iterations."""
        iterations = int(min(self.now + 1 + self.rules.staleness, last)) - self.given
        return self.rules.room(iterations, len(self.begun), len(self.unused), len(self.unfinished))

    def begin(self, last: float = math.inf) -> range:
        """Begin as many groups as may be; return their prompts."""
        new = range(self.position, self.position + self.room(last))
        self.unused |= dict.fromkeys(new, self.now)
        self.unfinished |= dict.fromkeys(new, self.now)
        self.position += len(new)
        return new

    def may_change(self, last: float = math.inf) -> bool:
        """Return whether new weights may come: in order, only where nothing is begun and not drawn."""
        return self.rules.order != "in_order" or not (self.unused or self.room(last))

    def drop_old(self) -> list[int]:
        """Drop rows and unfinished groups that are too old by now; return the groups."""
        young = [p for p, begun in enumerate(self.begun) if self.rules.is_young(begun, self.given)]
        old = [n for n, begun in self.unfinished.items() if not self.rules.is_young(begun, self.given)]
        for number in old:
            del self.unfinished[number], self.unused[number]
        self.dropped += len(self.begun) - len(young) + len(old) * self.rules.group
        self._keep(young)
        return old

    def finish(self, number: int, kept: int) -> None:
        """Put the rows of a group that the filter kept into the buffer, unless they are too old by now."""
        self.unfinished.pop(number, None)
        begun = self.unused.pop(number)
        if not self.rules.is_young(begun, self.given):
            self.dropped, kept = self.dropped + kept, 0
        self.begun += [begun] * kept
        self.prompts += [number] * kept

    def take(self) -> list[tuple[int, int]] | None:
        """Return prompt and begin of the rows that the next iteration takes; None while some are missing."""
        places = self.rules.chosen(self.given, self.begun, self.prompts, self.unused)
        if places is None:
            return None
        taken = [(self.prompts[place], self.begun[place]) for place in places]
        self._keep(sorted({*range(len(self.begun))} - {*places}))
        self.given += 1
        return taken

    def _keep(self, places: Sequence[int]) -> None:
        self.begun = [self.begun[place] for place in places]
        self.prompts = [self.prompts[place] for place in places]


class _Rounds:
    """The samples of a region that are drawn, and the seconds of its rounds."""

    def __init__(self, work: RegionWork) -> None:
        self.work, self.stock, self.round = work, Stock(work.rules), 0
        lengths = [*work.lengths]
        Random(SEED).shuffle(lengths)
        self.lengths: Iterator[float] = cycle(lengths)
        self.ending: dict[int, list[float]] = defaultdict(
            list
        )  # round -> samples that end in it: their tokens
        self.finishing: dict[int, list[int]] = defaultdict(list)  # round -> groups
        self.samples: dict[int, list[float]] = {}  # of each group that is drawn
        self.live, self.held = 0, 0.0  # samples that are drawn, and the tokens that they have
        self.first: dict[int, int] = {}  # group -> its first round
        self.fresh, self.credit = True, 0.0  # whether weights have changed since; groups that may be kept

    def begin(self) -> tuple[float, list[int]] | None:
        """Begin a round; return its seconds and the groups that finish in it, or None: there is nothing."""
        new, work = self.stock.begin(), self.work
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
        seconds = work.read(len(new) / work.servers, work.prompt)
        if again := old and (work.reads_again or float(self.fresh)):
            seconds += again * work.read(old / work.servers, work.prompt + self.held / old)
        self.fresh = False
        return seconds + self._drawn(), self._ended()

    def _last(self, number: int, length: float) -> int:
        return self.first[number] + max(math.ceil(length / self.work.chunk), 1) - 1

    def _drawn(self) -> float:
        """Return the seconds of decoding: full slots until none waits, then a batch that shrinks."""
        work, ends = self.work, self.ending.get(self.round, [])
        rest = [length - max(math.ceil(length / work.chunk) - 1, 0) * work.chunk for length in ends]
        full = self.live - len(ends)
        longest, tokens = (work.chunk if full else max(rest)), full * work.chunk + sum(rest)
        each = tokens / self.live
        context = work.prompt + self.held / self.live + each / 2
        samples = self.live / work.servers
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
        for length in self.samples.pop(number):
            last = self._last(number, length)
            if last >= self.round:
                self.ending[last].remove(length)
                self.live -= 1
                self.held -= (self.round - self.first[number]) * self.work.chunk
            self.finishing[last] = [other for other in self.finishing[last] if other != number]
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
    rounds, stock = (run := _Rounds(work)), run.stock
    time, drawn, trained, elsewhere, due = 0.0, 0.0, 0.0, 0.0, False
    news = False  # whether rows have come since the buffer was looked through
    arrivals: list[tuple[float, list[int]]] = []
    ends, busy, ages, most = [0.0], 0.0, list[int](), 0
    since, lost = 0.0, 0  # until it was steady: seconds in which the pool was busy, rows that were dropped
    while len(ends) <= warm + MEASURED:
        while arrivals and arrivals[0][0] <= time:
            rounds.keep(arrivals.pop(0)[1])
            news = True
        if due and max(drawn, trained) <= time and stock.may_change():
            drawn = trained = time + sync
            busy, due, rounds.fresh = busy + sync, False, True
            ends.append(trained)
            stock.now += 1
            news = True
            since, lost = (busy, stock.dropped) if len(ends) == warm + 1 else (since, lost)
        elif news and not due and trained <= time:
            news = False
            if (taken := stock.take()) is not None:
                trained, due = time + update, True
                rounds.drop_old()
                ages += [stock.given - 1 - begun for _, begun in taken] if len(ends) > warm else []
        if len(ends) > warm:
            most = max(most, len(stock.begun))
        syncs_next = due and trained <= time and stock.may_change()
        if drawn <= time and not syncs_next and (begun := rounds.begin()) is not None:
            seconds, finished = begun
            rows = len(finished) * work.rules.group
            seconds += work.measured[0] + work.measured[1] * rows
            drawn, busy = time + seconds, busy + seconds
            if finished:
                elsewhere = max(elsewhere, drawn) + work.beside[0] + work.beside[1] * rows
                arrivals.append((elsewhere, finished))
        later = [t for t in (drawn, trained, *(at for at, _ in arrivals[:1])) if t > time]
        if not later:
            raise BrokenPlanError(f"iteration {stock.given} waits for rows, and none is under way")
        time = min(later)
    count = len(ends) - 1 - warm
    seconds = (ends[-1] - ends[warm]) / count
    age, oldest = sum(ages) / len(ages), max(ages)
    dropped = (stock.dropped - lost) / (count * work.rules.rows + stock.dropped - lost)
    fill = max(ends[warm] - warm * seconds, 0.0)
    return SteadyState(seconds, (busy - since) / count, age, oldest, dropped, most, fill)
