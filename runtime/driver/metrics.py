"""A line of metrics.jsonl is made from the reports of an iteration's steps: see docs/metrics.md."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from rlgraph.costs.detect import rates_of
from rlgraph.costs.model_size import Size, size_of
from rlgraph.errors import GraphError
from rlgraph.ir.actions import Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.ops.metric import Metric, add_up, conflict
from rlgraph.runtime.driver.iteration import FinishedStep
from rlgraph.runtime.messages.report import Usage

SEQUENCES = "int64[samples, tokens]"


def metrics(ran: Sequence[FinishedStep]) -> dict[str, float]:
    """Return what the ops recorded, over all rows, devices and rounds.

    Of a name that several nodes record, a sum is over all of them; of other kinds it is the first node's, and
    ``NODE/name`` that of each other.

    Raises:
        RunError: a name is of two kinds, or a sum over two domains.
    """
    parts: dict[str, list[Mapping[str, Metric]]] = defaultdict(list)
    for item in ran:
        parts[item.step.node] += [report.metrics for report in item.reports.values()]
    owners: dict[str, tuple[str, Metric]] = {}
    values: dict[str, Metric] = {}
    for node, reports in parts.items():
        for name, metric in add_up(reports, node).items():
            owner, first = owners.setdefault(name, (node, metric))
            if metric.kind != first.kind or (metric.kind == "sum" and not metric.is_like(first)):
                raise conflict(name, (owner, first), (node, metric))
            if metric.kind == "sum" and name in values:
                metric = values[name] + metric
            values[name if metric.kind == "sum" or owner == node else f"{node}/{name}"] = metric
    return {name: metric.value for name, metric in values.items()}


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without those that are no number, such as a mean over nothing."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with None for a number that is not finite, which JSON does not have.

    Example:
        >>> as_json({"step": 1, "loss": float("nan")})
        {'step': 1, 'loss': None}
    """
    numbers = {name: value for name, value in values.items() if isinstance(value, float)}
    return {**values, **{name: None for name, value in numbers.items() if not math.isfinite(value)}}


OF_SOURCES = ("rows", "overlong", "filtered", "equal")


def beside(plan: Plan, ran: Sequence[FinishedStep]) -> dict[str, float]:
    """Return what the writers of an evaluation's reported columns recorded under their own names.

    Beside these stand ``eval/rows`` and the shares of its sets that were left out, and of several sources
    each one's, as ``eval/rows/gsm8k``. ``pass@8`` of a node that records ``solved/gsm8k`` comes with
    ``eval/pass@8/gsm8k``.
    """
    owns = {metric: f"{plan.columns['eval'][column].writer}/" for metric, column in plan.report.items()}
    recorded = metrics(ran)
    # what the sources left out of their sets, and how many rows are measured
    of_sources = {
        f"eval/{name.removeprefix('data/')}": value
        for name, value in recorded.items()
        if name.startswith("data/") and name.split("/")[1] in OF_SOURCES
    }
    return of_sources | {
        f"eval/{metric}/{name.removeprefix(own)}": recorded[name]
        for metric, own in owns.items()
        for name in recorded
        if name.startswith(own)
    }


def times(plan: Plan, ran: Sequence[FinishedStep]) -> dict[str, float]:
    """Return seconds of each step: the longest of a device's own, of all rounds that repeat it.

    Where its devices work together, from the first one's start to the last one's end. Of a sync between pools
    from the last one's start: the pool that is there first waits for the other.
    """
    seconds: dict[str, float] = defaultdict(float)
    for item in ran:
        if item.reports:
            seconds[f"time/{item.step.node}"] += _seconds(plan, item)
    return seconds


def _seconds(plan: Plan, item: FinishedStep) -> float:
    reports = item.reports.values()
    # its devices work together on a train engine, and in a sync, which gathers its weights
    if not (isinstance(item.step.action, Sync) or _trains(plan, item.step)):
        return max(report.end - report.start for report in reports)
    starts = [report.start for report in reports]
    return max(report.end for report in reports) - (max(starts) if item.step.source else min(starts))


def performance(plan: Plan, ran: Sequence[FinishedStep], values: Mapping[str, float]) -> dict[str, float]:
    """Return what depends on the machine: tokens per second, memory, and on known GPUs the utilisation.

    ``values`` are the iteration's metrics and times, ``time/step`` among them.
    """
    rates = {}
    tokens = sum(int(lengths.sum()) for item in ran for lengths in _sequences(plan, item))
    if tokens:
        rates["perf/tokens_per_second"] = tokens / values["time/step"]
    if generating := sum(_seconds(plan, item) for item in ran if _generates(item)):
        rates["perf/generated_per_second"] = values["tokens/generated"] / generating
    passed: dict[str, float] = defaultdict(float)  # node -> tokens that its train engine went through
    for item in ran:
        passed[item.step.node] += sum(one.used.tokens for one in item.reports.values() if not item.step.joins)
    rates |= {f"perf/tokens_per_second/{n}": t / values[f"time/{n}"] for n, t in passed.items() if t}
    return {**rates, **_utilisations(plan, ran), **_memory(ran)}


def _trains(plan: Plan, step: Step) -> bool:
    """Return whether a step's op uses a train engine."""
    function = plan.functions[step.phase].get(step.node)
    return bool(function and "train" in function.handles.values())


def _generates(item: FinishedStep) -> bool:
    """Return whether a step is a rollout: a judge generates too, and its tokens are no samples."""
    return any("tokens/generated" in report.metrics for report in item.reports.values())


def _sequences(plan: Plan, item: FinishedStep) -> list[Any]:
    """Return the lengths of sequences that a step made, per device: a rollout, or a source of examples."""
    columns = plan.columns[item.step.phase]
    if item.step.inserted or all(columns[name].type != SEQUENCES for name in item.step.writes):
        return []
    return [report.lengths for report in item.reports.values() if report.lengths is not None]


MEMORY = {"memory": "memory", "memory_reserved": "reserved", "memory_used": "device"}  # metric -> of Usage


def _memory(ran: Sequence[FinishedStep]) -> dict[str, float]:
    """Return the most bytes of each worker, and of each step on a GPU; processes beside it don't count."""
    most: dict[str, float] = {}
    for item in ran:
        for (pool, device), report in item.reports.items():
            used = report.used
            sizes = {f"{m}/{pool}-{device}": getattr(used, field) for m, field in MEMORY.items()}
            sizes |= {f"memory_step/{item.step.node}": used.memory} if used.gpu else {}
            for name, size in sizes.items():
                if size and not report.beside:
                    most[f"perf/{name}"] = max(most.get(f"perf/{name}", 0.0), float(size))
    return most


def _utilisations(plan: Plan, ran: Sequence[FinishedStep]) -> dict[str, float]:
    """Return the utilisation of each train engine's step whose GPU's peak and model's size are known."""
    shares: dict[str, float] = {}
    for item in (item for item in ran if not item.step.joins):
        used = [*_used(plan, ran, item)]
        if any(one.tokens for one in used) and all(rates_of(one.gpu) for one in used):
            share = utilisation(plan, item.step, used, _seconds(plan, item))
            shares |= {f"perf/mfu/{item.step.node}": share} if share else {}
    return shares


def _used(plan: Plan, ran: Sequence[FinishedStep], item: FinishedStep) -> Iterator[Usage]:
    """Yield what each device of a step used, with the work of the terms for which it runs passes."""
    nodes = {one.node for one in plan.passes(item.step)}
    parts = [other.reports for other in ran if other.step.node in nodes]
    for place, report in item.reports.items():
        works = [reports[place].used for reports in parts if place in reports]
        tokens, squares = sum(work.tokens for work in works), sum(work.squares for work in works)
        yield replace(report.used, tokens=tokens, squares=squares)


def utilisation(plan: Plan, step: Step, used: Sequence[Usage], seconds: float) -> float | None:
    """Return FLOPs that the model needs over those that the devices could have done: MFU (arXiv 2204.02311).

    2 N FLOPs per token and causal attention in a forward pass, three times that with backward, each epoch;
    what is computed again is not counted. None of a model whose size is not known.
    """
    (name,) = step.models
    model, function = plan.models[name], plan.functions[step.phase][step.node]
    assert model.train
    size = _size(model.path, model.head, json.dumps(dict(model.config)))
    if size is None:
        return None
    passes = 3 * function.value("epochs", 1) if step.updated else 1
    flops = passes * sum(size.forward_flops(one.tokens, one.squares) for one in used)
    peaks = [gpu for one in used if (gpu := rates_of(one.gpu))]
    peak = sum(g.bf16_flops if model.train.dtype == "bfloat16" else g.fp32_flops for g in peaks)
    return float(flops / (peak * seconds))


@cache
def _size(path: str, head: str, changed: str) -> Size | None:
    try:
        return size_of(path, head, json.loads(changed))
    except GraphError:  # a kind of model that sizes.py does not cover
        return None
