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
from rlgraph.printing.step_text import sentence, title
from rlgraph.view.recorded import Measured
from rlgraph.view.timeline import arrows, expected, footprint, memory, places

GROUPS = ("predicted", "measured")
FIRST = (1, 1001)  # the number of the first process of each group
TraceEvent = dict[str, Any]
SpanKey = tuple[str, int, int]  # phase, step, iteration
CounterValue = tuple[str, float, str, dict[str, int]]  # pool, seconds, name, values by series
POINTS = 8  # points of the curve of a rollout's requests
MEMORY = "memory of a device"
PEAK_MEMORY = "most memory so far"
REQUESTS = "requests in flight"


def trace(plan: Plan, measured: Sequence[Measured] = (), lines: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the JSON text of a trace: some iterations as they are expected, and those that were measured.

    ``lines``: the metrics of the run, which hold its memory.
    """
    bars = _expected_bars(plan)
    counters = [*predicted_memory(plan, bars), *predicted_requests(plan, bars)]
    events = [*_Group(plan, 0, bars, counters).events()]
    if measured:
        bars = _clipped(measured)
        counters = [*measured_memory(plan, bars, lines), *measured_requests(plan, bars)]
        events += _Group(plan, 1, bars, counters).events()
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _expected_bars(plan: Plan) -> list[Measured]:
    bars = []
    events, _ = expected(plan)
    for event in events:
        for pool, number in places(plan, event.step):
            device = f"{number} beside" if event.step.on_host else number
            bar = Measured(event.step.id, "train", event.iteration, pool, device, event.start, event.end)
            bars.append(bar)
    return bars


def _clipped(bars: Iterable[Measured]) -> list[Measured]:
    """Return the steps without overlaps on a device: rounded to microseconds, neighbours may overlap."""
    clipped: list[Measured] = []
    in_lanes = sorted(bars, key=lambda bar: (bar.pool, str(bar.device), bar.start, bar.end))
    for _, lane in groupby(in_lanes, key=lambda bar: (bar.pool, bar.device)):
        lane_bars = [*lane]
        next_starts = [bar.start for bar in lane_bars[1:]] + [float("inf")]
        for bar, next_start in zip(lane_bars, next_starts, strict=True):
            end = max(bar.start, min(bar.end, next_start))
            clipped.append(replace(bar, end=end))
    return clipped


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@dataclass
class _Group:
    """Trace events of the prediction, or of the measurement."""

    plan: Plan
    number: int
    bars: Sequence[Measured]
    counters: Sequence[CounterValue]

    @property
    def title(self) -> str:
        return GROUPS[self.number]

    def events(self) -> Iterator[TraceEvent]:
        yield from self._names()
        for bar in self.bars:
            yield self._slice(bar)
        yield from self._flows()
        yield from self._iterations()
        for pool, time, name, values in self.counters:
            yield self._event("C", name, pool, time, args=values)

    def _event(
        self, phase: str, name: str, pool: str, time: float = 0, device: int | str = 0, **more: Any
    ) -> TraceEvent:
        """Return an event of a device, ``time`` in seconds; ``phase`` is the format's letter for its type."""
        return {
            "name": name,
            "ph": phase,
            "ts": _microseconds(time),
            "pid": self._process(pool),
            "tid": self._thread(pool, device),
            **more,
        }

    def _process(self, pool: str) -> int:
        return FIRST[self.number] + [*self.plan.pools].index(pool)

    def _thread(self, pool: str, device: int | str) -> int:
        """Return a number for a device, or for the CPUs beside it."""
        number, _, is_beside = str(device).partition(" ")
        if is_beside:
            return int(number) + self.plan.pools[pool]
        return int(number)

    def _names(self) -> Iterator[TraceEvent]:
        for pool, devices in self.plan.pools.items():
            order = {"sort_index": self._process(pool)}
            yield self._event("M", "process_name", pool, args={"name": f"{self.title}: pool {pool}"})
            yield self._event("M", "process_labels", pool, args={"labels": self.title})
            yield self._event("M", "process_sort_index", pool, args=order)
            lanes = [str(device) for device in range(devices)]
            in_use = {str(bar.device) for bar in self.bars if bar.pool == pool}
            host_lanes = sorted(in_use.difference(lanes))
            for lane in (*lanes, *host_lanes):
                order = {"sort_index": self._thread(pool, lane)}
                yield self._event("M", "thread_name", pool, 0, lane, args={"name": f"device {lane}"})
                yield self._event("M", "thread_sort_index", pool, 0, lane, args=order)

    def _slice(self, bar: Measured) -> TraceEvent:
        step = self.plan.phases[bar.phase][bar.step - 1]
        arguments = {
            "step": step.id,
            "iteration": bar.iteration,
            "phase": bar.phase,
            "does": sentence(step),
        }
        if step.because:
            arguments["because"] = step.because
        duration = round(_microseconds(bar.end) - _microseconds(bar.start), 3)
        category = f"{self.title},{step.kind}"
        return self._event(
            "X", title(step), bar.pool, bar.start, bar.device, cat=category, dur=duration, args=arguments
        )

    def _flows(self) -> Iterator[TraceEvent]:
        """Yield a pair of events for each arrow, on the first device of either step."""
        first_bars: dict[SpanKey, Measured] = {}
        for bar in self.bars:
            first_bars.setdefault((bar.phase, bar.step, bar.iteration), bar)
        offset = min((bar.iteration for bar in self.bars if bar.phase == "train"), default=0)
        end = 1 + max((bar.iteration for bar in self.bars), default=0)
        number = self.number * 1_000_000_000
        category = f"{self.title},flow"
        for arrow in arrows(self.plan, end - offset):
            source_step, source_iteration = arrow.source
            target_step, target_iteration = arrow.target
            source = first_bars.get(("train", source_step, source_iteration + offset))
            target = first_bars.get(("train", target_step, target_iteration + offset))
            if source is None or target is None:
                continue
            number += 1
            yield self._flow_end("s", arrow.name, source, cat=category, id=number)
            yield self._flow_end("f", arrow.name, target, cat=category, id=number, bp="e")

    def _flow_end(self, phase: str, name: str, bar: Measured, **more: Any) -> TraceEvent:
        # a viewer binds an arrow to the slice around its time, and the middle of a slice is in no other
        middle = (bar.start + bar.end) / 2
        return self._event(phase, name, bar.pool, middle, bar.device, **more)

    def _iterations(self) -> Iterator[TraceEvent]:
        """Yield a span from the first step of an iteration to its last one."""
        pool = next(iter(self.plan.pools))
        category = f"{self.title},iteration"
        bars_of: dict[int, list[Measured]] = {}
        for bar in self.bars:
            if bar.phase == "train":
                bars_of.setdefault(bar.iteration, []).append(bar)
        for iteration, bars in bars_of.items():
            name, id = f"iteration {iteration}", f"{self.number}-{iteration}"
            start = min(bar.start for bar in bars)
            end = max(bar.end for bar in bars)
            yield self._event("b", name, pool, start, cat=category, id=id)
            yield self._event("e", name, pool, end, cat=category, id=id)


def predicted_memory(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the bytes that a pool's busiest device holds as each step starts, part by part."""
    pricing = footprint(plan)
    if pricing is None:
        return
    for pool in plan.pools:
        moments = memory(pricing, pool)
        names = sorted({name for sizes in moments.values() for name in sizes})
        counted = set[tuple[int, int]]()  # steps and iterations
        for bar in bars:
            if bar.pool != pool or bar.step not in moments:
                continue
            key = (bar.step, bar.iteration)
            if key not in counted:
                counted.add(key)
                sizes = moments[bar.step]
                yield pool, bar.start, MEMORY, {name: sizes.get(name, 0) for name in names}


def measured_memory(
    plan: Plan, bars: Sequence[Measured], lines: Sequence[Mapping[str, Any]]
) -> Iterator[CounterValue]:
    """Yield the most bytes that each device has held, at the end of each iteration."""
    ends: dict[int, float] = {}
    for bar in bars:
        if bar.phase == "train":
            ends[bar.iteration] = max(ends.get(bar.iteration, bar.end), bar.end)
    for line in lines:
        if line["step"] not in ends:
            continue
        for pool, devices in plan.pools.items():
            values = {}
            for number in range(devices):
                peak = line.get(f"perf/memory/{pool}-{number}")
                if peak is not None:
                    values[f"device {number}"] = int(peak)
            if values:
                yield pool, ends[line["step"]], PEAK_MEMORY, values


def predicted_requests(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the rows that a rollout still generates, with response lengths as the plan predicts them."""
    target = plan.origin.target if plan.origin else None
    work = workload(plan, **(target.assumptions if target else {}))
    for step, round_bars, rows in _rollouts(plan, bars, work):
        lengths = work.limited(plan.functions["train"][step.node])
        curve = [unfinished for _, unfinished, _ in lengths.alive(rows)]
        start, duration = round_bars[0].start, round_bars[0].end - round_bars[0].start
        points: list[tuple[float, float]] = [(start, rows)]
        stride = len(curve) // POINTS
        for index in range(stride, len(curve), stride):
            points.append((start + duration * index / len(curve), curve[index]))
        yield from _falling(step.pool, round_bars, points)


def measured_requests(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the rows of devices that still generate; no run records when a single row is answered."""
    for step, round_bars, rows in _rollouts(plan, bars, workload(plan)):
        points = [(min(bar.start for bar in round_bars), rows)]
        ends = sorted(bar.end for bar in round_bars)
        for finished, end in enumerate(ends[:-1], start=1):
            points.append((end, rows * (1 - finished / len(round_bars))))
        yield from _falling(step.pool, round_bars, points)


def _falling(
    pool: str, bars: Sequence[Measured], points: Sequence[tuple[float, float]]
) -> Iterator[CounterValue]:
    """Yield the requests in flight at some times of a rollout, and none at its end."""
    end = max(bar.end for bar in bars)
    for time, unfinished in (*points, (end, 0)):
        yield pool, time, REQUESTS, {"requests": round(unfinished)}


def _rollouts(
    plan: Plan, bars: Sequence[Measured], work: Workload
) -> Iterator[tuple[Step, Sequence[Measured], float]]:
    """Yield the rollouts of training, round by round: the step, its bar on each device, and its rows.

    A region repeats its rollout. Its rows are divided equally among its rounds.
    """
    steps = {step.id: step for step in plan.steps if step.generates}
    rollouts = [bar for bar in bars if bar.phase == "train" and bar.step in steps]
    rollouts.sort(key=lambda bar: (bar.iteration, bar.step, bar.start))
    for (_, number), step_bars in groupby(rollouts, key=lambda bar: (bar.iteration, bar.step)):
        step = steps[number]
        rounds = _rounds(step_bars)
        rows = work.rows[plan.columns["train"][step.writes[0]].domain]
        for round_bars in rounds:
            yield step, round_bars, rows / len(rounds)


def _rounds(bars: Iterable[Measured]) -> list[list[Measured]]:
    """Group the bars by round: what each device does first, then second, and so on."""
    rounds: defaultdict[int, list[Measured]] = defaultdict(list)
    times: Counter[int | str] = Counter()
    for bar in bars:
        rounds[times[bar.device]].append(bar)
        times[bar.device] += 1
    return [*rounds.values()]
