"""Sends metrics to TensorBoard's files, Weights & Biases and MLflow, beside metrics.jsonl."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlgraph.errors import RunError
from rlgraph.files import read_json, write

Values = Mapping[str, float]
QUEUE = 2**14  # numbers that wait for TensorBoard's writer; more than come between two looks at it
IDS = "tracked.json"  # a file of a run directory: the id by which each service knows the run


class Tracker(Protocol):
    """Takes the metrics of one iteration after the other."""

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name, of the state after ``step`` iterations."""

    def close(self, failed: bool) -> None:
        """Write what is left, and say how the run ended."""


def installed(names: Sequence[str]) -> None:
    """Check that these services can be tracked to.

    Raises:
        RunError: a package is missing.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RunError(f"--track {name}: that is not installed\n  pip install {name}")


def open_trackers(names: Sequence[str], folder: Path, graph: str, step: int) -> list[Tracker]:
    """Open TensorBoard, and those of ``wandb`` and ``mlflow`` that are named, anew or to go on.

    What a service keeps on this machine lies in the run directory ``folder``; a project or experiment has the
    graph's name. Charts of a run that goes on are cut at ``step``, that of the first metrics to come.
    """
    return [TensorBoard(folder, step), *(TRACKERS[name](folder, graph) for name in names)]


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

    A service takes no step twice: what a resumed run repeats stays as it was.
    """

    def __init__(self, folder: Path, graph: str) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", graph),
            name=folder.name,
            dir=str(folder),
            id=_id(folder, "wandb", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
            config={"graph": (folder / "graph.yaml").read_text(encoding="utf-8")},
        )

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name."""
        self.run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Wait until all is written."""
        self.run.finish(exit_code=int(failed))


class Mlflow:
    """MLflow: at MLFLOW_TRACKING_URI, or, where that is not set, in the file ``mlflow.db``."""

    def __init__(self, folder: Path, graph: str) -> None:
        from mlflow import MlflowClient

        here = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here)
        self.run = _id(folder, "mlflow", lambda: self._created(graph, folder))
        self.client.update_run(self.run, status="RUNNING")

    def _created(self, graph: str, folder: Path) -> str:
        known = self.client.get_experiment_by_name(graph)
        experiment = known.experiment_id if known else self.client.create_experiment(graph)
        return str(self.client.create_run(experiment, run_name=folder.name).info.run_id)

    def log(self, values: Values, step: int) -> None:
        """Record numbers by name, of which MLflow allows letters, digits and ``_-. :/``."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        numbers = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step) for name, value in values.items()
        ]
        self.client.log_batch(self.run, metrics=numbers)

    def close(self, failed: bool) -> None:
        """Say how the run ended."""
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


def _id(folder: Path, service: str, make: Callable[[], str]) -> str:
    """Return the id by which a service knows the run: made once, and kept in the run directory."""
    file = folder / IDS
    ids: dict[str, str] = read_json(file) if file.is_file() else {}
    if service not in ids:
        ids[service] = make()
        write(file, json.dumps(ids))
    return ids[service]
