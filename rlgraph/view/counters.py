"""Counters of a trace: memory, and requests that a rollout has not answered yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rlgraph.costs.workload import Workload, workload
from rlgraph.ir.plan import Plan, Step
from rlgraph.view.recorded import Measured
from rlgraph.view.timeline import footprint, memory

CounterValue = tuple[str, float, str, dict[str, int]]  # pool, seconds, name, values by series
POINTS = 8  # points of the curve of a rollout's requests
HELD, MOST, REQUESTS = "memory of a device", "most memory so far", "requests in flight"


def predicted_memory(plan: Plan, bars: Sequence[Measured]) -> Iterator[CounterValue]:
    """Yield the bytes that a pool's busiest device holds as each step starts, part by part."""
    found = footprint(plan)
    if found is None:
        return
    for pool in plan.pools:
        held, seen = memory(found, pool), set()
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
    work = workload(plan, *((target.prompt_tokens, target.response_tokens) if target else ()))
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
    found = [bar for bar in bars if bar.phase == "train" and bar.step in steps]
    found.sort(key=lambda bar: (bar.iteration, bar.step, bar.start))
    for (_, number), mine in groupby(found, key=lambda bar: (bar.iteration, bar.step)):
        step, rounds = steps[number], _rounds(mine)
        rows = work.rows[plan.columns["train"][step.writes[0]].domain]
        yield from ((step, once, rows / len(rounds)) for once in rounds)


def _rounds(bars: Iterable[Measured]) -> list[list[Measured]]:
    """Group the bars by round: what each device does first, then second, and so on."""
    found: list[list[Measured]] = []
    times: Counter[int | str] = Counter()
    for bar in bars:
        if times[bar.device] == len(found):
            found.append([])
        found[times[bar.device]].append(bar)
        times[bar.device] += 1
    return found
