"""Writes a plan and a run as Chrome trace events (Trace Event Format), which ui.perfetto.dev opens.

Pools are processes, devices threads, memory and requests in flight counters, columns and weights arrows (flow
events), iterations spans over them (async events). What is predicted and what was measured are two groups of
processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_text import sentence
from rlgraph.view.counters import (
    CounterValue,
    measured_memory,
    measured_requests,
    predicted_memory,
    predicted_requests,
)
from rlgraph.view.drawings.links import title
from rlgraph.view.recorded import Measured
from rlgraph.view.timeline import arrows, expected, places

GROUPS = ("predicted", "measured")
FIRST = (1, 1001)  # the numbers of the processes of each group begin so
TraceEvent = dict[str, Any]
SpanKey = tuple[str, int, int]  # phase, step, iteration


def trace(plan: Plan, measured: Sequence[Measured] = (), lines: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the JSON text of a trace: some iterations as they are expected, and those that were measured.

    Args:
        plan: what runs.
        measured: the steps of a run of it.
        lines: its metrics, which hold its memory.
    """
    bars = [*_predicted(plan)]
    counts = [*predicted_memory(plan, bars), *predicted_requests(plan, bars)]
    events = [*_Group(plan, 0, bars, counts).events()]
    if measured:
        bars = _clipped(measured)
        counts = [*measured_memory(plan, bars, lines), *measured_requests(plan, bars)]
        events += _Group(plan, 1, bars, counts).events()
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _predicted(plan: Plan) -> Iterator[Measured]:
    events, _ = expected(plan)
    for event in events:
        for pool, device in places(plan, event.step):
            step = event.step
            yield Measured(step.id, "train", event.iteration, pool, device, event.start, event.end)


def _clipped(bars: Iterable[Measured]) -> list[Measured]:
    """Return a device's steps one behind the other; a file's whole microseconds may overlap by one or two."""
    found: list[Measured] = []
    by_place = sorted(bars, key=lambda bar: (bar.pool, str(bar.device), bar.start, bar.end))
    for _, lane in groupby(by_place, key=lambda bar: (bar.pool, bar.device)):
        mine = [*lane]
        ends = [*(bar.start for bar in mine[1:]), float("inf")]
        for bar, following in zip(mine, ends, strict=True):
            found.append(Measured(**{**vars(bar), "end": max(bar.start, min(bar.end, following))}))
    return found


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
        yield from map(self._counter, self.counts)

    def _pid(self, pool: str) -> int:
        return FIRST[self.number] + [*self.plan.pools].index(pool)

    def _names(self) -> Iterator[TraceEvent]:
        for pool, devices in self.plan.pools.items():
            pid, group = self._pid(pool), GROUPS[self.number]
            yield _meta("process_name", pid, name=f"{group}: pool {pool}")
            yield _meta("process_labels", pid, labels=group)
            yield _meta("process_sort_index", pid, sort_index=pid)
            beside = sorted(
                {str(b.device) for b in self.bars if b.pool == pool} - {*map(str, range(devices))}
            )
            for lane in (*map(str, range(devices)), *beside):
                number = self._lane(pool, lane)
                yield _meta("thread_name", pid, number, name=f"device {lane}")
                yield _meta("thread_sort_index", pid, number, sort_index=number)

    def _lane(self, pool: str, device: int | str) -> int:
        """Return a number for a device, or for what is beside it."""
        number, _, beside = str(device).partition(" ")
        return int(number) + (self.plan.pools[pool] if beside else 0)

    def _slice(self, bar: Measured) -> TraceEvent:
        step = self.plan.phases[bar.phase][bar.step - 1]
        args = {"step": step.id, "iteration": bar.iteration, "phase": bar.phase, "does": sentence(step)}
        said = {"because": step.because} if step.because else {}
        start, end = _micro(bar.start), _micro(bar.end)
        return {
            "name": title(step),
            "cat": f"{GROUPS[self.number]},{step.kind}",
            "ph": "X",
            "ts": start,
            "dur": round(end - start, 3),
            "pid": self._pid(bar.pool),
            "tid": self._lane(bar.pool, bar.device),
            "args": {**args, **said},
        }

    def _counter(self, count: CounterValue) -> TraceEvent:
        pool, at, name, values = count
        return {"name": name, "ph": "C", "ts": _micro(at), "pid": self._pid(pool), "tid": 0, "args": values}

    def _flows(self) -> Iterator[TraceEvent]:
        """Yield a pair of events for each arrow, on the first device of either step."""
        first: dict[SpanKey, Measured] = {}
        for bar in self.bars:
            first.setdefault((bar.phase, bar.step, bar.iteration), bar)
        offset = min((bar.iteration for bar in self.bars if bar.phase == "train"), default=0)
        last = max((bar.iteration for bar in self.bars), default=0)
        number = self.number * 1_000_000_000
        for arrow in arrows(self.plan, last - offset + 1):
            ends = [("train", step, iteration + offset) for step, iteration in (arrow.source, arrow.target)]
            if all(end in first for end in ends):
                number += 1
                yield from self._flow(number, arrow.name, [first[end] for end in ends])

    def _flow(self, number: int, name: str, ends: Sequence[Measured]) -> Iterator[TraceEvent]:
        for phase, bar in zip("sf", ends, strict=True):
            # an arrow is bound to the slice around its time: the middle is in no other
            at = _micro((bar.start + bar.end) / 2)
            event = {"name": name, "cat": f"{GROUPS[self.number]},flow", "id": number, "ph": phase, "ts": at}
            event |= {"pid": self._pid(bar.pool), "tid": bar.device}
            yield event | ({"bp": "e"} if phase == "f" else {})

    def _iterations(self) -> Iterator[TraceEvent]:
        """Yield a span from the first step of an iteration to its last one."""
        pid = self._pid(next(iter(self.plan.pools)))
        train = [bar for bar in self.bars if bar.phase == "train"]
        for iteration in dict.fromkeys(bar.iteration for bar in train):
            mine = [bar for bar in train if bar.iteration == iteration]
            for phase, at in (("b", min(b.start for b in mine)), ("e", max(b.end for b in mine))):
                event = {"name": f"iteration {iteration}", "cat": f"{GROUPS[self.number]},iteration"}
                event |= {"ph": phase, "id": f"{self.number}-{iteration}"}
                yield event | {"ts": _micro(at), "pid": pid, "tid": 0}


def _meta(kind: str, pid: int, tid: int = 0, **args: Any) -> TraceEvent:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
