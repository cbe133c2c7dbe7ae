"""One process on one device: it holds the engines placed there and carries out its share of each step."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlgraph import catalog
from rlgraph.engines import Context
from rlgraph.errors import RunError
from rlgraph.nodes.recordfile import About
from rlgraph.plan import Function, Plan
from rlgraph.runtime import profiling
from rlgraph.runtime.allocator import keep_freed_memory
from rlgraph.runtime.columns import (
    Part,
    concat,
    empty,
    gather,
    load,
    pack,
    packed,
    save,
    take,
    unpack,
    whole,
)
from rlgraph.runtime.finite import FiniteEngine
from rlgraph.runtime.hosted import Engines
from rlgraph.runtime.lent import AwayError, Lent, lend, may_be_read
from rlgraph.runtime.meeting import meet
from rlgraph.runtime.recording import Gathering, write_recorded
from rlgraph.runtime.samples import Excerpt, write_samples
from rlgraph.runtime.shelf import Shelf
from rlgraph.runtime.tasks import Task, Trail
from rlgraph.runtime.usage import Usage, usage
from rlgraph.runtime.weights import Handover


@dataclass(frozen=True)
class Scope:
    """Where in the run a step stands, and which rows this worker's share of it has."""

    phase: str
    iteration: int
    rows: Any = ()  # int64 row numbers: of the rows read, or of a source's none
    total_rows: int = 0
    position: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    adapted: Mapping[str, float] = field(default_factory=dict)  # the op's attributes that follow a metric
    asks: int | None = None  # rows that are asked of a source; None: its own ``batch``
    resumes: bool = False  # whether what an op leaves unfinished is taken up again
    begun: tuple[Any, ...] = ()  # picks and counts, as of ``repartition``, of what is taken up


@dataclass(frozen=True)
class Report:
    """What a worker says of its share of a step: when it ran, its metrics, and the rows that it made."""

    start: float
    end: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    lengths: Any = None  # int64 [rows written], tokens of each, of an op that makes a domain
    kept: Any = None  # int64 [rows that stay], which of the rows read, of a filter
    used: Usage = field(default_factory=Usage)
    whole: Any = None  # int64: which of the rows read are finished, of an op that may leave some
    beside: bool = False  # whether it ran beside the device


class Worker:
    """Hosts the engines of one device; a method that uses a model is called on all workers of its pool."""

    def __init__(
        self,
        threads: int = 0,
        log: str | None = None,
        desk: dict[str, Handover] | None = None,
        beside: bool = False,
    ) -> None:
        """One for this process, or one of several that share it.

        Args:
            threads: that torch computes with; 0 for its default.
            log: a file that takes this process's output.
            desk: of workers of several pools in one process, where they hand over weights.
            beside: whether it is on no device, and has no engines: see ``beside.py``.
        """
        if log:
            _redirect(log)
        if threads:
            torch.set_num_threads(threads)
        self.beside = beside
        self.device = "cuda" if not beside and torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            keep_freed_memory()
        self.desk, self.folder = desk, ""
        self.tokenizers: dict[str, Any] = {}
        self.shelf = Shelf()
        self.logs = Path(log).parent if log else None
        self.trail: Trail | None = None  # of a process of its own

    def place(self) -> tuple[str, str, str]:
        """Host, address and accelerator, by which the driver sorts workers."""
        return socket.gethostname(), _address(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def environment(self) -> dict[str, Any]:
        """What this worker runs on."""
        if self.device == "cuda":
            gpu = torch.cuda.get_device_properties(0)
            kind: dict[str, Any] = {"name": gpu.name, "memory": gpu.total_memory}
        else:
            kind = {"name": "cpu", "threads": torch.get_num_threads()}
        return {"host": socket.gethostname(), **kind}

    def node(self) -> str:
        """The host, as Ray knows it."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def free_port(self) -> int:
        """A port of this host that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def offer(self) -> tuple[Lent, int] | None:
        """A number in this worker's memory, for others to try to read; none where the system has no way."""
        self.sample = np.random.default_rng().integers(2**62, size=1)
        return (lend("sample", self.sample, np.arange(2)), int(self.sample[0])) if may_be_read() else None

    def can_read(self, offers: Sequence[tuple[Lent, int] | None]) -> bool:
        """Whether this worker can read the memory of those: hosts and containers may differ."""
        try:
            return all(offer and whole(offer[0]).values[0] == offer[1] for offer in offers)
        except AwayError:
            return False

    def join(self, folder: str) -> None:
        """Take a run's directory, which every worker writes to.

        Raises:
            RunError: this host does not see it.
        """
        if not Path(folder, "checkpoints").is_dir():
            law = f"{folder} is not there on host {socket.gethostname()}, and every worker writes to it"
            raise RunError(f"{law}\n  give a --run-dir on a disk that all hosts share")
        self.folder = folder

    def setup(self, plan: Plan, meeting: str, pool: str, device: int) -> Report:
        """Join the process groups and load the models of this worker's pool.

        Args:
            plan: what will run.
            meeting: where all workers meet, ``tcp://host:port``.
            pool: that this worker belongs to.
            device: its number there.

        Raises:
            RunError: not all workers came.
        """
        start = time.time()
        self.plan, self.at = plan, (pool, device)
        if self.logs:
            self.trail = Trail(self.logs, pool, device)
            self.trail.begin()
        groups = meet(plan, (pool, device), meeting, self.device, self.desk)
        self.engines = Engines(plan, pool, self.device, groups, Path(self.folder, "logs"))
        return Report(start, time.time())

    def tokenizer(self, model: str) -> Any:
        """The tokenizer that lies with a model's weights."""
        if model not in self.tokenizers:
            from transformers import AutoTokenizer

            self.tokenizers[model] = AutoTokenizer.from_pretrained(self.plan.models[model].path)
        return self.tokenizers[model]

    def perform(self, tasks: Sequence[Task], over: Sequence[str], *parts: Part | Lent) -> Any:
        """Carry out tasks, one after the other: their reports, then the parts that do not stay.

        What one of them raises has its number among them as the attribute ``task``.

        Args:
            tasks: to carry out.
            over: names of parts that were lent, which nobody reads any more.
            parts: that the tasks are given.
        """
        self.shelf.drop(over)
        reports, returned = [], []
        for number, task in enumerate(tasks):
            if self.trail:
                self.trail.step()
            try:
                report, made = self._perform(task, parts)
            except Exception as error:
                error.task = number  # type: ignore[attr-defined]
                raise
            reports.append(report)
            returned += made
        return _flat(reports, returned)

    def _perform(self, task: Task, parts: Sequence[Part | Lent]) -> tuple[Report, list[Part | Lent]]:
        """A task's report and what it returns."""
        result = getattr(self, task.method)(*task.args, *self.shelf.given(task, parts))
        report, *made = result if isinstance(result, tuple) else (result,)
        return report, self.shelf.put(task, made)

    def run(self, node: str, scope: Scope, *given: Part | Lent) -> Any:
        """Run an op on this worker's rows: its report, then a ``Part`` for each column that it writes."""
        start = time.time()
        parts = list(map(whole, given))
        # an evaluation is as the iteration before it was
        iteration = scope.iteration + (scope.phase == "train")
        function = self.plan.functions[scope.phase][node].at(iteration, scope.adapted)
        reads = _reads(function)
        columns = dict(zip(reads, parts[: len(reads)], strict=True))
        begun = _gathered(*scope.begun, parts[len(reads) :]) if scope.begun else []
        context = Context(node, self.plan.seed, scope.iteration, scope.rows, scope.total_rows, scope.position)
        context.resumes, context.begun = scope.resumes, [unpack(part, "cpu") for part in begun if reads]
        for name, value in function.varying.items():
            context.record(name, value, count=1)
        result = self._call(function, columns, context, scope)
        outputs = self._outputs(node, scope.phase, function, result)
        if begun and not reads:  # rows of a source that come again, first
            outputs = [concat(both) for both in zip(begun, outputs, strict=True)]
        named = {port: columns[column] for port, column in function.ins.items()}
        used = usage(self.device, catalog.load(function.target).engine, named)
        rows = {**_rows(function, outputs), "whole": context.whole}
        report = Report(start, time.time(), context.metrics, used=used, beside=self.beside, **rows)
        return _flat(report, [*outputs, *map(packed, context.left)])

    def _call(self, function: Function, columns: Mapping[str, Part], context: Context, scope: Scope) -> Any:
        op = catalog.load(function.target)
        if columns and op.engine is None and not len(context.rows):
            return None  # no rows, nothing to compute
        arguments: dict[str, Any] = dict(function.attributes)
        arguments |= {} if scope.asks is None else {"batch": scope.asks}
        for path, hook in function.hooks.items():
            name, _, key = path.partition(".")
            made = self._hook(op.hooks[name], function, hook, columns)
            arguments[name] = {**arguments.get(name, {}), key: made} if key else made
        for parameter, handle in function.handles.items():
            model = function.of if parameter == "of" else function.model
            arguments[parameter] = self._handle(handle, model, function, context, scope)
        # what runs on no model is small, and its bodies need not think of devices
        device = self.device if op.engine == "train" else "cpu"
        for port in op.inputs:
            column = function.ins.get(port.name)
            arguments[port.name] = unpack(columns[column], device) if column else None
        result = op.body(**arguments)
        if op.declared.updates and function.model:
            self.engines.versions[function.model] += 1
        return result

    def _hook(self, kind: Any, function: Function, hook: Function, columns: Mapping[str, Part]) -> Any:
        declared = catalog.load(hook.target, kind=kind)
        ports = {port.name for port in declared.inputs if kind.reads} & function.ins.keys()
        read = {port: unpack(columns[function.ins[port]], self.device) for port in ports - {*kind.provides}}
        return kind(declared.body, hook.attributes, read)

    def _handle(
        self, handle: str, model: str | None, function: Function, context: Context, scope: Scope
    ) -> Any:
        if handle == "context":
            return context
        if handle == "tokenizer":
            assert function.tokenizer
            return self.tokenizer(function.tokenizer)
        assert model
        engine = self.engines.at(model, handle, scope.versions[model], context.node)
        if (rate := self.plan.models[model].rate) and catalog.load(function.target).declared.updates:
            engine.set_rate(rate.at(scope.iteration + 1))
        on_nan = self.plan.schedule["on_nan"]
        if on_nan == "skip" or function.of or not catalog.load(function.target).declared.updates:
            return engine
        pool, device = self.at
        name = f"step-{scope.iteration + 1:06d}-{context.node}-{pool}-{device}.jsonl"
        return FiniteEngine(engine, context.node, on_nan, Path(self.folder, "dumps", name))

    def _outputs(self, node: str, phase: str, function: Function, result: Any) -> list[Part]:
        columns = self.plan.columns[phase]
        if result is None:
            return [empty(columns[column].type) for column in function.outs.values()]
        values = (
            [result] if list(function.outs) == [""] else [getattr(result, name) for name in function.outs]
        )
        return [
            pack(value, columns[column].type.partition("[")[0], f"column `{column}` of node `{node}`")
            for value, column in zip(values, function.outs.values(), strict=True)
        ]

    def sync(self, model: str, version: int) -> Report:
        """Bring the serve engine to the weights of the train engine beside it, unless it holds them."""
        return _timed(self.engines.sync, model, version)

    def send(self, model: str, version: int) -> Report:
        """Send a train engine's weights to the pool that serves them; all of its own pool do."""
        return _timed(self.engines.send, model, version)

    def receive(self, model: str, version: int) -> Report:
        """Bring the serve engine to the weights that another pool sends."""
        return _timed(self.engines.receive, model, version)

    def stay(self, model: str, version: int) -> Report:
        """Instead of a send or receive: the pool that serves the model has that version."""
        return Report(time.time(), time.time())

    def transition(self, kind: str, model: str, parts: Sequence[str]) -> Report:
        """Move parts of an engine off the device (offload, sleep) or back (load, wake)."""
        return _timed(self.engines.move, kind, model, parts)

    def repeat(self, times: int, part: Part | Lent) -> Any:
        """Each row ``times`` times: a prompt's value for each of its samples."""
        start = time.time()
        return Report(start, time.time()), take(part, np.repeat(np.arange(len(part)), times))

    def select(self, rows: Any, part: Part | Lent) -> Any:
        """The rows of a part that a filter kept, by their places in it."""
        start = time.time()
        return Report(start, time.time()), take(part, rows)

    def repartition(self, picks: Sequence[Any], counts: Sequence[int], *parts: Part | Lent) -> Any:
        """Rows of this worker's new layout, out of the parts that hold them.

        Args:
            picks: for each column, an index into its parts' rows laid end to end.
            counts: for each column, how many of ``parts`` are its own.
            parts: first the parts of the first column, then of the second.
        """
        start = time.time()
        outputs = _gathered(picks, counts, parts)
        return _flat(Report(start, time.time()), outputs)

    def write_rows(self, path: str, picks: Sequence[Any], counts: Sequence[int], *parts: Part) -> None:
        """Write to a file what ``repartition`` would bring together."""
        save(path, _gathered(picks, counts, parts))

    def read_rows(self, path: str) -> Any:
        """The columns that ``write_rows`` wrote."""
        start = time.time()
        return _flat(Report(start, time.time()), load(path))

    def mean(self, *parts: Part) -> tuple[float, int]:
        """Sum and count of a column's values."""
        return sum(float(part.values.sum()) for part in parts), sum(len(part.values) for part in parts)

    def write_samples(self, path: str, columns: Sequence[Excerpt], *parts: Part) -> None:
        """Write rows of some columns as JSON lines; ``parts`` are those of the first, then of the next."""
        model = next(name for name, model in self.plan.models.items() if model.head == "lm")
        write_samples(path, self.tokenizer(model), columns, parts)

    def write_recorded(self, folder: str, about: About, columns: Sequence[Gathering], *parts: Part) -> None:
        """Write the columns of one domain; ``parts`` are those of the first, then of the next."""
        write_recorded(folder, about, columns, parts)

    def begin_save(self, folder: str) -> None:
        """Copy this rank's shards of every trained model, and write them in the background."""
        self.engines.begin_save(folder)

    def finish_save(self) -> None:
        """Wait until they are written."""
        self.engines.finish_save()

    def load(self, folder: str, versions: Mapping[str, int]) -> None:
        """Read what ``save`` wrote, on any number of ranks."""
        self.engines.load(folder, versions)

    def export(self, folder: str) -> None:
        """Write every trained model as a Hugging Face directory."""
        self.engines.export(folder)

    def begin_profile(self, pool: str, device: int) -> None:
        """Record what is computed from now on."""
        profiling.begin(f"{pool}-{device}")

    def end_profile(self, folder: str, pool: str, device: int) -> None:
        """Write what was recorded to a file of this worker's own."""
        profiling.end(f"{pool}-{device}", f"{folder}/{pool}-{device}.json.gz")

    def close(self) -> None:
        """End what the engines started, and leave the process group."""
        if self.trail:
            self.trail.close()
        if hasattr(self, "engines"):
            self.engines.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _gathered(picks: Sequence[Any], counts: Sequence[int], parts: Sequence[Part | Lent]) -> list[Part]:
    """A part of each column, out of those that hold its rows: see ``Worker.repartition``."""
    found, at = [], 0
    for pick, count in zip(picks, counts, strict=True):
        found.append(gather(parts[at : at + count], pick))
        at += count
    return found


def _timed(action: Callable[..., None], *args: Any) -> Report:
    start = time.time()
    action(*args)
    return Report(start, time.time())


def _rows(function: Function, outputs: Sequence[Part]) -> dict[str, Any]:
    """What a report says of the rows that an op wrote: their lengths, and which of them a filter keeps."""
    if not outputs:
        return {}
    ragged = next((part for part in outputs if part.offsets is not None), outputs[0])
    filters = catalog.load(function.target).declared.filters
    return {"lengths": ragged.lengths, "kept": np.flatnonzero(outputs[0].values) if filters else None}


def _flat(report: Any, outputs: Sequence[Part]) -> Any:
    return (report, *outputs) if outputs else report


def _reads(function: Function) -> list[str]:
    """Columns in the order in which the plan's step lists them."""
    return list(dict.fromkeys(function.ins.values()))


def _address() -> str:
    ray = sys.modules.get("ray")  # absent when everything runs inline
    return str(ray.util.get_node_ip_address()) if ray and ray.is_initialized() else "127.0.0.1"


def _redirect(log: str) -> None:
    """Send this process's output, of native code too, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    Path(log).parent.mkdir(parents=True, exist_ok=True)  # on another host than the driver's
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
