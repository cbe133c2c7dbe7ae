"""A run directory holds the composed graph, plan, metrics, timeline, samples, checkpoints and models.

runs/demo/
  graph.yaml  plan.txt  plan.json        what was run
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
  restarts.jsonl                         when and why the run began anew
  resumes.jsonl                          when it was resumed, after which iteration, and what was changed
  aside/step-000100/                     what came after a checkpoint to which `--resume-from` went back
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.files import DROPPED, discard, read_json, replace, sha256, sync, write, write_sums
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.record_file import FOLDER, step_folder, steps_of
from rlgraph.printing.plan_diff import ABSENT
from rlgraph.printing.plan_text import plan_text
from rlgraph.reports.measured import read_metrics
from rlgraph.runtime.driver.iteration import FinishedStep
from rlgraph.runtime.driver.metrics import as_json, finite
from rlgraph.runtime.rundir.changes import ChangedSetting
from rlgraph.runtime.rundir.environment import environment
from rlgraph.runtime.rundir.history import ALARMS, HISTORY, truncate
from rlgraph.runtime.rundir.lock import DESCRIBES, FOLDERS, Lock, check_free, check_links
from rlgraph.runtime.rundir.trackers import Trackers
from rlgraph.runtime.segments import State
from rlgraph.units import size_text

STATE = "state.json"  # a checkpoint's file: where the run was
DAMAGED = ".damaged"  # the end of a name: the file or folder is not what was written
WRITING = "writing"  # the name of a folder that is not complete
CHECKPOINT = re.compile(r"(step|restart)-(\d+)")


class RunDir:
    """Writes and reads the files of one run."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        """Open the directory of a run; who writes there holds its ``lock``."""
        self.path, self.lock = path, lock
        self.trackers = Trackers(path, "")  # they take the metrics too
        self.profile: frozenset[int] = frozenset()  # iterations, counted from 1, that workers trace

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock:
            self.lock.release()

    def close(self) -> None:
        """Close open files, and drop those left half-written."""
        self.trackers.close(failed=sys.exc_info()[0] is not None)  # closing on the way out of an error
        for inside in ("checkpoints", FOLDER, ""):
            for half in (self.path / inside / WRITING, *(self.path / inside).glob(f"*{DROPPED}")):
                shutil.rmtree(half, ignore_errors=True)

    @staticmethod
    def fresh(path: Path | None, graph: str) -> RunDir:
        """Return a new run directory: ``path``, or the first of runs/GRAPH, runs/GRAPH-2, ... that is free.

        It is for this user alone; the mode of an empty folder that is there already stays as it is.

        Raises:
            RunError: ``path`` holds a run already, another process begins one there, or it can't be made.
        """
        if path is None:
            path, count = Path("runs") / graph, 1
            while path.exists():
                count += 1
                path = Path("runs") / f"{graph}-{count}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_free(path)  # before a lock is left there
        lock = Lock(path)
        try:
            check_free(path)
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
            raise RunError(f"{law}\n  leave out --resume to start one there: --run-dir {path}")
        check_links(path)
        return RunDir(path, Lock(path))

    def describe(self, plan: Plan, graph: str) -> None:
        """Write the graph and the plan that will run; with the plan, which is last, there is a run."""
        for name, text in zip(DESCRIBES, (graph, plan_text(plan), plan.json()), strict=True):
            write(self.path / name, text)

    def environment(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write the run's environment, with each worker's device; those of earlier starts stay under it.

        A record of them that can't be read stays by another name: no run depends on it.
        """
        path = self.path / "environment.json"
        try:
            before = [read_json(path)] if path.is_file() else []
        except RunError:
            path.rename(path.with_name(f"{path.name}{DAMAGED}"))
            before = []
        record = environment(devices, [line for one in before for line in (*one.pop("before"), one)])
        write(path, json.dumps(record, indent=1) + "\n")

    def check_room(self, checkpoint: int) -> None:
        """Check that the disk takes a checkpoint of so many bytes beside what is there.

        Raises:
            RunError: it does not.
        """
        if (free := shutil.disk_usage(self.path).free) < checkpoint:
            law = f"{self.path}: a checkpoint takes {size_text(checkpoint)}, and {size_text(free)} are free"
            raise RunError(f"{law}\n  make room, or name another --run-dir")

    def alarm(self, alarm: Mapping[str, Any]) -> None:
        """Note what the watchdog says."""
        self._append(ALARMS, alarm)

    def resumed(self, changes: Sequence[ChangedSetting]) -> None:
        """Note that the run goes on, after which iteration, and what was changed."""
        changed = {change.name: [None if v is ABSENT else v for v in change[1:]] for change in changes}
        self._append("resumes.jsonl", {"after": max(self.saved(), 0), "changed": changed})

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line, and give the same to the trackers."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(as_json(values), allow_nan=False) + "\n")
        numbers = finite({name: value for name, value in values.items() if name != "step"})
        self.trackers.log(numbers, values["step"])

    def earlier(self) -> list[dict[str, Any]]:
        """Return the metrics of the iterations before, where the run goes on."""
        return read_metrics(self.path) if (self.path / "metrics.jsonl").is_file() else []

    def timeline(self, ran: Sequence[FinishedStep], iteration: int, spans: bool) -> None:
        """Append the steps of an iteration as trace events: pools are processes, devices threads.

        What ran beside a device has a thread of its own, and so have groups of a stream and, with ``spans``,
        parts that ops tell of.
        """
        path = self.path / "timeline.json"
        with path.open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write("[\n")  # the format allows the closing bracket to be missing
            for item in ran:
                args = {"step": item.step.id, "iteration": iteration, "phase": item.step.phase}
                for (pool, device), report in item.reports.items():
                    thread = f"{device} beside" if report.beside else device
                    told = report.spans if spans or item.step.facts.collects else ()
                    lines = [(thread, item.step.node, report.start, report.end, args)]
                    for lane, name, *times in told:
                        lines.append((f"{thread} {lane}", name, *times, args | {"part": lane}))
                    for tid, name, start, end, of in lines:
                        event = {"name": name, "cat": item.step.kind, "ph": "X", "ts": round(start * 1e6)}
                        event |= {"dur": round((end - start) * 1e6), "pid": pool, "tid": tid, "args": of}
                        file.write(json.dumps(event) + ",\n")

    def samples(self, iteration: int, phase: str) -> str:
        """Return the file for samples of an iteration, as an absolute path: a worker writes it."""
        suffix = "-eval" if phase == "eval" else ""
        return str((self.path / "samples" / f"step-{iteration:06d}{suffix}.jsonl").resolve())

    def trace(self, iteration: int) -> str:
        """Return the folder for the workers' traces of an iteration, as an absolute path."""
        return str((self.path / "profile" / f"step-{iteration:06d}").resolve())

    def checkpoints(self) -> list[Path]:
        """Return complete checkpoints, oldest first."""
        every = (self.path / "checkpoints").glob("*-*")
        complete = (path for path in every if CHECKPOINT.fullmatch(path.name))
        return sorted(complete, key=lambda path: (iteration_of(path), path.name))

    def lasting(self) -> dict[int, Path]:
        """Return iteration -> its complete checkpoint, oldest first, without what only a restart needs."""
        return {iteration_of(path): path for path in self.checkpoints() if path.name.startswith("step-")}

    def saved(self) -> int:
        """Return the iteration of the last checkpoint, -1 without one."""
        complete = self.checkpoints()
        return iteration_of(complete[-1]) if complete else -1

    def begin(self, inside: str = "") -> Path:
        """Return an empty folder to write into; its content counts only once it is committed."""
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
        """Make a written checkpoint the last one, in one rename; the metrics that led to it are on disk then.

        Of the lasting ones the last ``keep`` stay, and the ``best``. One that is not lasting is there for a
        restart, until the next one comes. ``sums`` are the digests of its files, which are on disk.
        """
        final = folder.parent / f"{'step' if lasting else 'restart'}-{state.iteration:06d}"
        if missing := [name for name in sums if not (folder / name).is_file()]:
            law = f"{folder} has no {', '.join(missing)}, which a worker has written"
            raise RunError(f"{law}\n  a run directory has to be on a disk that all hosts share")
        write(folder / STATE, json.dumps(state.record()))
        write_sums(folder, {**sums, STATE: sha256(folder / STATE)})
        for path in filter(Path.is_file, map(self.path.joinpath, HISTORY)):
            sync(path)
        replace(final, folder)
        self._drop_old(keep, best)

    def _drop_old(self, keep: int, best: BestCheckpoints) -> None:
        """Remove checkpoints but the last one, and the last ``keep`` and the best of the lasting ones."""
        complete, lasting = self.checkpoints(), self.lasting()
        stay = {*complete[-1:], *[*lasting.values()][-keep:]}
        stay |= {lasting[ranked.iteration] for ranked in best.among(lasting)}
        for old in {*complete} - stay:
            discard(old)

    def commit_recorded(self, folder: Path, iteration: int) -> None:
        """Commit written columns as those of an iteration."""
        replace(step_folder(self.path, iteration), folder)

    def commit_models(self, folder: Path) -> None:
        """Commit the exported models."""
        replace(self.path / "models", folder)

    def restarted(self, number: int, of: int, reason: str) -> None:
        """Note that the run begins anew, and why."""
        line = {"restart": number, "of": of, "after": max(self.saved(), 0), "reason": reason}
        self._append("restarts.jsonl", line)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to one of the files that say when something happened to the run."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **line}) + "\n")

    def restore(self, checkpoint: Path | None, keep: int, best: BestCheckpoints) -> dict[str, Any]:
        """Return the state that a checkpoint has, or none; what was written after it is dropped.

        Later checkpoints are damaged, and stay by another name. Of the others ``keep`` and the ``best`` stay,
        as ever.
        """
        record: dict[str, Any] = read_json(checkpoint / STATE) if checkpoint else {}
        every = {path.name: path for path in self.checkpoints()}
        for name in [*every][[*every].index(checkpoint.name) + 1 :] if checkpoint else ():
            aside = every[name].with_name(f"{name}{DAMAGED}")
            shutil.rmtree(aside, ignore_errors=True)
            every[name].rename(aside)
        self._drop_old(keep, best)
        truncate(self.path, iteration := record.get("iteration", -1))
        for later in self.written_after(iteration):
            discard(later) if later.is_dir() else later.unlink()
        return record

    def written_after(self, iteration: int) -> list[Path]:
        """Return the recorded columns and the samples of later iterations."""
        samples = [*(self.path / "samples").glob("step-*.jsonl")]
        steps = [(int(path.name[5:11]), path) for path in samples]
        return [path for step, path in (*steps_of(self.path).items(), *steps) if step > iteration]


def iteration_of(checkpoint: Path) -> int:
    """Return the number of iterations after which a checkpoint was written."""
    return int(checkpoint.name.partition("-")[2])
