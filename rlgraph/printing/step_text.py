"""Prints one step of a plan: its title, its sentence, and the details below it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from rlgraph.costs.lora_size import served_alone
from rlgraph.ir.actions import (
    Collect,
    Kind,
    Lend,
    Merge,
    MoveEngine,
    Repartition,
    Repeat,
    RunOp,
    Select,
    Sync,
)
from rlgraph.ir.function import Function
from rlgraph.ir.intervals import words
from rlgraph.ir.plan import ColumnPlan, Plan, Step
from rlgraph.units import plural, range_text, size_text

PATHS = {
    "memory": "within each process",
    "ipc": "through memory that both map",
    "broadcast": "by broadcast",
    "disk": "through files",
}

PREPOSITIONS = {Kind.LOAD: "to", Kind.OFFLOAD: "from", Kind.WAKE: "on", Kind.SLEEP: "on"}


@dataclass(frozen=True)
class Detail:
    """One detail of a step: the word that introduces it, such as ``reads``, and the text behind that word."""

    word: str
    text: str


@dataclass(frozen=True)
class StepEntry:
    """A step with everything that is said about it."""

    plan: Plan
    step: Step

    @cached_property
    def title(self) -> str:
        """Return the user's name for the step, or a few words for one that rlgraph inserted."""
        return title(self.step)

    @cached_property
    def sentence(self) -> str:
        """Return what the step does, where, and in which iterations."""
        return sentence(self.step)

    @cached_property
    def cost(self) -> str:
        """Return the predicted time and bytes; empty without a prediction."""
        return cost_text(self.plan, self.step)

    @cached_property
    def details(self) -> tuple[Detail, ...]:
        """Return the details that this step has, in the order in which they are shown."""
        details = (
            *_data_details(self.step, self.plan),
            Detail("sends", _adapter_sync_text(self.plan, self.step)),
            Detail("varies", _schedules_text(self.plan, self.step)),
            Detail("state", _state_text(self.plan, self.step)),
            Detail("joins", _joined_update_text(self.plan, self.step)),
            Detail("holds", _replay_text(self.plan, self.step)),
            Detail("caches", _cache_text(self.plan, self.step)),
            Detail("takes", self.cost),
        )
        return tuple(detail for detail in details if detail.text)


def title(step: Step) -> str:
    """Return a step in a few words: the user's name for it, or the verb and object of an inserted one."""
    if not step.inserted:
        return step.node
    columns = ", ".join(step.reads)
    if isinstance(step.action, MoveEngine):
        return f"{step.kind} {' and '.join(step.action.parts)} of {step.model}"
    return f"{step.kind} {columns or step.model}"


def sentence(step: Step) -> str:
    """Return a step as a line: what it does, with which model, where, and in which iterations if not all.

    Repartitioned copies of a column carry the name of their layout: ``tokens@balanced/4``.
    """
    if step.when:
        return f"{_action_text(step)}, {words(step.when)}"
    return _action_text(step)


def _action_text(step: Step) -> str:
    """Return what a step does, with which model and where."""
    location = _location(step)
    columns = ", ".join(step.reads)
    match step.action:
        case RunOp(op=op):
            models = " of ".join(f"{name}@{version}" for name, version in step.models.items())
            with_model = f" with {models}" if models else ""
            return f"run {step.node} ({op}){with_model} on {location}"
        case Repeat():
            return f"repeat {columns} for each {_row_name(step)} on {location}"
        case Select():
            return f"select the rows of {columns} that stay on {location}"
        case Collect():
            return f"collect the rows that {step.region} keeps on {location}"
        case Merge():
            return f"merge the rows of {columns} on {location}"
        case Repartition():
            return f"repartition {columns} onto {location}"
        case Lend(model=model, version=version):
            return f"lend {location} to generation with {model}@{version}, while it waits for rows"
        case Sync(model=model, version=version, path=path, source=source):
            engine = f"the train engine on pool {source}" if source else "the train engine"
            return f"sync {model}@{version} from {engine} to the serve engine on {location}, {PATHS[path]}"
        case MoveEngine(model=model, parts=parts):
            preposition = PREPOSITIONS[step.kind]
            return f"{step.kind} {' and '.join(parts)} of {model} {preposition} {location}"
        case _:
            assert_never(step.action)


def _location(step: Step) -> str:
    """Return text such as ``main[0-7]`` or ``the CPUs of main[0]``."""
    devices = str(step.devices[0])
    if len(step.devices) > 1:
        devices = f"0-{step.devices[-1]}"
    pool = f"{step.pool}[{devices}]"
    return f"the CPUs of {pool}" if step.on_host else pool


def _row_name(step: Step) -> str:
    """Return ``sample`` for a step that writes the copy ``answer*samples``."""
    copies = ", ".join(step.writes)
    return re.sub(r".*\*|s(:.*)?$", "", copies)


def _data_details(step: Step, plan: Plan) -> Iterator[Detail]:
    """Yield why an inserted step is there or what a user's step reads, then what it writes and frees."""
    if step.inserted:
        yield Detail("because", step.because)
    else:
        yield Detail("reads", ", ".join(step.reads))
    yield Detail("writes", ", ".join(_written(step, plan.columns[step.phase])))
    yield Detail("frees", ", ".join(step.frees))


def _written(step: Step, columns: Mapping[str, ColumnPlan]) -> list[str]:
    """Return the columns that a step writes, with new types, and the model version that it writes."""
    if isinstance(step.action, Repartition):
        return [*step.writes]  # of the types of the columns that it reads
    written = [f"{name}: {columns[name].type}" for name in step.writes]
    version = step.models.get(step.updated)
    if version:
        written.append(f"{step.updated}@{version.next}")
    return written


def _adapter_sync_text(plan: Plan, step: Step) -> str:
    """Return a remark on a sync that sends a LoRA adapter instead of all weights."""
    if isinstance(step.action, Sync) and served_alone(plan.models[step.action.model]):
        return "its adapter alone, which takes the place of the version before"
    return ""


def _schedules_text(plan: Plan, step: Step) -> str:
    """Return the attributes that change over the iterations, as ``kl_coef: 0.1 to 0.0 over 100 ...``."""
    function = plan.functions[step.phase].get(step.node)
    if function is None:
        return ""
    schedules = _schedules(function, "")
    for path, hook in function.hooks.items():
        schedules += _schedules(hook, f"{path}.")
    return "; ".join(schedules)


def _schedules(function: Function, prefix: str) -> list[str]:
    return [f"{prefix}{name}: {schedule}" for name, schedule in function.courses.items()]


def _state_text(plan: Plan, step: Step) -> str:
    """Return which step's state the op gets."""
    function = plan.functions[step.phase].get(step.node)
    if function is None or not function.state:
        return ""
    if function.state == step.node:
        return "its own, kept for the next iteration and in checkpoints"
    return f"that of {function.state} before the iteration"


def _joined_update_text(plan: Plan, step: Step) -> str:
    """Return the update whose optimizer steps a loss joins, and whether that costs a pass over rows."""
    if not step.joins:
        return ""
    (update,) = (candidate for candidate in plan.phases[step.phase] if candidate.node == step.joins)
    text = f"the optimizer steps of {step.joins}"
    if step in plan.passes(update):
        return f"{text}, in a pass of its own"
    return f"{text}, in the pass over the same tokens"


def _replay_text(plan: Plan, step: Step) -> str:
    """Return how many rows a replay buffer has room for, and how old the rows are that it returns."""
    function = plan.functions[step.phase].get(step.node)
    if function is None or not function.holds:
        return ""
    youngest, oldest = plan.domain(step.phase, step.writes[0]).ages
    capacity = function.value("capacity")
    return f"at most {capacity:,} rows, and gives those of {youngest} to {oldest} iterations before"


def _cache_text(plan: Plan, step: Step) -> str:
    """Return a rollout's KV cache, as ``262,144 tokens: 128 samples in flight per engine, 2 waves``."""
    if plan.predicted is None or step.phase != "train":
        return ""  # how many rows an evaluation has is not known before its files are read
    if step.node not in plan.predicted.in_flight:
        return ""
    serve = plan.models[step.model].serve
    assert serve
    if serve.addresses:
        return ""  # servers that run already keep the cache that they were started with
    in_flight, waves = plan.predicted.in_flight[step.node]
    samples = f"{in_flight:,} {plural('sample', in_flight)} in flight per engine"
    return f"{serve.cache_tokens:,} tokens: {samples}, {waves:,} {plural('wave', waves)}"


def cost_text(plan: Plan, step: Step) -> str:
    """Return text such as ``1.2 s to 4 s, receives 1.73 GB per device``; empty without a prediction."""
    if step.seconds is None:
        return ""
    # most texts have no prediction, and pricing takes long to import
    from rlgraph.costs.pricing import stepped_on_host

    text = range_text(step.seconds)
    if step.bytes:
        text += f", receives {size_text(step.bytes)} per device"
        if isinstance(step.action, Sync):
            text += _sync_cost_text(plan, step.action)
    if plan.predicted and step.updated:
        gradients = stepped_on_host(plan, step)
        if gradients:
            text += f", steps {size_text(gradients)} of gradients on its host"
    return text


def _sync_cost_text(plan: Plan, sync: Sync) -> str:
    """Return the fewest bytes that a sync could send per device, and the buckets that they travel in."""
    from rlgraph.costs.pricing import sync_buckets, sync_least

    count, dtype = sync_buckets(plan, sync)
    buckets = f"{count} {plural('bucket', count)} of {dtype}"
    return f" ({size_text(sync_least(plan, sync))} at least) in {buckets}"
