"""A run directory holds the composed graph, plan, metrics, timeline, samples, checkpoints and models.

runs/demo/
  graph.yaml  plan.txt  plan.json        what was run
  start.json                             how it was started, to go on with it or to run it again
  lock                                   held by the process whose run this is
  environment.json                       by which versions, on which devices
  metrics.jsonl                          one object per iteration, and one for step 0
  timeline.json                          Chrome trace events: open it at ui.perfetto.dev
  alarms.jsonl                           what the watchdog has said
  tensorboard/                           the same metrics: tensorboard --logdir runs
  wandb/  mlflow.db  mlflow/             the same, of services that `--track` names, while they are offline
  profile/step-000003/main-0.json.gz     what a worker computed, of iterations that `--profile` names
  samples/step-000100.jsonl              what the model wrote
  checkpoints/step-000100/               all that a resumed run needs; the last ones, and the best
  checkpoints/restart-000101/            the same, until the next: of a run with `schedule.restarts`
  models/policy/                         the trained model, as transformers loads it
  logs/worker-0.log                      what the workers printed
  logs/main-0.task                       which task of its call a worker is at, for when it is lost
  recorded/step-000001/                  columns, of a run with `schedule.record_every`
  failure.txt                            why it failed last: the whole traceback, and the step in the plan
  restarts.jsonl                         when and why the run began anew
  resumes.jsonl                          when it was resumed, after which iteration, and what was changed
  aside/step-000100/                     what came after a checkpoint to which `--resume-from` went back
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.files import DROPPED, discard, read_json, replace, sha256, sync, write, write_sums
from rlgraph.ir.actions import Collect
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.record_file import FOLDER, step_folder, steps_of
from rlgraph.printing.plan_diff import ABSENT
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.measured import METRICS, metrics_so_far
from rlgraph.runtime.driver.iteration import FinishedStep
from rlgraph.runtime.driver.metrics import as_json, finite
from rlgraph.runtime.rundir.changes import ChangedSetting
from rlgraph.runtime.rundir.environment import environment
from rlgraph.runtime.rundir.history import ALARMS, HISTORY, truncate
from rlgraph.runtime.rundir.lock import DESCRIBES, FOLDERS, Lock, check_free, check_links
from rlgraph.runtime.rundir.start import Start
from rlgraph.runtime.rundir.trackers import Trackers
from rlgraph.runtime.segments import State
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import show_text
from rlgraph.units import size_text

STATE = "state.json"  # the file of a checkpoint that says where the run was
DAMAGED = ".damaged"  # suffix of a file or folder whose content is not what was written
WRITING = "writing"  # the name of a folder that is incomplete
CHECKPOINT = re.compile(r"(step|restart)-(\d+)")


class RunDir:
    """Writes and reads the files of one run."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        """Open the directory of a run; only a process with its ``lock`` may write there."""
        self.path = path
        self.lock = lock
        self.trackers = Trackers(path, "")  # each line of metrics goes to them, too
        self.profile: frozenset[int] = frozenset()  # iterations, counted from 1, that workers trace

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock:
            self.lock.release()

    def close(self) -> None:
        """Close the trackers, and remove folders that are incomplete or half removed."""
        self.trackers.close(failed=sys.exc_info()[0] is not None)  # an error is on its way through here
        for inside in ("checkpoints", FOLDER, ""):
            folder = self.path / inside
            for incomplete in (folder / WRITING, *folder.glob(f"*{DROPPED}")):
                shutil.rmtree(incomplete, ignore_errors=True)

    @staticmethod
    def fresh(path: Path | None, graph: str) -> RunDir:
        """Return a new run directory: ``path``, or the first of runs/GRAPH, runs/GRAPH-2, ... that is free.

        Only this user may read it; an empty folder that exists already keeps its mode.

        Raises:
            RunError: ``path`` holds a run already, another process begins one there, or it can't be made.
        """
        if path is None:
            path = free_folder(Path("runs") / graph)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_free(path)  # before the lock, so that no lock file is left in a folder of something else
        lock = Lock(path)
        try:
            check_free(path)  # and again, as another process may have begun a run there meanwhile
            for name in FOLDERS:
                (path / name).mkdir(exist_ok=True)
        except BaseException:
            lock.release()
            raise
        return RunDir(path, lock)

    @staticmethod
    def existing(path: Path) -> RunDir:
        """Return the directory of an earlier run.

        Raises:
            RunError: it holds no run, another process runs it, or it holds a link, through which the run
                would write elsewhere.
        """
        if not (path / "plan.json").is_file():
            law = f"{path} holds no run to resume (no plan.json)"
            option = f"--run-dir {shlex.quote(str(path))}"
            raise RunError(f"{law}\n  leave out --resume to start one there: {option}")
        check_links(path)
        return RunDir(path, Lock(path))

    def describe(self, plan: Plan, graph: Tree, start: Start) -> None:
        """Write the graph and the plan that will run; the plan is last, as a folder with a plan is a run.

        The graph is kept as written, with its ``${...}``, so that it can be run again with other settings.
        """
        texts = (show_text(graph), start.text(graph), plan_text(plan), plan.json())
        for name, text in zip(DESCRIBES, texts, strict=True):
            write(self.path / name, text)

    def environment(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write the run's environment, with each worker's device; it holds those of earlier starts as well.

        An earlier file that can't be read is renamed: no run depends on it.
        """
        path = self.path / "environment.json"
        earlier: list[Any] = []
        if path.is_file():
            try:
                last = read_json(path)
                earlier = [*last.pop("before"), last]
            except RunError:
                path.rename(path.with_name(f"{path.name}{DAMAGED}"))
        record = environment(devices, earlier)
        write(path, json.dumps(record, indent=1) + "\n")

    def check_room(self, checkpoint: int) -> None:
        """Check that the disk has room for a checkpoint of so many bytes.

        Raises:
            RunError: it has not.
        """
        free = shutil.disk_usage(self.path).free
        if free < checkpoint:
            law = f"{self.path}: a checkpoint takes {size_text(checkpoint)}, and {size_text(free)} are free"
            raise RunError(f"{law}\n  make room, or name another --run-dir")

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        """Append an alarm of the watchdog."""
        self._append(ALARMS, alarm)

    def resumed(self, changes: Sequence[ChangedSetting]) -> None:
        """Append that the run is resumed, after which iteration, and which settings were changed."""
        changed: dict[str, list[Any]] = {}
        for change in changes:
            values = (change.saved, change.now)
            changed[change.name] = [None if value is ABSENT else value for value in values]
        self._append("resumes.jsonl", {"after": max(self.saved(), 0), "changed": changed})

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Append a line of metrics, and give its numbers to the trackers."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(as_json(values), allow_nan=False) + "\n")
        numbers = finite(values)
        numbers.pop("step", None)
        self.trackers.log(numbers, values["step"])

    def earlier(self) -> list[dict[str, Any]]:
        """Return the metrics of earlier iterations; there are some if the run is resumed."""
        return metrics_so_far(self.path)

    def timeline(self, finished: Sequence[FinishedStep], iteration: int, spans: bool) -> None:
        """Append the steps of an iteration as trace events: pools are processes, devices threads.

        A step that ran beside its device has a thread of its own, and so have groups of a stream and, with
        ``spans``, the spans that ops report.
        """
        path = self.path / "timeline.json"
        with path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write("[\n")  # the format allows the closing bracket to be missing
            for item in finished:
                for event in _trace_events(item, iteration, spans):
                    file.write(json.dumps(event) + ",\n")

    def samples(self, iteration: int, phase: str) -> str:
        """Return the absolute path of the file into which a worker writes samples of an iteration."""
        suffix = "-eval" if phase == "eval" else ""
        return str((self.path / "samples" / f"step-{iteration:06d}{suffix}.jsonl").resolve())

    def trace(self, iteration: int) -> str:
        """Return the absolute path of the folder for the workers' traces of an iteration."""
        return str((self.path / "profile" / f"step-{iteration:06d}").resolve())

    def checkpoints(self) -> list[Path]:
        """Return complete checkpoints, oldest first."""
        candidates = (self.path / "checkpoints").glob("*-*")
        complete = [path for path in candidates if CHECKPOINT.fullmatch(path.name)]
        return sorted(complete, key=lambda path: (iteration_of(path), path.name))

    def lasting(self) -> dict[int, Path]:
        """Return the complete checkpoints by iteration, oldest first, without those only for a restart."""
        return {iteration_of(path): path for path in self.checkpoints() if path.name.startswith("step-")}

    def saved(self) -> int:
        """Return the iteration of the last checkpoint, -1 without one."""
        complete = self.checkpoints()
        return iteration_of(complete[-1]) if complete else -1

    def begin(self, inside: str = "") -> Path:
        """Return an empty folder to write into; it is no part of the run until it is committed."""
        folder = (self.path / inside / WRITING).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit_checkpoint(
        self,
        folder: Path,
        state: State,
        sums: Mapping[str, str],
        keep: int,
        lasting: bool,
        best: BestCheckpoints,
    ) -> None:
        """Make a written checkpoint the last one, by one rename, once its files and the metrics are on disk.

        Args:
            folder: the folder of ``begin`` with the files that workers have written.
            state: the run's state.
            sums: the digests of the files.
            keep: how many lasting checkpoints stay, beside the best.
            lasting: whether it is such a one; otherwise it is for a restart, until the next checkpoint.
            best: the ranking of checkpoints.

        Raises:
            RunError: a file that a worker has written is not there.
        """
        kind = "step" if lasting else "restart"
        final = folder.parent / f"{kind}-{state.iteration:06d}"
        missing = [name for name in sums if not (folder / name).is_file()]
        if missing:
            law = f"{folder} has no {', '.join(missing)}, which a worker has written"
            raise RunError(f"{law}\n  a run directory has to be on a disk that all hosts share")
        write(folder / STATE, json.dumps(state.record()))
        write_sums(folder, {**sums, STATE: sha256(folder / STATE)})
        for name in HISTORY:
            if (self.path / name).is_file():
                sync(self.path / name)
        replace(final, folder)
        self._drop_old(keep, best)

    def _drop_old(self, keep: int, best: BestCheckpoints) -> None:
        """Remove all checkpoints but the last one, and of the lasting ones the last ``keep`` and the best."""
        complete = self.checkpoints()
        lasting = self.lasting()
        needed = {*complete[-1:], *[*lasting.values()][-keep:]}
        needed |= {lasting[ranked.iteration] for ranked in best.among(lasting)}
        for checkpoint in complete:
            if checkpoint not in needed:
                discard(checkpoint)

    def commit_recorded(self, folder: Path, iteration: int) -> None:
        """Commit written columns as those of an iteration."""
        replace(step_folder(self.path, iteration), folder)

    def commit_models(self, folder: Path) -> None:
        """Commit the exported models."""
        replace(self.path / "models", folder)

    def restarted(self, number: int, of: int, reason: str) -> None:
        """Append that the run is restarted, and why."""
        line = {"restart": number, "of": of, "after": max(self.saved(), 0), "reason": reason}
        self._append("restarts.jsonl", line)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line, with the time, to one of the run's logs of events."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **line}) + "\n")

    def restore(self, checkpoint: Path | None, keep: int, best: BestCheckpoints) -> dict[str, Any]:
        """Return the state in a checkpoint ({} without one), and drop what was written after it.

        Checkpoints that are later than this one are damaged, and are renamed. Of the others ``keep`` and the
        ``best`` stay, as after each checkpoint.
        """
        record: dict[str, Any] = {}
        if checkpoint:
            record = read_json(checkpoint / STATE)
            checkpoints = self.checkpoints()
            position = [path.name for path in checkpoints].index(checkpoint.name)
            for later in checkpoints[position + 1 :]:
                renamed = later.with_name(f"{later.name}{DAMAGED}")
                shutil.rmtree(renamed, ignore_errors=True)
                later.rename(renamed)
        self._drop_old(keep, best)
        iteration = record.get("iteration", -1)
        truncate(self.path, iteration)
        for path in self.written_after(iteration):
            if path.is_dir():
                discard(path)
            else:
                path.unlink()
        return record

    def written_after(self, iteration: int) -> list[Path]:
        """Return the recorded columns and the samples of later iterations."""
        later: list[Path] = []
        for step, path in steps_of(self.path).items():
            if step > iteration:
                later.append(path)
        for path in (self.path / "samples").glob("step-*.jsonl"):
            step = int(path.name.removeprefix("step-")[:6])
            if step > iteration:
                later.append(path)
        return later


def _trace_events(item: FinishedStep, iteration: int, spans: bool) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a step: one per device that ran it, and one per span. Times are in us."""
    args = {"step": item.step.id, "iteration": iteration, "phase": item.step.phase}
    for (pool, device), report in item.reports.items():
        thread: str | int = device
        if report.off_device:
            thread = f"{device} beside"
        bars = [(thread, item.step.node, report.start, report.end, args)]
        if spans or isinstance(item.step.action, Collect):
            for lane, name, start, end in report.spans:
                bars.append((f"{thread} {lane}", name, start, end, {**args, "part": lane}))
        for bar_thread, name, start, end, bar_args in bars:
            yield {
                "name": name,
                "cat": item.step.kind,
                "ph": "X",
                "ts": round(start * 1e6),
                "dur": round((end - start) * 1e6),
                "pid": pool,
                "tid": bar_thread,
                "args": bar_args,
            }


def free_folder(path: Path) -> Path:
    """Return the first of PATH, PATH-2, PATH-3, ... that does not exist."""
    folder = path
    number = 1
    while folder.exists():
        number += 1
        folder = path.with_name(f"{path.name}-{number}")
    return folder


def iteration_of(checkpoint: Path) -> int:
    """Return the number of iterations after which a checkpoint was written."""
    return int(checkpoint.name.partition("-")[2])
