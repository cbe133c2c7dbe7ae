"""Sends metrics and samples to TensorBoard's files, Weights & Biases, MLflow and trackers of your own."""

import importlib.util
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Protocol

from rlgraph.errors import RunError, nearest
from rlgraph.files import read_json, write
from rlgraph.nodes.support.user_call import DaemonThreads, UserExitError, guarded
from rlgraph.ops.registry import load_function

Values = Mapping[str, float]
SampleRow = Mapping[str, Any]  # column -> a text, a number, a truth value, or None
QUEUE = 2**14  # numbers that may wait for TensorBoard's writer; more than arrive between two checks of it
LIMIT = 300.0  # seconds that one call of a tracker may take, unless this variable of the environment is set
VARIABLE = "RLGRAPH_TRACKER_SECONDS"
IDS = "tracked.json"  # the file of a run directory with the id by which each service knows the run


class Tracker(Protocol):
    """Receives the metrics and samples of a run, one iteration after the other.

    For a tracker of your own, ``--track my_tracker.py:Name``, ``Name`` is a class, or a function that returns
    a tracker; it is called with the run directory and the graph's name.
    """

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name, measured after ``step`` iterations."""

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Show the first rows of an iteration (``name`` is ``train``) or of an evaluation (``eval``)."""

    def close(self, failed: bool) -> None:
        """Write what is buffered, and record how the run ended."""


Maker = Callable[[Path, str], Tracker]


def make_of(names: Sequence[str]) -> dict[str, Maker]:
    """Return a factory for each tracker: ``wandb``, ``mlflow``, or ``my_tracker.py:Name``.

    Raises:
        RunError: there is no such tracker, or its package is missing.
    """
    return {name: _maker(name) for name in names}


def _maker(name: str) -> Maker:
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise RunError(f"--track {name}: there is no file {Path(file).resolve()}")
        try:
            maker: Maker = load_function(f"{Path(file).resolve()}:{function}")
        except AttributeError:
            raise RunError(f"--track {name}: {file} has no `{function}`") from None
        return maker
    if name not in TRACKERS:
        law = f"--track {name}: there are {', '.join(TRACKERS)}, and my_tracker.py:Name"
        advice = nearest(name, TRACKERS)
        raise RunError(f"{law}\n  {advice}" if advice else law)
    if importlib.util.find_spec(name) is None:
        raise RunError(f"--track {name}: that is not installed\n  pip install {name}")
    return TRACKERS[name]


class Trackers:
    """All trackers of a run.

    They are opened with the first metrics, and again after a restart. Files of a service on this machine are
    in the run directory, and its project or experiment has the graph's name. A tracker that fails, or takes
    longer than ``LIMIT`` for a call, is left out until the run is started again: all that it would get is in
    the run directory as well.
    """

    def __init__(
        self,
        folder: Path,
        graph: str,
        makers: Mapping[str, Maker] | None = None,
        lasting: Sequence[Tracker] = (),
        note: Callable[[str], None] = print,
    ) -> None:
        """Create it; no tracker is opened yet.

        Args:
            folder: the run directory.
            graph: the graph's name.
            makers: the factories of ``make_of``.
            lasting: trackers that are open already and stay open over restarts.
            note: prints a message for the user.
        """
        self.folder = folder
        self.graph = graph
        self.makers = makers or {}
        self.lasting = lasting
        self.note = note
        self.limit = _limit()
        self.opened: dict[str, Tracker] | None = None
        # one thread per tracker: SQLite, for one, may only be used in the thread that opened it
        self.threads: dict[str, DaemonThreads] = {}

    def open(self, step: int) -> dict[str, Tracker]:
        """Return all trackers; charts of a resumed run are cut at ``step``, that of its next metrics."""
        if self.opened is None:
            self.opened = {}
            makers = {"tensorboard": lambda folder, _: TensorBoard(folder, step), **self.makers}
            for name, make in makers.items():
                tracker = self._call(name, "its opening", partial(make, self.folder, self.graph))
                if tracker is not None:
                    self.opened[name] = tracker
        return self.opened | {type(tracker).__name__: tracker for tracker in self.lasting}

    def log(self, values: Values, step: int) -> None:
        """Send numbers to all trackers."""
        for name, tracker in self.open(step).items():
            self._call(name, "log", partial(tracker.log, values, step))

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Send rows to all trackers."""
        for tracker_name, tracker in self.open(step).items():
            self._call(tracker_name, "samples", partial(tracker.samples, name, rows, step))

    def close(self, failed: bool) -> None:
        """Close all trackers but the lasting ones."""
        opened = dict(self.opened or {})  # a copy: a call that fails removes its tracker
        for name, tracker in opened.items():
            self._call(name, "close", partial(tracker.close, failed))
        for threads in self.threads.values():
            threads.shutdown()
        self.opened = None
        self.threads = {}

    def _call(self, name: str, call: str, function: Callable[[], Any]) -> Any:
        """Call a tracker and return the result; if it fails or is late, tell the user and leave it out."""
        threads = self.threads.setdefault(name, DaemonThreads(1))
        try:
            return threads.submit(guarded, function).result(self.limit)
        except TimeoutError:
            reason = f"{call} took over {self.limit:g} s ({VARIABLE}); is its service there?"
        except UserExitError as error:
            reason = str(error)
        except Exception as error:  # a service or the user's code may raise anything
            reason = f"{type(error).__name__}: {error}"
        if self.opened:
            self.opened.pop(name, None)
        self.threads.pop(name).shutdown()
        law = f"the tracker {name} failed: {reason}"
        consequence = "the run goes on without it until it is started again"
        self.note(f"{law}\n  {consequence}; metrics.jsonl and samples/ have the rest")
        return None


def _limit() -> float:
    """Return the seconds that one call of a tracker may take.

    Raises:
        RunError: the environment's value is not a positive number.
    """
    text = os.environ.get(VARIABLE, str(LIMIT))
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise RunError(f"{VARIABLE}={text} is not a number of seconds above 0\n  unset it for {LIMIT:g}")
    return limit


def columns_of(rows: Sequence[SampleRow]) -> dict[str, list[Any]]:
    """Return rows as columns, with None where a row lacks a value."""
    names: dict[str, None] = {}  # in the order in which rows have them
    for row in rows:
        names.update(dict.fromkeys(row))
    return {name: [row.get(name) for row in rows] for name in names}


def numbers_of(rows: Sequence[SampleRow]) -> dict[str, list[float]]:
    """Return the columns of numbers and truth values, without missing values."""
    result: dict[str, list[float]] = {}
    for name, column in columns_of(rows).items():
        values = [value for value in column if value is not None]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if numbers and len(numbers) == len(values):
            result[name] = numbers
    return result


class TensorBoard:
    """Event files in ``tensorboard``."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        # charts lose what an interrupted run wrote after its checkpoint
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step, max_queue=QUEUE)

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name, unless the writer's thread has ended, as it does on a full disk."""
        for name, value in values.items():
            if self._writes():
                self.board.add_scalar(name, value, step)

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Write a table of the rows, and a histogram of each column of numbers."""
        columns = columns_of(rows)
        lines = [columns, ["---"] * len(columns), *zip(*columns.values(), strict=True)]
        table = "\n".join(_table_row(line) for line in lines)
        if self._writes():
            self.board.add_text(f"samples/{name}", table, step)
            for column, values in numbers_of(rows).items():
                self.board.add_histogram(f"samples/{name}/{column}", values, step)

    def close(self, failed: bool) -> None:
        """Write what is left."""
        if self._writes():
            self.board.close()

    def _writes(self) -> bool:
        """Return whether the writing thread is alive; if it has ended, a put into its queue would block."""
        writer = self.board.file_writer.event_writer
        if not writer._worker.is_alive():
            writer._event_queue.cancel_join_thread()
            return False
        return True


class Wandb:
    """Weights & Biases, configured by its environment variables: WANDB_PROJECT, WANDB_MODE=offline, ...

    A sweep's agent names the run by WANDB_RUN_ID. The service ignores a step that it has already, so that
    iterations that a resumed run repeats keep their first numbers.
    """

    def __init__(self, folder: Path, graph: str) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", graph),
            name=folder.name,
            dir=str(folder),
            id=_id(folder, "wandb", lambda: os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12]),
            resume="allow",
            config={"graph": (folder / "graph.yaml").read_text(encoding="utf-8")},
        )

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name."""
        self.run.log(dict(values), step=step)

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Show a table of the rows, and a histogram of each column of numbers."""
        from wandb import Histogram, Table

        columns = columns_of(rows)
        data = [list(row) for row in zip(*columns.values(), strict=True)]
        table = Table(columns=[*columns], data=data, allow_mixed_types=True)  # JSON values may be of any type
        plots = {f"samples/{name}/{n}": Histogram(values) for n, values in numbers_of(rows).items()}
        self.run.log({f"samples/{name}": table, **plots}, step=step)

    def close(self, failed: bool) -> None:
        """Wait until everything is written."""
        self.run.finish(exit_code=int(failed))


class Mlflow:
    """MLflow at MLFLOW_TRACKING_URI, or in the file ``mlflow.db`` if that is not set."""

    def __init__(self, folder: Path, graph: str) -> None:
        from mlflow import MlflowClient

        server = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(server or f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        self.artifacts = None if server else (folder.resolve() / "mlflow").as_uri()
        self.run = _id(folder, "mlflow", lambda: self._created(graph, folder))
        self.client.update_run(self.run, status="RUNNING")

    def _created(self, graph: str, folder: Path) -> str:
        known = self.client.get_experiment_by_name(graph)
        experiment = known.experiment_id if known else self.client.create_experiment(graph, self.artifacts)
        return str(self.client.create_run(experiment, run_name=folder.name).info.run_id)

    def log(self, values: Values, step: int) -> None:
        """Record numbers; in their names MLflow allows letters, digits and ``_-. :/``."""
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        numbers: list[Metric] = []
        for name, value in values.items():
            allowed_name = re.sub(r"[^\w\-. :/]", "_", name)
            numbers.append(Metric(allowed_name, value, now_ms, step))
        self.client.log_batch(self.run, metrics=numbers)

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Write a table of the rows; MLflow draws no histograms."""
        self.client.log_table(self.run, columns_of(rows), f"samples/{name}-{step:06d}.json")

    def close(self, failed: bool) -> None:
        """Record how the run ended."""
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Maker] = {"wandb": Wandb, "mlflow": Mlflow}


def _table_row(values: Iterable[Any]) -> str:
    return f"| {' | '.join(_cell(value) for value in values)} |"


def _cell(value: Any) -> str:
    """Return a value as one line of text that has no markup for markdown or HTML."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    marked = re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", escape(text, quote=False))
    return re.sub(r"\r\n?|\n", "<br>", marked)


def _id(folder: Path, service: str, make: Callable[[], str]) -> str:
    """Return the id by which a service knows the run: created once, and stored in the run directory."""
    file = folder / IDS
    ids: dict[str, str] = read_json(file) if file.is_file() else {}
    if service not in ids:
        ids[service] = make()
        write(file, json.dumps(ids))
    return ids[service]
