"""Numbers that follow a KL, from walk to walk: see ``rlgraph/controller.py``.

iteration 1   kl_coef 0.1       measures kl_ref 0.08 on 64 samples
iteration 2   kl_coef 0.10128   ...

An iteration's number is known once the step that measures has reported in the iteration before. One that
leaves the step out, or in which nothing was there to measure, leaves the number as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlgraph.cadence import due
from rlgraph.controller import Controller
from rlgraph.plan import Step

if TYPE_CHECKING:
    from rlgraph.runtime.walk import Walk


def adapted(walk: Walk, step: Step) -> dict[str, float]:
    """The adaptive attributes of a step as they are in a walk's iteration.

    Raises:
        NotYet: the iteration before has not measured what they follow.
    """
    controllers = walk.plan.functions[walk.phase][step.node].controllers
    return {name: _value(walk, step, name, one) for name, one in controllers.items()}


def controls(walk: Walk, steps: Iterable[Step]) -> dict[str, float]:
    """The same of several steps, as ``update_policy.kl_coef``; raises as ``adapted`` does."""
    ops = [step for step in steps if step.kind == "run"]
    return {f"{step.node}.{name}": value for step in ops for name, value in adapted(walk, step).items()}


def controls_after(walk: Walk) -> dict[str, float]:
    """What ``controls`` gives in the iteration after a walk, of all steps; raises as ``adapted`` does."""
    found = {}
    for step in walk.plan.steps:
        if step.kind == "run":
            for name, one in walk.plan.functions["train"][step.node].controllers.items():
                found[f"{step.node}.{name}"] = _next(walk, step, name, one)
    return found


def _value(walk: Walk, step: Step, name: str, controller: Controller) -> float:
    if walk.before is not None:
        return _next(walk.before, step, name, controller)
    return walk.controls.get(f"{step.node}.{name}", controller.start)


def _next(walk: Walk, step: Step, name: str, controller: Controller) -> float:
    """The number in the iteration after a walk."""
    value = _value(walk, step, name, controller)
    runs = due(step.when, walk.entry.iteration + 1)
    return controller.next(value, *_measured(walk, step, controller.metric)) if runs else value


def _measured(walk: Walk, step: Step, metric: str) -> tuple[float, int]:
    """The mean that a step recorded, as metrics.jsonl has it, and on how many samples."""
    key, walks = metric if "/" in metric else f"{step.node}/{metric}", [walk]
    if step.region:
        stream = walk.streams[step.region]
        stream.rows()  # there are enough of them, so there is no round to come
        walks = [*stream.rounds]
    reports = [one.rows.report(step, device) for one in walks for device in sorted(step.devices)]
    found = [report.metrics[key] for report in reports if key in report.metrics]
    count = sum(count for _, count in found)
    mean = sum(total for total, _ in found) / count if count else math.nan
    return mean, sum(one.rows.count(walk.columns[step.reads[0]].domain) for one in walks)
