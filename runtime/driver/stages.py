"""Measures the stages of a region that streams: how long each worked, waited for rows, and was held back.

    generation ─> steps behind it, by pool ─> buffer ─> update

An iteration is measured from when the one before had its rows to when it has its own, its update from when it
asks for them. The driver notes what no report of a step says: when groups came and went, and when nothing
might be begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.iteration import Execution, FinishedStep

GroupSpan = tuple[str, str, float, float]  # lane, name, start and end in seconds since the epoch
TimeSpan = tuple[float, float]
Spent = tuple[float, float, float]  # seconds: it worked, waited for rows, was held back


class Window(NamedTuple):
    """An iteration of a stream, up to when it has its rows. Seconds, the first three since the epoch."""

    since: float
    asked: float  # when it asked for rows
    until: float
    held: float  # in which generation might begin nothing
    buffer: Spent  # in which it had too few rows, none, and enough


class StreamClock:
    """Notes when groups of a region that streams were begun, drawn, in the buffer, and used."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}  # number of a prompt -> when each happened, so far
        self.lanes: list[float] = []  # when each became free
        self.since = self.asked = time.time()
        self.held, self.stands = 0.0, 0.0  # seconds in which nothing might begin; since when, 0: it may

    def ask(self) -> None:
        """Note that an iteration asks for rows."""
        self.asked = time.time()

    def note(self, numbers: Iterable[int]) -> None:
        """Note that groups have come a step further; a checkpoint has those not known to be begun."""
        now = time.time()
        for number in numbers:
            self.times.setdefault(number, [now]).append(now)

    def begin(self, numbers: Iterable[int]) -> None:
        """Note that a round begins, and some groups with it."""
        now = time.time()
        self.times |= {number: [now] for number in numbers}
        self.held, self.stands = self.held + (now - self.stands if self.stands else 0.0), 0.0

    def stand(self) -> None:
        """Note that no round may begin."""
        self.stands = self.stands or time.time()

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget groups that nobody will use."""
        for number in numbers:
            self.times.pop(number, None)

    def use(self, waiting: Sequence[int], rows: int) -> Window:
        """Return the window that ends now, with so many rows for an iteration among the groups that wait."""
        until, since, held = time.time(), self.since, self.held
        came = sorted(max(self.times.get(number, [0.0])[-1], since) for number in waiting)
        if self.stands:
            held, self.stands = held + until - self.stands, until
        self.since, self.held = until, 0.0
        buffer = came[rows - 1] - came[0], came[0] - since, until - came[rows - 1]
        return Window(since, self.asked, until, held, buffer)

    def spans(self, made: Mapping[int, int]) -> Iterator[GroupSpan]:
        """Yield when groups were drawn, and when they waited, each in the first lane that was free.

        ``made``: of each that is used now, the iteration with whose weights it was begun.
        """
        known = sorted((self.times.pop(number), number) for number in made if number in self.times)
        for (begun, drawn, *_), number in known:
            lane = next((at for at, end in enumerate(self.lanes) if end <= begun), len(self.lanes))
            self.lanes[lane : lane + 1] = [self.since]
            yield f"group {lane}", f"prompt {number}, weights {made[number]}", begun, drawn
            yield f"group {lane}", f"prompt {number} waits", drawn, self.since


def stages(execution: Execution) -> dict[str, float]:
    """Return the seconds of each stage of the regions that stream: see docs/metrics.md."""
    values: dict[str, float] = {}
    for name, stream in execution.streams.items():
        if window := stream.window:
            ran = [one.ran for one in execution.rounds[name]]
            rounds = [{item.step.id: _span(item) for item in each if item.reports} for each in ran]
            steps = [step for step in execution.steps if not step.facts.collects]
            own = [FinishedStep(step, made) for step in steps if (made := execution.rows.reports[step.id])]
            drawn = next(step.id for step in stream.steps if step.leaves)
            behind = [step for step in stream.steps if step.id > drawn]
            busy = covered(one[drawn] for one in rounds)
            whole = window.until - window.since
            told = {
                "generation": (busy, whole - busy - window.held, window.held),
                **{f"behind/{pool}": spent for pool, spent in _behind(behind, rounds, whole).items()},
                "buffer": window.buffer,
                "update": _update(window, own),
            }
            for stage, seconds in told.items():
                for what, took in zip(("busy", "starved", "held"), seconds, strict=True):
                    values[f"perf/stage/{stage}/{what}"] = max(took, 0.0)
    return values


def _behind(
    steps: Sequence[Step], rounds: Sequence[Mapping[int, TimeSpan]], whole: float
) -> dict[str, Spent]:
    """Return those of each pool; one is held back that has rows, and whose devices or CPUs are not free."""
    spent = {}
    for pool in dict.fromkeys(step.pool for step in steps):
        pairs = [(step, one) for one in rounds for step in steps if step.pool == pool and step.id in one]
        busy = covered(one[step.id] for step, one in pairs)
        able = covered((_ready(step, one), one[step.id][1]) for step, one in pairs)
        spent[pool] = busy, whole - able, able - busy
    return spent


def _ready(step: Step, one: Mapping[int, TimeSpan]) -> float:
    """Return when a step of a round had what it reads."""
    start, _ = one[step.id]
    return min(start, max((one[number][1] for number in step.after if number in one), default=start))


def _update(window: Window, own: Sequence[FinishedStep]) -> Spent:
    """Return those of what is behind the buffer; weights that go wait for the pool that gets them."""
    syncs = [ran for ran in own if ran.step.facts.syncs]
    starts = [[report.start for report in ran.reports.values()] for ran in syncs]
    held = sum(max(each) - min(each) for each in starts)
    there = max((_span(ran)[1] for ran in syncs), default=window.asked)
    busy = covered(map(_span, own)) - held
    return busy, window.until - max(there, window.asked), held


def _span(ran: FinishedStep) -> TimeSpan:
    reports = ran.reports.values()
    return min(report.start for report in reports), max(report.end for report in reports)


def covered(spans: Iterable[TimeSpan]) -> float:
    """Return the seconds in which there is at least one span.

    Example:
        >>> covered([(3, 4), (0, 2), (1, 2.5)])
        3.5
    """
    seconds, last = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(end - max(start, last), 0.0)
        last = max(last, end)
    return seconds
