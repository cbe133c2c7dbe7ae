"""Writes a plan and a run as Chrome trace events (Trace Event Format), which ui.perfetto.dev opens.

Pools are processes, devices threads, memory and requests in flight counters, columns and weights arrows (flow
events), iterations spans over them (async events). What is predicted and what was measured are two groups of
processes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rlgraph.costs.workload import Workload, workload
from rlgraph.ir.plan import Plan, Step
from rlgraph.printing.plan_text import sentence
from rlgraph.view.drawings.boxes import title
from rlgraph.view.recorded import Measured
from rlgraph.view.timeline import arrows, expected, footprint, memory, places

GROUPS = ("predicted", "measured")
FIRST = (1, 1001)  # the numbers of the processes of each group begin so
TraceEvent = dict[str, Any]
SpanKey = tuple[str, int, int]  # phase, step, iteration
CounterValue = tuple[str, float, str, dict[str, int]]  # pool, seconds, name, values by series
POINTS = 8  # points of the curve of a rollout's requests
HELD, MOST, REQUESTS = "memory of a device", "most memory so far", "requests in flight"


def trace(plan: Plan, measured: Sequence[Measured] = (), lines: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the JSON text of a trace: some iterations as they are expected, and those that were measured.

    ``lines``: the metrics of the run, which hold its memory.
    """
    bars = [
        Measured(event.step.id, "train", event.iteration, pool, device, event.start, event.end)
        for event in expected(plan)[0]
        for pool, number in places(plan, event.step)
        for device in [f"{number} beside" if event.step.beside else number]
    ]
    counts = [*predicted_memory(plan, bars), *predicted_requests(plan, bars)]
    events = [*_Group(plan, 0, bars, counts).events()]
    if measured:
        bars = _clipped(measured)
        counts = [*measured_memory(plan, bars, lines), *measured_requests(plan, bars)]
        events += _Group(plan, 1, bars, counts).events()
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _clipped(bars: Iterable[Measured]) -> list[Measured]:
    """Return a device's steps one behind the other; a file's whole microseconds may overlap by one or two."""
    clipped: list[Measured] = []
    by_place = sorted(bars, key=lambda bar: (bar.pool, str(bar.device), bar.start, bar.end))
    for _, lane in groupby(by_place, key=lambda bar: (bar.pool, bar.device)):
        mine = [*lane]
        ends = [*(bar.start for bar in mine[1:]), float("inf")]
        for bar, following in zip(mine, ends, strict=True):
            clipped.append(replace(bar, end=max(bar.start, min(bar.end, following))))
    return clipped


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@dataclass
class _Group:
    """Trace events of the prediction, or of the measurement."""

    plan: Plan
    number: int
    bars: Sequence[Measured]
    counts: Sequence[CounterValue]

    def events(self) -> Iterator[TraceEvent]:
        yield from self._names()
        yield from map(self._slice, self.bars)
        yield from self._flows()
        yield from self._iterations()
        for pool, at, name, values in self.counts:
            yield self._event("C", name, pool, at, args=values)

    def _event(
        self, phase: str, name: str, pool: str, at: float = 0, device: int | str = 0, **more: Any
    ) -> TraceEvent:
        """Return an event of a device, ``at`` seconds; ``phase`` is the format's letter for what it is."""
        place = {"pid": self._pid(pool), "tid": self._lane(pool, device)}
        return {"name": name, "ph": phase, "ts": _micro(at), **place, **more}

    def _pid(self, pool: str) -> int:
        return FIRST[self.number] + [*self.plan.pools].index(pool)

    def _lane(self, pool: str, device: int | str) -> int:
        """Return a number for a device, or for what is beside it."""
        number, _, beside = str(device).partition(" ")
        return int(number) + (self.plan.pools[pool] if beside else 0)

    def _names(self) -> Iterator[TraceEvent]:
        for pool, devices in self.plan.pools.items():
            group = GROUPS[self.number]
            yield self._event("M", "process_name", pool, args={"name": f"{group}: pool {pool}"})
            yield self._event("M", "process_labels", pool, args={"labels": group})
            yield self._event("M", "process_sort_index", pool, args={"sort_index": self._pid(pool)})
            lanes = [*map(str, range(devices))]
            beside = {str(bar.device) for bar in self.bars if bar.pool == pool}.difference(lanes)
            for lane in (*lanes, *sorted(beside)):
                order = {"sort_index": self._lane(pool, lane)}
                yield self._event("M", "thread_name", pool, 0, lane, args={"name": f"device {lane}"})
                yield self._event("M", "thread_sort_index", pool, 0, lane, args=order)

    def _slice(self, bar: Measured) -> TraceEvent:
        step = self.plan.phases[bar.phase][bar.step - 1]
        args = {"step": step.id, "iteration": bar.iteration, "phase": bar.phase, "does": sentence(step)}
        args |= {"because": step.because} if step.because else {}
        took, kind = round(_micro(bar.end) - _micro(bar.start), 3), f"{GROUPS[self.number]},{step.kind}"
        return self._event("X", title(step), bar.pool, bar.start, bar.device, cat=kind, dur=took, args=args)

    def _flows(self) -> Iterator[TraceEvent]:
        """Yield a pair of events for each arrow, on the first device of either step."""
        first: dict[SpanKey, Measured] = {}
        for bar in self.bars:
            first.setdefault((bar.phase, bar.step, bar.iteration), bar)
        offset = min((bar.iteration for bar in self.bars if bar.phase == "train"), default=0)
        last = max((bar.iteration for bar in self.bars), default=0)
        number, kind = self.number * 1_000_000_000, f"{GROUPS[self.number]},flow"
        for arrow in arrows(self.plan, last - offset + 1):
            ends = [("train", step, iteration + offset) for step, iteration in (arrow.source, arrow.target)]
            if all(end in first for end in ends):
                number += 1
                for phase, bar in zip("sf", [first[end] for end in ends], strict=True):
                    # an arrow is bound to the slice around its time: the middle is in no other
                    at, bound = (bar.start + bar.end) / 2, {"bp": "e"} if phase == "f" else {}
                    event = self._event(phase, arrow.name, bar.pool, at, bar.device, cat=kind, id=number)
                    yield event | bound

    def _iterations(self) -> Iterator[TraceEvent]:
        """Yield a span from the first step of an iteration to its last one."""
        pool, kind = next(iter(self.plan.pools)), f"{GROUPS[self.number]},iteration"
        train = [bar for bar in self.bars if bar.phase == "train"]
        for iteration in dict.fromkeys(bar.iteration for bar in train):
            mine = [bar for bar in train if bar.iteration == iteration]
            name, id = f"iteration {iteration}", f"{self.number}-{iteration}"
            yield self._event("b", name, pool, min(bar.start for bar in mine), cat=kind, id=id)
            yield self._event("e", name, pool, max(bar.end for bar in mine), cat=kind, id=id)


def predicted_memory(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the bytes that a pool's busiest device holds as each step starts, part by part."""
    known = footprint(plan)
    if known is None:
        return
    for pool in plan.pools:
        held, seen = memory(known, pool), set()
        parts = sorted({part for moment in held.values() for part in moment})
        for bar in bars:
            if bar.pool == pool and bar.step in held and (bar.step, bar.iteration) not in seen:
                seen.add((bar.step, bar.iteration))
                yield pool, bar.start, HELD, {part: held[bar.step].get(part, 0) for part in parts}


def measured_memory(
    plan: Plan, bars: Sequence[Measured], lines: Sequence[Mapping[str, Any]]
) -> Iterator[CounterValue]:
    """Yield the most bytes that each device has held, as each iteration ends."""
    ends = {bar.iteration: bar.end for bar in sorted(bars, key=lambda bar: bar.end) if bar.phase == "train"}
    for line in lines:
        for pool, devices in plan.pools.items():
            names = {f"device {n}": line.get(f"perf/memory/{pool}-{n}") for n in range(devices)}
            values = {name: int(value) for name, value in names.items() if value is not None}
            if values and line["step"] in ends:
                yield pool, ends[line["step"]], MOST, values


def predicted_requests(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the rows that a rollout still generates, with response lengths as the plan predicts them."""
    target = plan.origin.target if plan.origin else None
    work = workload(plan, **(target.assumptions if target else {}))
    for step, mine, rows in _rollouts(plan, bars, work):
        curve = [left for _, left, _ in work.limited(plan.functions["train"][step.node]).alive(rows)]
        start, took = mine[0].start, mine[0].end - mine[0].start
        later = range(len(curve) // POINTS, len(curve), len(curve) // POINTS)
        falls = [(start + took * index / len(curve), curve[index]) for index in later]
        yield from _falling(step.pool, mine, [(start, rows), *falls])


def measured_requests(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the rows of devices whose part of a rollout still runs; no run records when a row is answered."""
    for step, mine, rows in _rollouts(plan, bars, workload(plan)):
        ends = sorted(bar.end for bar in mine)
        falls = [(end, rows * (1 - done / len(mine))) for done, end in enumerate(ends[:-1], start=1)]
        yield from _falling(step.pool, mine, [(min(bar.start for bar in mine), rows), *falls])


def _falling(
    pool: str, mine: Sequence[Measured], points: Sequence[tuple[float, float]]
) -> Iterator[CounterValue]:
    """Yield the requests in flight at some times of a rollout, and none when it has ended."""
    for at, left in (*points, (max(bar.end for bar in mine), 0)):
        yield pool, at, REQUESTS, {"requests": round(left)}


def _rollouts(
    plan: Plan, bars: Sequence[Measured], work: Workload
) -> Iterator[tuple[Step, Sequence[Measured], float]]:
    """Yield the rollouts of training, round by round, with each device's part, and its rows.

    Those of a region are repeated; its rows are shared out to its rounds as if these were alike.
    """
    steps = {step.id: step for step in plan.steps if step.generates}
    rollouts = [bar for bar in bars if bar.phase == "train" and bar.step in steps]
    rollouts.sort(key=lambda bar: (bar.iteration, bar.step, bar.start))
    for (_, number), mine in groupby(rollouts, key=lambda bar: (bar.iteration, bar.step)):
        step, rounds = steps[number], _rounds(mine)
        rows = work.rows[plan.columns["train"][step.writes[0]].domain]
        yield from ((step, once, rows / len(rounds)) for once in rounds)


def _rounds(bars: Iterable[Measured]) -> list[list[Measured]]:
    """Group the bars by round: what each device does first, then second, and so on."""
    rounds: defaultdict[int, list[Measured]] = defaultdict(list)
    times: Counter[int | str] = Counter()
    for bar in bars:
        rounds[times[bar.device]].append(bar)
        times[bar.device] += 1
    return [*rounds.values()]
