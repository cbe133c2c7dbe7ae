"""Carries numbers that follow a KL from iteration to iteration: see ``rlgraph/ir/kl_controller.py``.

iteration 1   kl_coef 0.1       measures kl_ref 0.08 on 64 samples
iteration 2   kl_coef 0.10128   ...

An iteration's number is known once the step that measures has reported in the iteration before. One that
leaves the step out, or in which nothing was there to measure, leaves the number as it is.
"""

from __future__ import annotations

import math

from rlgraph.errors import RunError
from rlgraph.ir.intervals import due
from rlgraph.ir.kl_controller import Controller
from rlgraph.ir.plan import Step
from rlgraph.ops.metric import Metric, add_up
from rlgraph.runtime.driver.iteration import Execution


def adapted(execution: Execution, step: Step) -> dict[str, float]:
    """Return the adaptive attributes of a step as they are in an execution's iteration.

    Raises:
        RunError: the op does not record the metric that one of them follows.
    """
    controllers = execution.plan.functions[execution.phase][step.node].controllers
    return {name: _value(execution, step, name, controller) for name, controller in controllers.items()}


def controls_after(execution: Execution) -> dict[str, float]:
    """Return the numbers of the next iteration, as ``update_policy.kl_coef``; raises as ``adapted`` does."""
    controls = {}
    for step in execution.plan.steps:
        if step.inserted:
            continue
        controllers = execution.plan.functions["train"][step.node].controllers
        for name, controller in controllers.items():
            controls[f"{step.node}.{name}"] = _next(execution, step, name, controller)
    return controls


def _value(execution: Execution, step: Step, name: str, controller: Controller) -> float:
    if execution.previous is not None:
        return _next(execution.previous, step, name, controller)
    return execution.controls.get(f"{step.node}.{name}", controller.start)


def _next(execution: Execution, step: Step, name: str, controller: Controller) -> float:
    """Return the number in the iteration after an execution."""
    value = _value(execution, step, name, controller)
    if not due(step.when, execution.entry.iteration + 1):
        return value
    key = controller.metric
    if "/" not in key:
        key = f"{step.node}/{key}"
    recorded, samples = _recorded(execution, step)
    if key in recorded:
        return controller.next(value, recorded[key].value, samples)
    records_others = bool(recorded) and samples > 0
    if records_others and value == controller.start:
        law = f"`{step.node}` recorded no `{controller.metric}`, which its `{name}` follows"
        known = ", ".join(metric.removeprefix(f"{step.node}/") for metric in sorted(recorded))
        remedy = f"record it, or let @op(measures=...) name one of what it records: {known}"
        raise RunError(f"{law}\n  {remedy}")
    return controller.next(value, math.nan, samples)


def _recorded(execution: Execution, step: Step) -> tuple[dict[str, Metric], int]:
    """Return the metrics that a step recorded, and its samples."""
    executions = execution.rounds[step.region] if step.region else [execution]
    reporting = next((joined for joined in execution.steps if joined.node == step.joins), step)
    domain = execution.columns[step.reads[0]].domain
    metrics = []
    samples = 0
    for ended in executions:
        metrics += [ended.rows.report(reporting, device).metrics for device in sorted(step.devices)]
        samples += ended.rows.count(domain)
    return add_up(metrics, step.node), samples
