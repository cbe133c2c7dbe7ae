"""A line of metrics.jsonl is made from the reports of an iteration's steps: see docs/metrics.md."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from rlgraph.costs.detect import rates_of
from rlgraph.costs.model_size import Size, size_of
from rlgraph.errors import GraphError
from rlgraph.ir.actions import Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.ops.metric import OF_ROWS, Metric, add_up, conflict
from rlgraph.runtime.driver.iteration import FinishedStep
from rlgraph.runtime.messages.report import Usage

SEQUENCES = "int64[samples, tokens]"


def metrics(finished: Sequence[FinishedStep]) -> dict[str, float]:
    """Return what the ops recorded, over all rows, devices and rounds.

    Of a name that several nodes record, a sum is over all of them; of other kinds it is the first node's, and
    ``NODE/name`` that of each other.

    Raises:
        RunError: a name is of two kinds, or a sum over two domains.
    """
    owners: dict[str, tuple[str, Metric]] = {}  # name -> the node that recorded it first
    values: dict[str, Metric] = {}
    for node, reports_of_node in _metrics_by_node(finished).items():
        for name, metric in add_up(reports_of_node, node).items():
            owner, owned = owners.setdefault(name, (node, metric))
            if metric.kind != owned.kind:
                raise conflict(name, (owner, owned), (node, metric))
            if metric.kind == "sum" and not metric.is_like(owned):
                raise conflict(name, (owner, owned), (node, metric))
            if owner == node:
                values[name] = metric
            elif metric.kind == "sum":
                values[name] = values[name] + metric
            else:
                values[f"{node}/{name}"] = metric
    return {name: metric.value for name, metric in values.items()}


def failed_rewards(finished: Sequence[FinishedStep]) -> tuple[int, int]:
    """Return how many samples have no reward, of how many, by the first node that records ``reward/failed``.

    Both are 0 where no node does.
    """
    for node, reports in _metrics_by_node(finished).items():
        metric = add_up(reports, node).get("reward/failed")
        if metric is not None:
            return round(metric.parts["total"]), round(metric.parts["count"])
    return 0, 0


def _metrics_by_node(finished: Sequence[FinishedStep]) -> dict[str, list[Mapping[str, Metric]]]:
    """Return what each node recorded, on all devices and in all rounds."""
    by_node: dict[str, list[Mapping[str, Metric]]] = defaultdict(list)
    for item in finished:
        by_node[item.step.node] += [report.metrics for report in item.reports.values()]
    return by_node


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without those that are not finite, such as a mean over nothing."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with None for a number that is not finite, which JSON does not have.

    Example:
        >>> as_json({"step": 1, "loss": float("nan")})
        {'step': 1, 'loss': None}
    """
    record = dict(values)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            record[name] = None
    return record


def evaluation_details(plan: Plan, finished: Sequence[FinishedStep]) -> dict[str, float]:
    """Return the metrics of an evaluation other than the means of its reported columns.

    These are ``eval/rows`` and the shares of its sets that were left out, and of several sources each one's,
    as ``eval/rows/gsm8k``; and what the writers of reported columns recorded under their names: ``pass@8`` of
    a node that records ``solved/gsm8k`` comes with ``eval/pass@8/gsm8k``.
    """
    recorded = metrics(finished)
    details: dict[str, float] = {}
    for name, value in recorded.items():
        namespace, _, source_metric = name.partition("/")
        is_of_source = source_metric.partition("/")[0] in OF_ROWS
        if namespace == "data" and is_of_source:
            details[f"eval/{source_metric}"] = value
    for metric, column in plan.report.items():
        writer = plan.columns["eval"][column].writer
        for name, value in recorded.items():
            if name.startswith(f"{writer}/"):
                details[f"eval/{metric}/{name.removeprefix(f'{writer}/')}"] = value
    return details


def times(plan: Plan, finished: Sequence[FinishedStep]) -> dict[str, float]:
    """Return the seconds of each step, over all rounds that repeat it: those of its slowest device.

    Where its devices work together, from the first one's start to the last one's end. Of a sync between pools
    from the last one's start: the pool that is there first waits for the other.
    """
    seconds: dict[str, float] = defaultdict(float)
    for item in finished:
        if item.reports:
            seconds[f"time/{item.step.node}"] += _seconds(plan, item)
    return seconds


def _seconds(plan: Plan, item: FinishedStep) -> float:
    reports = item.reports.values()
    # devices work together on a train engine, and in a sync, which gathers its weights
    works_together = isinstance(item.step.action, Sync) or _trains(plan, item.step)
    if not works_together:
        return max(report.end - report.start for report in reports)
    starts = [report.start for report in reports]
    start = max(starts) if item.step.source else min(starts)
    return max(report.end for report in reports) - start


def performance(
    plan: Plan, finished: Sequence[FinishedStep], values: Mapping[str, float]
) -> dict[str, float]:
    """Return what depends on the machine: tokens per second, memory, and on known GPUs the utilisation.

    ``values`` are the iteration's metrics and times, ``time/step`` among them.
    """
    rates: dict[str, float] = {}
    sampled_tokens = 0
    generation_seconds = 0.0
    trained_tokens: dict[str, float] = defaultdict(float)  # node -> tokens that its train engine went through
    for item in finished:
        sampled_tokens += sum(int(lengths.sum()) for lengths in _sequences(plan, item))
        if _generates(item):
            generation_seconds += _seconds(plan, item)
        if not item.step.joins:
            trained_tokens[item.step.node] += sum(report.used.tokens for report in item.reports.values())
    if sampled_tokens:
        rates["perf/tokens_per_second"] = sampled_tokens / values["time/step"]
    if generation_seconds:
        rates["perf/generated_per_second"] = values["tokens/generated"] / generation_seconds
    for node, tokens in trained_tokens.items():
        if tokens:
            rates[f"perf/tokens_per_second/{node}"] = tokens / values[f"time/{node}"]
    return {**rates, **_utilisations(plan, finished), **_memory(finished)}


def _trains(plan: Plan, step: Step) -> bool:
    """Return whether a step's op uses a train engine."""
    function = plan.functions[step.phase].get(step.node)
    return bool(function and "train" in function.handles.values())


def _generates(item: FinishedStep) -> bool:
    """Return whether a step is a rollout: a judge generates too, and its tokens are no samples."""
    return any("tokens/generated" in report.metrics for report in item.reports.values())


def _sequences(plan: Plan, item: FinishedStep) -> list[Any]:
    """Return the lengths of sequences that a step made, per device: a rollout, or a source of examples."""
    if item.step.inserted:
        return []
    columns = plan.columns[item.step.phase]
    types = {columns[name].type for name in item.step.writes}
    if SEQUENCES not in types:
        return []
    return [report.lengths for report in item.reports.values() if report.lengths is not None]


def _memory(finished: Sequence[FinishedStep]) -> dict[str, float]:
    """Return the most bytes of each worker, and of each step on a GPU, without processes beside a worker."""
    most: dict[str, float] = {}
    for item in finished:
        for (pool, device), report in item.reports.items():
            if report.off_device:
                continue
            sizes = {
                f"perf/memory/{pool}-{device}": report.used.memory,
                f"perf/memory_reserved/{pool}-{device}": report.used.reserved,
                f"perf/memory_used/{pool}-{device}": report.used.device,
            }
            if report.used.gpu:
                sizes[f"perf/memory_step/{item.step.node}"] = report.used.memory
            for name, size in sizes.items():
                if size:
                    most[name] = max(most.get(name, 0.0), float(size))
    return most


def _utilisations(plan: Plan, finished: Sequence[FinishedStep]) -> dict[str, float]:
    """Return the utilisation of each train engine's step whose GPU's peak and model's size are known."""
    shares: dict[str, float] = {}
    for item in finished:
        if item.step.joins:
            continue
        usages = _usages(plan, finished, item)
        tokens = sum(usage.tokens for usage in usages)
        has_known_gpus = all(rates_of(usage.gpu) for usage in usages)
        if tokens and has_known_gpus:
            share = utilisation(plan, item.step, usages, _seconds(plan, item))
            if share:
                shares[f"perf/mfu/{item.step.node}"] = share
    return shares


def _usages(plan: Plan, finished: Sequence[FinishedStep], item: FinishedStep) -> list[Usage]:
    """Return what each device of a step used, with the work of the terms for which it runs passes."""
    nodes = {step.node for step in plan.passes(item.step)}
    passes = [ran.reports for ran in finished if ran.step.node in nodes]
    usages = []
    for place, report in item.reports.items():
        works = [reports[place].used for reports in passes if place in reports]
        tokens = sum(work.tokens for work in works)
        squares = sum(work.squares for work in works)
        usages.append(replace(report.used, tokens=tokens, squares=squares))
    return usages


def utilisation(plan: Plan, step: Step, usages: Sequence[Usage], seconds: float) -> float | None:
    """Return FLOPs that the model needs over those that the devices could have done: MFU (arXiv 2204.02311).

    2 N FLOPs per token and causal attention in a forward pass, three times that with backward, each epoch;
    what is computed again is not counted. None of a model whose size is not known.
    """
    (name,) = step.models
    model = plan.models[name]
    assert model.train
    size = _size(model.path, model.head, json.dumps(dict(model.config)))
    if size is None:
        return None
    passes = 1
    if step.updated:
        passes = 3 * plan.functions[step.phase][step.node].value("epochs", 1)
    flops = passes * sum(size.forward_flops(usage.tokens, usage.squares) for usage in usages)
    peak = 0.0  # FLOPs per second of all devices
    for usage in usages:
        rates = rates_of(usage.gpu)
        if rates is None:
            continue
        if model.train.dtype == "bfloat16":
            peak += rates.bf16_flops
        else:
            peak += rates.fp32_flops
    return float(flops / (peak * seconds))


@cache
def _size(path: str, head: str, config: str) -> Size | None:
    try:
        return size_of(path, head, json.loads(config))
    except GraphError:  # a kind of model that sizes.py does not cover
        return None
