"""A region that streams, predicted or recorded, as a page draws it: its groups, updates and syncs over time.

A lane shows a group from the start of its generation until an update uses it:

    lane 0   ███████───────┆██████████      generation, then waiting; then the next group
    lane 1   ████████████──┆███───────      the colour is the version of the weights at its start
    update              ░░░┆▓▓▓▓▓▓▓▓ w8     the rows are used; weights 8 reach the pool that generates
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlgraph.ir.actions import Kind
from rlgraph.ir.plan import Plan
from rlgraph.planning.stream_forecast import predicted_course
from rlgraph.view.timeline import footprint

LANES = 64  # that a page draws
ITERATIONS = 3  # of the prediction that it draws
GROUP = re.compile(r"prompt (\d+)(?:, weights (\d+)| waits)")  # see runtime/driver/stages.py


class StreamedGroup(NamedTuple):
    """A group of samples: its prompt, the version of the weights at its start, and seconds.

    ``start`` and ``end`` are those of its generation; ``used`` is when an update took it, None if none has.
    """

    prompt: int
    weights: int
    start: float
    end: float
    used: float | None = None


def predicted_stream(plan: Plan) -> dict[str, Any] | None:
    """Return some iterations of the steady state at best; None if nothing streams or prices are unknown."""
    pricing, stream = footprint(plan), plan.schedule.stream
    if pricing is None or stream is None:
        return None
    ahead = stream.staleness + 1
    first_iteration = 3 * (ahead + 1)  # until then the pools fill
    course = predicted_course(pricing, first_iteration + ITERATIONS + ahead)
    if course is None:
        return None
    start, end = course.syncs[first_iteration - 1], course.syncs[first_iteration + ITERATIONS - 1]
    visible_groups = []
    uses = set()
    for prompt, (weights, *times) in course.groups.items():
        is_generated = len(times) > 1
        if not is_generated:
            continue
        group = StreamedGroup(prompt, round(weights), *times)
        if group.used is not None:
            uses.add(group.used)
        if group.start < end and (group.used or end) > start:
            visible_groups.append(group)
    updates = [(used, used + course.update, iteration) for iteration, used in enumerate(sorted(uses))]
    syncs = [(time, version) for version, time in enumerate(course.syncs, 1)]
    return {**_stream(visible_groups, updates, syncs), "window": [start, end]}


def recorded_stream(
    plan: Plan, events: Sequence[Mapping[str, Any]], iterations: Iterable[int], start_of_run: float
) -> dict[str, Any] | None:
    """Return the groups that some iterations have used; None if nothing streams.

    Args:
        plan: the plan of the run.
        events: the events of its timeline.
        iterations: those that are drawn, from 1.
        start_of_run: microseconds at which the timeline begins.
    """
    groups: dict[int, StreamedGroup] = {}
    uses: dict[int, float] = {}
    ends: dict[int, float] = {}
    syncs: dict[int, float] = {}
    for event in events:
        arguments = event["args"]
        if arguments["phase"] != "train" or arguments["iteration"] not in iterations:
            continue
        index = arguments["iteration"] - 1
        start = (event["ts"] - start_of_run) / 1e6
        end = (event["ts"] - start_of_run + event["dur"]) / 1e6
        if "part" not in arguments:
            ends[index] = max(ends.get(index, end), end)
            step = plan.steps[arguments["step"] - 1]
            if step.kind is Kind.SYNC:
                syncs[index] = end
            continue
        match = GROUP.fullmatch(event["name"])
        if match is None:
            continue
        prompt = int(match[1])
        if match[2]:
            groups[prompt] = StreamedGroup(prompt, int(match[2]), start, end)
        else:
            # all groups of an update are used at once, but their times are rounded
            used = uses.setdefault(index, end)
            groups[prompt] = groups[prompt]._replace(used=used)
    if not groups:
        return None
    updates = [(used, ends[index], index) for index, used in uses.items()]
    return _stream([*groups.values()], updates, [(time, index) for index, time in syncs.items()])


def _stream(
    groups: Sequence[StreamedGroup],
    updates: Sequence[tuple[float, float, int]],
    syncs: Sequence[tuple[float, int]],
) -> dict[str, Any]:
    """Return JSON values: each group with its lane, and of too many lanes only every n-th.

    A group gets the first lane that is free at its start.

    ``updates``: start, end, iteration from 0; ``syncs``: end, and the iteration whose weights arrive.
    """
    lane_ends: list[float] = []  # when the last group of each lane is over
    laid_out: list[tuple[int, StreamedGroup]] = []
    for group in sorted(groups, key=lambda group: group.start):
        lane = _free_lane(lane_ends, group.start)
        if lane == len(lane_ends):
            lane_ends.append(0.0)
        lane_ends[lane] = group.used or group.end
        laid_out.append((lane, group))
    stride = -(-len(lane_ends) // LANES)
    return {
        "every": stride,
        "groups": [_row((lane, *group)) for lane, group in laid_out if lane % stride == 0],
        "updates": [_row(update) for update in updates],
        "syncs": [_row(sync) for sync in syncs],
    }


def _free_lane(lane_ends: Sequence[float], start: float) -> int:
    """Return the first lane that is over at a time, or the number of a new one."""
    for lane, end in enumerate(lane_ends):
        if end <= start:
            return lane
    return len(lane_ends)


def _row(values: Iterable[Any]) -> list[Any]:
    return [seven_digits(value) if isinstance(value, float) else value for value in values]


def seven_digits(seconds: float) -> float:
    """Round a time to seven digits: a page draws no more, and its file stays small."""
    return float(f"{seconds:.7g}")
