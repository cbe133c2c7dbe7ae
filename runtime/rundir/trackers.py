"""Sends metrics and samples to TensorBoard's files, Weights & Biases, MLflow and trackers of your own."""

import importlib.util
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
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
QUEUE = 2**14  # numbers that wait for TensorBoard's writer; more than come between two looks at it
LIMIT, VARIABLE = 300.0, "RLGRAPH_TRACKER_SECONDS"  # seconds that one call of a tracker may take
IDS = "tracked.json"  # a file of a run directory: the id by which each service knows the run


class Tracker(Protocol):
    """Takes what a run measures and writes, one iteration after the other.

    One of your own, ``--track my_tracker.py:Name``, is a class or a function that is called with the run
    directory and the graph's name.
    """

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name, of the state after ``step`` iterations."""

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Show the first rows that were written in an iteration, ``train``, or in an evaluation, ``eval``."""

    def close(self, failed: bool) -> None:
        """Write what is left, and say how the run ended."""


Maker = Callable[[Path, str], Tracker]


def make_of(names: Sequence[str]) -> dict[str, Maker]:
    """Return what makes the trackers of these names: ``wandb``, ``mlflow``, or ``my_tracker.py:Name``.

    Raises:
        RunError: there is none, or a package is missing.
    """
    return {name: _maker(name) for name in names}


def _maker(name: str) -> Maker:
    file, _, own = name.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise RunError(f"--track {name}: there is no file {Path(file).resolve()}")
        try:
            maker: Maker = load_function(f"{Path(file).resolve()}:{own}")
        except AttributeError:
            raise RunError(f"--track {name}: {file} has no `{own}`") from None
        return maker
    if name not in TRACKERS:
        law = f"--track {name}: there are {', '.join(TRACKERS)}, and my_tracker.py:Name"
        raise RunError("\n  ".join(filter(None, [law, nearest(name, TRACKERS)])))
    if importlib.util.find_spec(name) is None:
        raise RunError(f"--track {name}: that is not installed\n  pip install {name}")
    return TRACKERS[name]


class Trackers:
    """All trackers of a run, opened with its first metrics and again after a restart.

    What a service keeps on this machine lies in the run directory ``folder``; a project or experiment has the
    graph's name. The run goes on without one that fails, or takes longer than ``LIMIT`` for a call, until it
    is started again: all that it measures is in its directory anyway.
    """

    def __init__(
        self,
        folder: Path,
        graph: str,
        makers: Mapping[str, Maker] | None = None,
        lasting: Sequence[Tracker] = (),
        note: Callable[[str], None] = print,
    ) -> None:
        """``makers`` are those of ``make_of``; ``lasting`` trackers are there, and stay over restarts.

        ``note`` tells the user something.
        """
        self.folder, self.graph, self.makers, self.lasting = folder, graph, makers or {}, lasting
        self.note, self.limit = note, _limit()
        self.opened: dict[str, Tracker] | None = None
        # each tracker's own: what holds on to its thread, as SQLite, finds itself in the same one each time
        self.threads: dict[str, DaemonThreads] = {}

    def open(self, step: int) -> dict[str, Tracker]:
        """Return all; charts of a run that goes on are cut at ``step``, that of the first metrics to come."""
        if self.opened is None:
            self.opened = {}
            makers = {"tensorboard": lambda folder, _: TensorBoard(folder, step), **self.makers}
            for name, make in makers.items():
                opened = self._going_on(name, "its opening", partial(make, self.folder, self.graph))
                if opened is not None:
                    self.opened[name] = opened
        return self.opened | {type(tracker).__name__: tracker for tracker in self.lasting}

    def log(self, values: Values, step: int) -> None:
        """Give numbers to all."""
        for name, tracker in self.open(step).items():
            self._going_on(name, "log", partial(tracker.log, values, step))

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Give rows to all."""
        for of, tracker in self.open(step).items():
            self._going_on(of, "samples", partial(tracker.samples, name, rows, step))

    def close(self, failed: bool) -> None:
        """Close those that do not last."""
        for name, tracker in {**(self.opened or {})}.items():
            self._going_on(name, "close", partial(tracker.close, failed))
        for threads in self.threads.values():
            threads.shutdown()
        self.opened, self.threads = None, {}

    def _going_on(self, name: str, call: str, function: Callable[[], Any]) -> Any:
        """Return what a call of a tracker gives; go on without one that fails or is late, and say so."""
        threads = self.threads.setdefault(name, DaemonThreads(1))
        try:
            return threads.submit(guarded, function).result(self.limit)
        except TimeoutError:
            reason = f"{call} took over {self.limit:g} s ({VARIABLE}); is its service there?"
        except UserExitError as error:
            reason = str(error)
        except Exception as error:  # of a service, or of the user's own code
            reason = f"{type(error).__name__}: {error}"
        (self.opened or {}).pop(name, None)
        self.threads.pop(name).shutdown()
        law = f"the tracker {name} failed: {reason}"
        rest = "metrics.jsonl and samples/ have the rest"
        self.note(f"{law}\n  the run goes on without it until it is started again; {rest}")
        return None


def _limit() -> float:
    """Return the seconds that one call of a tracker may take.

    Raises:
        RunError: the environment has something else for them.
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
    """Return rows as columns."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}


def numbers_of(rows: Sequence[SampleRow]) -> dict[str, list[float]]:
    """Return the columns of numbers and truth values, without what is missing."""
    columns = {n: [v for v in values if v is not None] for n, values in columns_of(rows).items()}
    known = {n: c for n, c in columns.items() if c and all(isinstance(v, int | float) for v in c)}
    return {name: [*map(float, values)] for name, values in known.items()}


class TensorBoard:
    """Event files in ``tensorboard``."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        # what an interrupted run wrote behind its checkpoint is purged from the charts too
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step, max_queue=QUEUE)

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name; do nothing once the writer's thread has ended, as on a full disk."""
        for name, value in values.items():
            if self._writes():
                self.board.add_scalar(name, value, step)

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Write a table of the rows, and a histogram of each column of numbers."""
        columns = columns_of(rows)
        lines = [columns, ["---"] * len(columns), *zip(*columns.values(), strict=True)]
        cells = [[_cell(value) for value in line] for line in lines]
        if self._writes():
            table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
            self.board.add_text(f"samples/{name}", table, step)
            for column, values in numbers_of(rows).items():
                self.board.add_histogram(f"samples/{name}/{column}", values, step)

    def close(self, failed: bool) -> None:
        """Write what is left."""
        if self._writes():
            self.board.close()

    def _writes(self) -> bool:
        """Return whether the thread that writes is alive; without it, the queue to it fills up and blocks."""
        writer = self.board.file_writer.event_writer
        if not writer._worker.is_alive():
            writer._event_queue.cancel_join_thread()
            return False
        return True


class Wandb:
    """Weights & Biases: as its environment says, WANDB_PROJECT, WANDB_MODE=offline and the like.

    A sweep's agent names the run by WANDB_RUN_ID.

    A service takes no step twice: what a resumed run repeats stays as it was.
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
        cells = [*map(list, zip(*columns.values(), strict=True))]
        table = Table(columns=[*columns], data=cells, allow_mixed_types=True)  # what comes of JSON may be any
        plots = {f"samples/{name}/{n}": Histogram(values) for n, values in numbers_of(rows).items()}
        self.run.log({f"samples/{name}": table, **plots}, step=step)

    def close(self, failed: bool) -> None:
        """Wait until all is written."""
        self.run.finish(exit_code=int(failed))


class Mlflow:
    """MLflow: at MLFLOW_TRACKING_URI, or, where that is not set, in the file ``mlflow.db``."""

    def __init__(self, folder: Path, graph: str) -> None:
        from mlflow import MlflowClient

        here = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        there = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(there or here)
        self.artifacts = None if there else (folder.resolve() / "mlflow").as_uri()
        self.run = _id(folder, "mlflow", lambda: self._created(graph, folder))
        self.client.update_run(self.run, status="RUNNING")

    def _created(self, graph: str, folder: Path) -> str:
        known = self.client.get_experiment_by_name(graph)
        experiment = known.experiment_id if known else self.client.create_experiment(graph, self.artifacts)
        return str(self.client.create_run(experiment, run_name=folder.name).info.run_id)

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name, of which MLflow allows letters, digits and ``_-. :/``."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        allowed = ((re.sub(r"[^\w\-. :/]", "_", name), value) for name, value in values.items())
        numbers = [Metric(name, value, now, step) for name, value in allowed]
        self.client.log_batch(self.run, metrics=numbers)

    def samples(self, name: str, rows: Sequence[SampleRow], step: int) -> None:
        """Write a table of the rows; MLflow draws no histograms."""
        self.client.log_table(self.run, columns_of(rows), f"samples/{name}-{step:06d}.json")

    def close(self, failed: bool) -> None:
        """Say how the run ended."""
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Maker] = {"wandb": Wandb, "mlflow": Mlflow}


def _cell(value: Any) -> str:
    """Return a cell of a table in markdown: one line in which nothing but text has a meaning."""
    text = str(value if not isinstance(value, float) else f"{value:.4g}")
    marked = re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", escape(text, quote=False))
    return re.sub(r"\r\n?|\n", "<br>", marked)


def _id(folder: Path, service: str, make: Callable[[], str]) -> str:
    """Return the id by which a service knows the run: made once, and kept in the run directory."""
    file = folder / IDS
    ids: dict[str, str] = read_json(file) if file.is_file() else {}
    if service not in ids:
        ids[service] = make()
        write(file, json.dumps(ids))
    return ids[service]
