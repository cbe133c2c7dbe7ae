"""A region that streams, predicted or recorded, as a page draws it: its groups, updates and syncs over time.

A lane holds a group from when it is begun until it is used:

    lane 0   ███████───────┆██████████      begun, drawn, and waiting; then the next
    lane 1   ████████████──┆███───────      the colour is the version of the weights that it was begun with
    update              ░░░┆▓▓▓▓▓▓▓▓ w8     the rows are used; weights 8 come to the pool that generates
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlgraph.ir.plan import Plan
from rlgraph.planning.stream_forecast import predicted_course
from rlgraph.view.timeline import footprint

LANES = 64  # that a page draws
ITERATIONS = 3  # of the prediction that it draws
GROUP = re.compile(r"prompt (\d+)(?:, weights (\d+)| waits)")  # see runtime/driver/stages.py


class StreamedGroup(NamedTuple):
    """A group of samples: when it was begun, with the weights of which iteration, when drawn, when used."""

    prompt: int
    weights: int
    begun: float
    drawn: float
    used: float | None = None


def predicted_stream(plan: Plan) -> dict[str, Any] | None:
    """Return some iterations of the steady state at best; None where nothing streams, or all is not known."""
    pricing, stream = footprint(plan), plan.schedule.stream
    if pricing is None or stream is None or stream.staleness is None:
        return None
    ahead = stream.staleness + 1
    first = 3 * (ahead + 1)  # until then the pools fill
    course = predicted_course(pricing, first + ITERATIONS + ahead)
    if course is None:
        return None
    begin, end = course.syncs[first - 1], course.syncs[first + ITERATIONS - 1]
    groups = [StreamedGroup(n, round(own[0]), *own[1:]) for n, own in course.groups.items() if len(own) > 2]
    uses = sorted({group.used for group in groups if group.used is not None})
    told = _stream(
        [group for group in groups if group.begun < end and (group.used or end) > begin],
        [(used, used + course.update, n) for n, used in enumerate(uses)],
        [(at, n) for n, at in enumerate(course.syncs, 1)],
    )
    return {**told, "window": [begin, end]}


def recorded_stream(
    plan: Plan, events: Sequence[Mapping[str, Any]], shown: Iterable[int], first: float
) -> dict[str, Any] | None:
    """Return the groups that some iterations have used; None where nothing streams.

    Args:
        plan: of the run.
        events: of its timeline.
        shown: the iterations, from 1.
        first: microseconds at which the timeline begins.
    """
    groups: dict[int, StreamedGroup] = {}
    uses, ends, syncs = dict[int, float](), dict[int, float](), dict[int, float]()
    for event in (one for one in events if one["args"]["phase"] == "train"):
        step, iteration = (event["args"][name] for name in ("step", "iteration"))
        if iteration not in shown:
            continue
        start, end = ((event["ts"] - first + took) / 1e6 for took in (0, event["dur"]))
        if "part" not in event["args"]:
            ends[iteration - 1] = max(ends.get(iteration - 1, end), end)
            if (facts := plan.steps[step - 1].facts).syncs and not facts.lends:
                syncs[iteration - 1] = end
        elif (told := GROUP.fullmatch(event["name"])) and told[2]:
            groups[int(told[1])] = StreamedGroup(int(told[1]), int(told[2]), start, end)
        elif told:
            used = uses.setdefault(iteration - 1, end)  # which is the same for all, but for rounding
            groups[int(told[1])] = groups[int(told[1])]._replace(used=used)
    updates = [(used, ends[n], n) for n, used in uses.items()]
    return _stream([*groups.values()], updates, [(at, n) for n, at in syncs.items()]) if groups else None


def _stream(
    groups: Sequence[StreamedGroup],
    updates: Sequence[tuple[float, float, int]],
    syncs: Sequence[tuple[float, int]],
) -> dict[str, Any]:
    """Return JSON values: groups with the first lane that is free when they are begun; every n-th of many.

    ``updates``: start, end, iteration from 0; ``syncs``: end, and the iteration whose weights come.
    """
    free: list[float] = []  # when each lane is
    laid_out = list[tuple[int, StreamedGroup]]()
    for group in sorted(groups, key=lambda group: group.begun):
        lane = next((n for n, end in enumerate(free) if end <= group.begun), len(free))
        free[lane : lane + 1] = [group.used or group.drawn]
        laid_out.append((lane, group))
    every = -(-len(free) // LANES)
    return {
        "every": every,
        "groups": [_short((lane, *group)) for lane, group in laid_out if lane % every == 0],
        "updates": [*map(_short, updates)],
        "syncs": [*map(_short, syncs)],
    }


def _short(values: Iterable[Any]) -> list[Any]:
    return [float(f"{value:.7g}") if isinstance(value, float) else value for value in values]
