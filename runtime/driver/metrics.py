"""A line of metrics.jsonl is made from the reports of an iteration's steps: see docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rlgraph.costs.detect import rates_of
from rlgraph.costs.model_size import Size, size_of
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Step
from rlgraph.runtime.driver.iteration import Ran
from rlgraph.runtime.messages.report import Usage

SEQUENCES = "int64[samples, tokens]"


def metrics(ran: Sequence[Ran]) -> dict[str, float]:
    """Means over rows and ranks of what the ops recorded; a count of 0 marks a sum.

    A mean that several nodes record under one name is the first node's, and ``NODE/name`` that of each other.
    """
    found: dict[str, tuple[float, float]] = {}
    owners: dict[str, str] = {}
    for item in ran:
        node = item.step.node
        for report in item.reports.values():
            for recorded, (total, count) in report.metrics.items():
                own = not count or owners.setdefault(recorded, node) == node
                name = recorded if own else f"{node}/{recorded}"
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + total, before[1] + count
    return {name: total / count if count else total for name, (total, count) in found.items()}


def beside(plan: Plan, ran: Sequence[Ran]) -> dict[str, float]:
    """Return what the writers of an evaluation's reported columns recorded under their own names.

    ``pass@8`` of a node that records ``solved/gsm8k`` comes with ``eval/pass@8/gsm8k``.
    """
    recorded: dict[str, float] = metrics(ran)
    found: dict[str, float] = {}
    for metric, column in plan.report.items():
        own = f"{plan.columns['eval'][column].writer}/"
        names = [name for name in recorded if name.startswith(own)]
        found |= {f"eval/{metric}/{name.removeprefix(own)}": recorded[name] for name in names}
    return found


def times(plan: Plan, ran: Sequence[Ran]) -> dict[str, float]:
    """Seconds of each step: the longest of a device's own, of all rounds that repeat it.

    Where its devices work together, from the first one's start to the last one's end. Of a sync between pools
    from the last one's start: the pool that is there first waits for the other.
    """
    found: dict[str, float] = {}
    for item in ran:
        if item.reports:
            name = f"time/{item.step.node}"
            found[name] = found.get(name, 0.0) + _seconds(plan, item)
    return found


def _seconds(plan: Plan, item: Ran) -> float:
    reports = item.reports.values()
    if not _together(plan, item.step):
        return max(report.end - report.start for report in reports)
    starts = [report.start for report in reports]
    return max(report.end for report in reports) - (max(starts) if item.step.source else min(starts))


def _together(plan: Plan, step: Step) -> bool:
    """Return whether a step is a collective: a train engine's, or a sync, which gathers its weights."""
    return step.facts.syncs or _uses(plan, step, "train")


def performance(plan: Plan, ran: Sequence[Ran], values: Mapping[str, float]) -> dict[str, float]:
    """Return what depends on the machine: tokens per second, memory, and on known GPUs the utilisation.

    Args:
        plan: what ran.
        ran: its steps.
        values: the iteration's metrics and times, ``time/step`` among them.
    """
    found = {}
    tokens = sum(int(lengths.sum()) for item in ran for lengths in _sequences(plan, item))
    if tokens:
        found["perf/tokens_per_second"] = tokens / values["time/step"]
    generating = sum(_seconds(plan, item) for item in ran if item.reports and _uses(plan, item.step, "serve"))
    if "tokens/generated" in values and generating:
        found["perf/generated_per_second"] = values["tokens/generated"] / generating
    return {**found, **_utilisations(plan, ran), **_memory(ran)}


def _uses(plan: Plan, step: Step, engine: str) -> bool:
    """Return whether a step's op uses an engine, ``train`` or ``serve``."""
    function = plan.functions[step.phase].get(step.node)
    return bool(function and engine in function.handles.values())


def _sequences(plan: Plan, item: Ran) -> list[Any]:
    """Tokens of each sequence that a step made on each device: of a rollout, or of a source of examples."""
    columns = plan.columns[item.step.phase]
    if item.step.inserted or all(columns[name].type != SEQUENCES for name in item.step.writes):
        return []
    return [report.lengths for report in item.reports.values() if report.lengths is not None]


MEMORY = {"memory": "memory", "memory_reserved": "reserved", "memory_used": "device"}  # metric -> of Usage


def _memory(ran: Sequence[Ran]) -> dict[str, float]:
    """The most bytes of each worker in a step, and of each step on a GPU. Processes beside it don't count."""
    found: dict[str, float] = {}
    for item in ran:
        for (pool, device), report in item.reports.items():
            used = report.used
            sizes = {f"{m}/{pool}-{device}": getattr(used, field) for m, field in MEMORY.items()}
            sizes |= {f"memory_step/{item.step.node}": used.memory} if used.gpu else {}
            for name, size in sizes.items():
                if size and not report.beside:
                    found[f"perf/{name}"] = max(found.get(f"perf/{name}", 0.0), float(size))
    return found


def _utilisations(plan: Plan, ran: Sequence[Ran]) -> dict[str, float]:
    """Return the utilisation of each train engine's step whose GPU's peak and model's size are known."""
    found: dict[str, float] = {}
    for item in ran:
        used = [report.used for report in item.reports.values()]
        if any(one.tokens for one in used) and all(rates_of(one.gpu) for one in used):
            share = utilisation(plan, item.step, used, _seconds(plan, item))
            found |= {f"perf/mfu/{item.step.node}": share} if share else {}
    return found


def utilisation(plan: Plan, step: Step, used: Sequence[Usage], seconds: float) -> float | None:
    """MFU: FLOPs that the model needs over those that the devices could have done (arXiv 2204.02311).

    2 N FLOPs a token and causal attention in a forward pass, three times that with backward, each epoch;
    what is computed again is not counted. None of a model whose size is not known.
    """
    (name,) = step.models
    model, function = plan.models[name], plan.functions[step.phase][step.node]
    assert model.train
    size = _size(model.path, model.head)
    if size is None:
        return None
    passes = 3 * function.value("epochs", 1) if step.updates else 1
    attention = size.attention_flops(1)
    flops = passes * sum(2 * size.multiplied * one.tokens + attention * one.squares for one in used)
    peaks = [gpu for one in used if (gpu := rates_of(one.gpu))]
    peak = sum(g.bf16_flops if model.train.dtype == "bfloat16" else g.fp32_flops for g in peaks)
    return float(flops / (peak * seconds))


@cache
def _size(path: str, head: str) -> Size | None:
    try:
        return size_of(path, head)
    except GraphError:  # a kind of model that sizes.py does not cover
        return None
