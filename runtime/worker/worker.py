"""One process on one device: it holds the engines placed there and carries out its share of each step."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from rlgraph.errors import RunError
from rlgraph.files import damaged, read_sums, sha256, sync
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.data_file import local_path
from rlgraph.nodes.support.record_file import RecordMetadata
from rlgraph.nodes.support.record_file import write as write_recorded
from rlgraph.ops import registry
from rlgraph.ops.interfaces import Context
from rlgraph.runtime.columns.chunk import Chunk, concat, gathered, load, pack, save, unpack
from rlgraph.runtime.columns.shared_memory import read
from rlgraph.runtime.columns.store import Store
from rlgraph.runtime.engines.memory.allocator import keep_freed_memory
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.weights.transports import Handover
from rlgraph.runtime.messages.errors import AwayError, portable
from rlgraph.runtime.messages.report import Report, Scope
from rlgraph.runtime.messages.tasks import ColumnRef, Excerpt, Place, Task, TaskCounter, place_text
from rlgraph.runtime.worker.engine_host import EngineHost
from rlgraph.runtime.worker.op_call import OpCall, row_report
from rlgraph.runtime.worker.process import FORMATTER, Process, redirect, see_own_gpu
from rlgraph.runtime.worker.process_groups import meet
from rlgraph.runtime.worker.sample_file import write_samples
from rlgraph.runtime.worker.usage import StepRange, begin, begin_profile, end_profile, held, work
from rlgraph.runtime.worker.written_metrics import record_written
from rlgraph.variables import hide


class Worker(Process):
    """Hosts the engines of one device; a method that uses a model is called on all workers of its pool."""

    def __init__(
        self,
        threads: int = 0,
        log: str | None = None,
        mailbox: dict[str, Handover] | None = None,
        off_device: bool = False,
        device: str | None = None,
        session: str = "",
    ) -> None:
        """Create the worker of this process, or one of several that share it.

        Args:
            threads: that torch computes with; 0 for its default.
            log: a file that takes this process's output.
            mailbox: of workers of several pools in one process, where they leave weights for each other.
            off_device: whether it is on no device, and has no engines: see ``WorkerCluster.call_off_device``.
            device: ``cuda`` or ``cpu``, as the cluster has given it; by default the one that torch finds.
            session: what names of its shared memory begin with.
        """
        if log:
            redirect(log)
        if threads:
            torch.set_num_threads(threads)
        self.off_device = off_device
        self.device = device or "cpu"
        if device is None and not off_device and torch.cuda.is_available():
            self.device = "cuda"
        if device == "cuda":
            see_own_gpu()
        if self.device == "cpu":
            keep_freed_memory()
        self.mailbox = mailbox
        self.folder = ""
        self.tokenizers: dict[str, Any] = {}
        self.held: dict[str, dict[str, Any]] = {}  # of nodes that hold rows, their columns
        self.store = Store(session or f"rlgraph-{uuid4().hex[:8]}")
        self.logs = Path(log).parent if log else None
        self.task_counter: TaskCounter | None = None  # counts tasks, in a process of its own

    def offer(self) -> tuple[ColumnRef | None, int]:
        """Return a number in shared memory, for others to try to read; nothing where there is no room."""
        sample = np.random.default_rng().integers(2**62, size=1)
        return self.store.share("sample", Chunk(sample, np.arange(2))), int(sample[0])

    def can_read(self, offers: Sequence[tuple[ColumnRef | None, int]]) -> bool:
        """Return whether it can read the shared memory of those: hosts and containers may differ."""
        try:
            return all(ref and read(ref.name, ref.location)[0] == number for ref, number in offers)
        except AwayError:
            return False

    def join(self, folder: str, values: Mapping[str, str]) -> None:
        """Take a run's directory, which every worker writes to, and the variables whose values it hides.

        Raises:
            RunError: this host does not see it.
        """
        if not Path(folder, "checkpoints").is_dir():
            law = f"{folder} is not there on host {socket.gethostname()}, and every worker writes to it"
            raise RunError(f"{law}\n  give a --run-dir on a disk that all hosts share")
        self.folder = folder
        hide(values)

    def setup(self, plan: Plan, meeting: str, pool: str, device: int) -> Report:
        """Join the process groups at ``tcp://host:port``, and load the models of this worker's pool.

        Raises:
            RunError: not all workers came.
        """
        start = time.time()
        copies = {name: replace(m, path=local_path(m.path)) for name, m in plan.models.items()}
        self.plan = replace(plan, models=copies)
        self.worker_place = (pool, device)
        if self.logs:
            self.task_counter = TaskCounter(self.logs, pool, device)
            self.task_counter.begin()
        groups = meet(self.plan, self.worker_place, meeting, self.device, self.mailbox)
        self.engines = EngineHost(self.plan, pool, self.device, groups, Path(self.folder, "logs"))
        return Report(start, time.time(), notes=self.engines.notes())

    def tokenizer(self, model: str) -> Any:
        """Return the tokenizer that lies with a model's weights."""
        if model not in self.tokenizers:
            model_plan = self.plan.models[model]
            self.tokenizers[model] = ModelFiles(
                model_plan.path, model_plan.config, model_plan.trust_remote_code
            ).tokenizer()
        return self.tokenizers[model]

    def perform(self, tasks: Sequence[Task], over: Sequence[str], *chunks: Chunk | ColumnRef) -> Any:
        """Carry out tasks, one after the other; return their reports, then the columns that do not stay.

        What one of them raises has its number among them as the attribute ``task``. ``over`` are names of
        columns in shared memory, which nobody reads any more.
        """
        self.store.drop(over)
        reports = []
        returned = []
        for number, task in enumerate(tasks):
            if self.task_counter:
                self.task_counter.step()
            try:
                report, outputs = self._perform(task, chunks)
            except Exception as error:
                raised = portable(error)
                raised.task = number  # type: ignore[attr-defined]
                raise raised from (None if raised is error else error)
            self.store.settle()
            reports.append(report)
            returned += outputs
        return _flat(reports, returned)

    def _perform(self, task: Task, chunks: Sequence[Any]) -> tuple[Report, list[Chunk | ColumnRef]]:
        """Return a task's report, with the memory that it took, and its values."""
        begin(self.device)
        name = " ".join([task.method, *(arg for arg in task.args if isinstance(arg, str))])
        with StepRange(name, self.device):
            result = getattr(self, task.method)(*task.args, *self.store.arguments(task, chunks))
        report, *outputs = result if isinstance(result, tuple) else (result,)
        returned = self.store.put(task, outputs)
        return replace(report, used=held(report.used, self.device), notes=self.store.notes()), returned

    def run(self, node: str, scope: Scope, *chunks: Chunk) -> Any:
        """Run an op on this worker's rows; return its report, then a ``Chunk`` per column that it writes."""
        start = time.time()
        FORMATTER.at = f"{node} of {scope} on {place_text(self.worker_place)}"
        # an evaluation uses the schedules of the iteration before it
        iteration = scope.iteration + (scope.phase == "train")
        function = self.plan.functions[scope.phase][node].at(iteration, scope.adapted)

        # 1. The columns that the op reads, and unfinished rows of an earlier round.
        reads = [*dict.fromkeys(function.ins.values())]  # the plan's step lists them in this order
        columns = dict(zip(reads, chunks[: len(reads)], strict=True)) if chunks else {}
        resumed = list[Chunk]()
        if scope.resumed:
            picks, counts = scope.resumed
            resumed = gathered(picks, counts, chunks[len(reads) :])
        context = self._context(node, function, scope)
        if reads:
            context.begun = [unpack(column) for column in resumed]

        # 2. Call it.
        engines = getattr(self, "engines", None)  # a process beside a worker has none
        dumps = Path(self.folder, "dumps")
        call = OpCall(self.plan, node, function, scope, self.worker_place, engines, self.tokenizer, dumps)
        outputs = call.outputs(call(columns, context), columns, context)
        if function.holds and scope.phase == "train":
            self.held[node] = context.held
        if resumed and not reads:  # rows of a source that come again, ahead of new ones
            outputs = [concat([again, new]) for again, new in zip(resumed, outputs, strict=True)]

        # 3. Report, with metrics of rewards and filters that the op did not record itself.
        if scope.phase == "train":
            written = dict(zip(function.outs.values(), outputs, strict=True))
            record_written(context, self.plan, function, written)
        engine = registry.load(function.target).engine
        inputs = {port: columns[column] for port, column in function.ins.items() if column in columns}
        used = work(engine, inputs)
        if engine == "train":
            self.engines.release()
        report = Report(
            start,
            time.time(),
            context.metrics,
            used=used,
            finished=context.whole,
            state=call.state(context),
            spans=context.spans,
            off_device=self.off_device,
            **row_report(function, outputs),
        )
        return _flat(report, [*outputs, *map(pack, context.left)])

    def _context(self, node: str, function: Function, scope: Scope) -> Context:
        """Return what an op may know of the run, and of its place in it."""
        context = Context(node, self.plan.seed, scope.iteration, scope.rows, scope.total_rows, scope.position)
        context.state = json.loads(scope.state or "{}")
        context.held = {**self.held.get(node, {})}
        context.courses = function.schedules
        batch = function.value("rows")
        context.batch = batch if isinstance(batch, int) else 0
        context.samples = scope.samples
        context.total_samples = scope.total_samples
        context.resumes = scope.resumes
        column_names = [*function.outs.values(), *function.ins.values()]
        if column_names:
            context.over = self.plan.domain(scope.phase, column_names[0]).kind
        for name, value in function.varying.items():
            context.record(name, value, over="iterations")
        return context

    def engine(self, method: str, *args: Any) -> Report:
        """Sync a model's weights, or move parts of its engines: a method of ``EngineHost``."""
        start = time.time()
        measured = self.of_engines(method, *args)
        return Report(start, time.time(), measured or {})

    def stay(self, *sync: Any) -> Report:
        """Do nothing instead of a send or receive: the pool that serves the model has that version."""
        return Report(time.time(), time.time())

    def repeat(self, times: int, chunk: Chunk) -> Any:
        """Repeat each row ``times`` times: a prompt's value for each of its samples."""
        return self.select(np.repeat(np.arange(len(chunk)), times), chunk)

    def select(self, rows: Any, chunk: Chunk) -> Any:
        """Return the rows of a chunk with these places in it, as those that a filter kept."""
        return self.repartition([rows], [1], chunk)

    def repartition(self, picks: Sequence[Any], counts: Sequence[int], *chunks: Chunk) -> Any:
        """Return rows of this worker's new layout, from the chunks that have them.

        Args:
            picks: for each column, an index into the rows of its chunks laid end to end.
            counts: for each column, how many of ``chunks`` belong to it.
            chunks: first the chunks of the first column, then of the second.
        """
        start = time.time()
        outputs = gathered(picks, counts, chunks)
        return _flat(Report(start, time.time()), outputs)

    def write_rows(self, path: str, picks: Sequence[Any], counts: Sequence[int], *chunks: Chunk) -> str:
        """Write a file of the rows that ``repartition`` would return, down to the disk; return its digest."""
        save(path, gathered(picks, counts, chunks))
        sync(Path(path))
        return sha256(Path(path))

    def read_rows(self, path: str) -> Any:
        """Return the columns that ``write_rows`` wrote."""
        start = time.time()
        columns = load(path)
        return _flat(Report(start, time.time()), columns)

    def write_held(self, node: str, path: str) -> str:
        """Write a file of the columns that a node holds, down to the disk; return its digest."""
        columns = self.held.get(node, {})
        save(path, [Chunk([*columns]), *map(pack, columns.values())])
        sync(Path(path))
        return sha256(Path(path))

    def read_held(self, node: str, path: str) -> None:
        """Hold the columns that ``write_held`` wrote."""
        names, *columns = load(path)
        self.held[node] = dict(zip(names.values, map(unpack, columns), strict=True))

    def mean(self, *chunks: Chunk) -> tuple[float, int]:
        """Return sum and count of a column's values."""
        return sum(float(chunk.values.sum()) for chunk in chunks), sum(
            prod(chunk.values.shape) for chunk in chunks
        )

    def write_samples(self, path: str, columns: Sequence[Excerpt], *chunks: Chunk) -> list[dict[str, Any]]:
        """Write rows of some columns as JSON lines; ``chunks`` are those of the first, then of the next.

        Returns:
            The rows, without what is per token.
        """
        models = [name for name, model in self.plan.models.items() if model.head == "lm"]
        tokenizer = self.tokenizer(models[0]) if models else None
        return write_samples(path, tokenizer, columns, chunks)

    def write_recorded(
        self, path: str, about: RecordMetadata, picks: Sequence[Any], counts: Sequence[int], *chunks: Chunk
    ) -> None:
        """Write the columns of one domain, with the rows that ``repartition`` would return."""
        write_recorded(
            Path(path), about, dict(zip(about.types, gathered(picks, counts, chunks), strict=True))
        )

    def of_engines(self, method: str, *args: Any) -> Any:
        """Return what a method of ``EngineHost`` returns."""
        return getattr(self.engines, method)(*args)

    def damaged(
        self, folder: str, shares: Mapping[Place, Sequence[str]], pool: str, device: int
    ) -> list[str]:
        """Return those of this worker's share of a checkpoint's files that are not what was written."""
        return damaged(Path(folder), read_sums(Path(folder)), shares[pool, device])

    def begin_profile(self, pool: str, device: int) -> None:
        """Record what is computed from now on."""
        begin_profile(f"{pool}-{device}")

    def end_profile(self, folder: str, pool: str, device: int) -> None:
        """Write what was recorded to a file of this worker's own."""
        end_profile(f"{pool}-{device}", f"{folder}/{pool}-{device}.json.gz")

    def close(self) -> None:
        """End what the engines started, and leave the process group."""
        self.store.close()
        if self.task_counter:
            self.task_counter.close()
        if hasattr(self, "engines"):
            self.engines.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _flat(report: Any, outputs: Sequence[Chunk | ColumnRef]) -> Any:
    return (report, *outputs) if outputs else report
