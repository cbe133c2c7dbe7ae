"""The loop over iterations: stretches of them, and what happens between two: evaluations and checkpoints.

One file: stretches, evaluations, checkpoints and the end all read and change the one state of a run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.errors import RunError, StoppedError
from rlgraph.files import read_json
from rlgraph.ir.best_checkpoints import BestCheckpoints, Ranked
from rlgraph.ir.early_stop import EarlyStop
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.record_file import FOLDER, file_of
from rlgraph.printing.alarm import alarm_text
from rlgraph.runtime import due
from rlgraph.runtime.cluster.devices import enough_memory, wait_for_memory
from rlgraph.runtime.cluster.failures import LostError
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.driver.control import ControlCalls, after
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.metrics import beside, metrics, performance, times
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, gathering
from rlgraph.runtime.driver.stages import stages
from rlgraph.runtime.due import Clocks, DueTimes
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.rundir import kept_columns
from rlgraph.runtime.rundir.progress import Progress
from rlgraph.runtime.rundir.rundir import STATE, RunDir
from rlgraph.runtime.rundir.skipped_steps import SkippedSteps
from rlgraph.runtime.rundir.watchdog import Watchdog
from rlgraph.runtime.segments import State, lead, stretch
from rlgraph.runtime.signals import StopSignals
from rlgraph.variables import referred, with_values


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written."""

    folder: Path
    state: State
    sums: dict[str, str]  # file -> its digest, of those that are written
    is_due: bool  # else it stays for a restart, or as one of the best
    only_best: bool  # it is dropped unless it is one of the best


@dataclass
class Line:
    """The metrics of an iteration, not yet written, and the evaluation that adds to them."""

    values: dict[str, Any]
    end: int  # iterations after which the run may end, where a metric is reached
    evaluation: tuple[Execution, float] | None = None  # with the seconds that beginning it took


class TrainingRun:
    """A run from its workers' start to the exported models."""

    def __init__(
        self,
        plan: Plan,
        cluster: WorkerCluster,
        folder: RunDir,
        progress: Progress,
        total: int,
        signals: StopSignals,
        rows: Mapping[str, int],
    ) -> None:
        """Create it; ``rows`` are those that sources have, whose epochs are counted."""
        self.plan, self.cluster, self.folder = plan, cluster, folder
        self.progress, self.total, self.signals = progress, total, signals
        self.driver = Driver(plan, cluster, progress.steps, folder.path / "logs")
        self.calls, self.noted = ControlCalls(plan, cluster), set[str]()
        # a checkpoint empties the pipeline: generation ahead would have other weights, and no overlap
        self.every_iteration = plan.schedule.restarts > 0 and not lead(plan)
        self.state = State(versions={name: 0 for name, model in plan.models.items() if model.train})
        self.saving: Saving | None = None
        self.line: Line | None = None  # of the last iteration, while an evaluation runs behind it
        self.standing = 0.0  # seconds that checkpoints have held the run up since the last line of metrics
        self.skipped, self.early = SkippedSteps(plan), EarlyStop(plan.schedule.stop)
        self.due_times, self.best = DueTimes(plan, rows), BestCheckpoints(plan.schedule.best)
        self.began = 0.0  # when the clock of the run was 0
        self.watchdog = Watchdog(plan)

    def run(self, resume: bool) -> None:
        """Train from the start, or the last checkpoint, to the last iteration; then export the models.

        Raises:
            RunError: something failed, Ctrl-C came, or an update took none of its optimizer steps.
            StoppedError: it was stopped otherwise, and has saved a checkpoint.
        """
        self._setup(resume)
        self.folder.check_room(sum(self.calls.all("checkpoint_bytes", engines=True)))
        if resume:
            self._restore()
        with self.signals.orderly():
            self._iterate()
            with self._saved_first(self.state.iteration):
                self._end_line()
            self._save_now()
            self.progress.best = self.best.text(self.best.among(self.folder.lasting()))
        if self.signals.reasons:
            law = f"stopped after iteration {self.state.iteration} ({self.signals.reasons[0]})"
            error = RunError if self.signals.reasons[0] == "SIGINT" else StoppedError
            raise error(f"{law}\n  continue with --resume --run-dir {self.folder.path}")
        self._export()
        self.skipped.check(self.progress.note)

    def evaluate(self, checkpoint: Path | None) -> None:
        """Evaluate once, with the weights of a checkpoint or with those of the models' files."""
        self._setup(again=False)
        if checkpoint:
            self._load(checkpoint, read_json(checkpoint / STATE))
        self.folder.metrics({"step": self.state.iteration, **self._evaluate()})

    def _load(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Take the weights, optimizers, positions in the data and states that a checkpoint has."""
        self.state = State(**{name: value for name, value in record.items() if name != "waiting"})
        self.calls.when = after(self.state.iteration)
        self.calls.all("load", str(folder), self.state.versions, engines=True)
        self.calls.restore_held(folder)

    def _iterate(self) -> None:
        self.began = due.seconds_now() - self.state.seconds
        before = self.plan.eval_steps and self.plan.eval_before
        if self.state.iteration == 0 and before and not self.folder.earlier():
            values = {"step": 0, **self._evaluate()}
            self.folder.metrics(values)
            self._watch(values, 0)
        while self.state.iteration < self.total and not self.signals.reasons:
            self._stretch()

    def _save_now(self) -> None:
        """Have a checkpoint of the last iteration on disk."""
        self._finish_save()
        if self.folder.saved() < self.state.iteration:
            self._begin_save()
            self._finish_save()

    @contextmanager
    def _saved_first(self, end: int) -> Iterator[None]:
        """Save what is trained before an error of what comes behind an iteration ends the run.

        That is an evaluation, a line of metrics, the timeline, a file of samples, or what is printed: none
        changes weights. Where steps of an iteration before ``end`` may have begun, engines are not as
        ``state`` says, and nothing is saved.
        """
        try:
            yield
        except LostError:  # without a worker there is nothing to save
            raise
        # rich exits where who reads its output has gone; a user's function may exit, too
        except (Exception, SystemExit):
            if self._is_boundary(end) and self.state.iteration > self.folder.saved():
                self._rescue()
            raise

    def _rescue(self) -> None:
        """Save the last iteration, and the models where it was the last of all, while another error waits."""
        with suppress(SystemExit):  # nobody reads what is said
            try:
                self._save_now()
                if self.state.iteration >= self.total:
                    self._export()
            except Exception as error:
                self.progress.note(f"iteration {self.state.iteration} could not be saved: {error}")
            else:
                self.progress.note(
                    f"iteration {self.state.iteration} was saved before this error ended the run"
                )

    def _stretch(self) -> None:
        """Run the iterations up to the next evaluation or checkpoint; then that, with nothing in flight."""
        profiled = self.state.iteration + 1 in self.folder.profile
        if profiled:
            self.calls.all("begin_profile", place=True)
        since, end = time.time(), self._boundary()
        before = self._clocks()
        for execution in stretch(self.plan, self.driver, self.state, end, self._stops, self._kept):
            is_recorded = self._is_recorded(self.state.iteration - 1, self.state.due)
            self.state.seconds = due.seconds_now() - self.began
            now = self._clocks()
            self.state.due, before = sorted(self.due_times.after(before, now)), now
            with self._saved_first(end):
                if is_recorded:
                    self._record(execution)
                values, since = self._measured(execution, since), time.time()
                values |= {"time/save": self.standing} if self.standing else {}
                self.standing = 0.0
                if self.state.iteration == 1 and (law := self.early.missing(values)):
                    self.progress.note(law)
                self._end_line()
                self._watch(values, end)
                self._behind(execution, values, end)
            self._finish_save()  # it was written while the iteration ran
            if self.every_iteration or self._is_due(due.SAVE):
                self._begin_save()
            elif self._may_be_best():
                self._begin_save(only_best=True)
            if self.every_iteration:
                self._finish_save()  # a restart loses no more than the iteration that it happens in
        if profiled:
            self._end_line()
            self.calls.all("end_profile", self.folder.trace(self.state.iteration), place=True)

    def _behind(self, execution: Execution, values: dict[str, Any], end: int) -> None:
        """Do what comes behind an iteration: samples, the evaluation that is due, the line of metrics."""
        if sampled := self._is_due(due.SAVE):
            self._samples(execution)
        self.line = Line(values, end)
        if self.plan.eval_steps and self._is_due(due.EVALUATE):
            self.line.evaluation = self._begin_evaluation()
        if not self.plan.schedule.stream or self.every_iteration or self.state.iteration >= self.total:
            self._end_line()  # else training goes on meanwhile
        if not sampled and self._is_due(due.SAVE):
            self._samples(execution)  # the evaluation ends the run

    def _end_line(self) -> None:
        """Write the line of the last iteration, once the evaluation behind it is done."""
        if self.line is None:
            return
        line, self.line = self.line, None
        if line.evaluation:
            measured = self._end_evaluation(*line.evaluation)
            self._watch({"step": line.values["step"], **measured}, line.end)
            line.values |= measured
        self.folder.metrics(line.values)
        self._rank(line.values)
        self.skipped.add(line.values)
        self.progress.iteration(line.values)
        for alarm in self.watchdog.add(line.values):
            self.folder.alarm(alarm)
            self.progress.note(alarm_text(alarm))

    def _stops(self) -> bool:
        return bool(self.signals.reasons or self.early.reached)

    def _watch(self, values: Mapping[str, Any], end: int) -> None:
        """End the run with what has begun, after iteration ``end`` at most, where its metric is reached."""
        if not self.early.reached:
            self.early.add(values)
            if self.early.reached:
                now = self.state.iteration  # behind ``end`` where an evaluation overlapped training
                self.total = max(now, min(end, now + lead(self.plan)))
                self.progress.ends(self.early.reached)

    def _rank(self, values: Mapping[str, Any]) -> None:
        """Take what an evaluation has measured, if any; say so where its checkpoint is the best so far."""
        self.best.add(values)
        ranking = self._best_with(step := values["step"])
        if ranking and ranking[0].iteration == step:
            self.progress.note(self.best.text(ranking))

    def _best_with(self, iteration: int) -> list[Ranked]:
        """Return the best of the checkpoints that there are, with one that is being written and one more."""
        if self.best.best is None:
            return []
        writing = [self.saving.state.iteration] if self.saving else []
        return self.best.among({*self.folder.lasting(), *writing, iteration})

    def _is_best(self, iteration: int) -> bool:
        """Return whether an iteration is among the best, by what evaluations have measured so far."""
        return iteration in {ranked.iteration for ranked in self._best_with(iteration)}

    def _may_be_best(self) -> bool:
        """Return whether the last iteration is among the best, or its evaluation under way may say so."""
        goes_on = self.line is not None and self.line.evaluation is not None
        return (goes_on and self.best.best is not None) or self._is_best(self.state.iteration)

    def _is_boundary(self, end: int) -> bool:
        """Return whether no later iteration begins before what comes behind this one is done."""
        return self.state.iteration >= min(end, self.total)

    def _boundary(self) -> int:
        """Return the next iteration after which something else comes."""
        now = self._clocks()
        alone = {*self.folder.profile, *(i - 1 for i in self.folder.profile)}  # nothing else in the trace
        for iteration in range(self.state.iteration + 1, self.total):
            comes = any(self.due_times.may_come(name, iteration, now) for name in (due.SAVE, due.EVALUATE))
            if comes or self.every_iteration or iteration in alone:
                return iteration
        return self.total

    def _clocks(self) -> Clocks:
        return Clocks(self.state.iteration, self.state.seconds, self.state.positions)

    def _is_due(self, name: str) -> bool:
        """Return whether what happens every so often, and at the end, happens after the last iteration."""
        return self.state.iteration == self.total or name in self.state.due

    def _kept(self, iteration: int) -> frozenset[str]:
        """Return the columns that an iteration, counted from 0, keeps for its samples file and its record."""
        kept, ends = frozenset[str](), iteration + 1 == self.total
        sampled = ends or self.due_times.may_come(due.SAVE, iteration + 1, self._clocks())
        if self.plan.schedule.stop or sampled:
            kept |= {*kept_columns.sample_columns(self.plan, "train")}
        if iteration > self.state.iteration:  # ahead of what decides
            recorded = self.due_times.may_come(due.RECORD, iteration, self._clocks())
        else:
            recorded = self._is_recorded(iteration, self.state.due)
        return kept | kept_columns.recorded_columns(self.plan) if recorded else kept

    def _is_recorded(self, iteration: int, due_before: Sequence[str]) -> bool:
        """Return whether an iteration, counted from 0, is recorded: the first, or one behind an interval."""
        return due.RECORD in due_before if iteration else bool(self.plan.schedule.record_every)

    def _setup(self, again: bool) -> None:
        meeting, values = self.calls.meeting(), referred(self.plan)
        self.calls.all("join", str(self.folder.path.resolve()), values)
        self.progress.say("loading models")
        places, hosts = self.cluster.places, self.calls.all("environment")
        on = [{"pool": pool, "device": n, **host} for (pool, n), host in zip(places, hosts, strict=True)]
        self.folder.environment(on)
        enough_memory(self.plan, on)
        if again:  # what was lost may be ending still
            wait_for_memory(self.plan, places, partial(self.calls.all, "free_memory"))
        self._note(self.calls.all("setup", with_values(self.plan, values), meeting, place=True))

    def _note(self, reports: Iterable[Report]) -> None:
        """Tell the user once what workers noticed."""
        for note in dict.fromkeys(note for report in reports for note in report.notes):
            if note not in self.noted:
                self.noted.add(note)
                self.progress.note(note)

    def _measured(self, execution: Execution, since: float) -> dict[str, Any]:
        """Return the metrics line of an iteration; its timeline is written on the way."""
        ran = execution.ran
        self._note(report for item in ran for report in item.reports.values())
        self.folder.timeline(ran, self.state.iteration, self._is_due(due.SAVE))
        timed = {"time/step": time.time() - since, **times(self.plan, ran)}
        values: dict[str, Any] = {
            "step": self.state.iteration,
            **metrics(ran),
            **execution.measured(),
            **stages(execution),
            **timed,
        }
        return {**values, **performance(self.plan, ran, values)}

    def _evaluate(self) -> dict[str, float]:
        return self._end_evaluation(*self._begin_evaluation())

    def _begin_evaluation(self) -> tuple[Execution, float]:
        """Hand over an evaluation of the weights as they are now; return it and the seconds that took."""
        start = time.time()
        state, columns = self.state, frozenset(kept_columns.sample_columns(self.plan, "eval"))
        entry = Entry(state.iteration, state.versions)
        execution = Execution(
            self.plan,
            "eval",
            entry,
            state.positions,
            keep=columns,
            controls=state.controls,
            states=state.states,
        )
        self.driver.settle()
        self.driver.submit((execution, step) for step in self.plan.eval_steps)
        return execution, time.time() - start

    def _end_evaluation(self, execution: Execution, took: float) -> dict[str, float]:
        """Wait for an evaluation; return its metrics, and the seconds that the run stood still for it."""
        start, iteration = time.time(), execution.entry.iteration
        self.calls.when = f"in the evaluation {after(iteration)}"
        self.driver.finish(execution)
        self.folder.timeline(execution.ran, iteration, spans=True)
        values = {}
        for metric, column in self.plan.report.items():
            parts = [ref.location for ref in execution.refs[column] if ref]
            total, count = self.calls.one((execution.pools[column], 0), "mean", *parts)
            values[f"eval/{metric}"] = total / count if count else float("nan")
        values |= beside(self.plan, execution.ran)
        self._samples(execution)
        self.progress.evaluation(iteration, values)
        return {**values, "time/eval": took + time.time() - start}

    def _samples(self, execution: Execution) -> None:
        iteration = execution.entry.iteration + (execution.phase == "train")
        self.calls.when = after(iteration)
        if excerpts := kept_columns.excerpts(execution):
            path = self.folder.samples(iteration, execution.phase)
            columns, sources = zip(*excerpts, strict=True)
            # each device cuts out its rows, so that no more travels
            parts = [
                self.cluster.call(place, "select", rows, part, returns=2)[1]
                for place, part, rows in chain(*sources)
            ]
            rows = self.calls.one((sources[0][0].place[0], 0), "write_samples", path, columns, *parts)
            if rows:
                self.folder.trackers.samples(execution.phase, rows, iteration)
                self.progress.samples(execution.phase, rows)

    def _record(self, execution: Execution) -> None:
        """Write the columns of an iteration; they count once all of them are on disk."""
        self.calls.when = after(self.state.iteration)
        folder = self.folder.begin(FOLDER)
        for about in kept_columns.records(execution):
            every, columns = np.arange(execution.rows.count(about.domain)), [*about.types]
            how, refs = gathering([execution.selection(column).take(every) for column in columns])
            parts, place = [ref.location for ref in refs], (execution.pools[columns[0]], 0)
            self.calls.one(place, "write_recorded", str(folder / file_of(about.domain)), about, *how, *parts)
        self.folder.commit_recorded(folder, self.state.iteration)

    def _begin_save(self, only_best: bool = False) -> None:
        """Copy a checkpoint to host memory; it is written while the next iteration runs.

        With ``only_best`` it stays if it is one of the best, by what its evaluation measures until then.
        """
        start = time.time()
        self.progress.say("saving a checkpoint")
        self.calls.when = after(self.state.iteration)
        folder = self.folder.begin("checkpoints")
        self.calls.all("begin_save", str(folder), engines=True)
        first, sums = self.cluster.places[0], {}
        for name, waiting in self.state.waiting.items():
            for kind, buffered in waiting.parts().items():
                how, rows = buffered.gathering([*buffered.columns])
                parts, file = [ref.location for ref in rows], f"{name}-{kind}.npz"
                sums[file] = self.calls.one(first, "write_rows", str(folder / file), *how, *parts)
        for place, node in self.calls.holders():
            file = f"{node}-held.npz"
            sums[file] = self.calls.one(place, "write_held", node, str(folder / file))
        self.saving = Saving(folder, replace(self.state), sums, self._is_due(due.SAVE), only_best)
        self.standing += time.time() - start

    def _finish_save(self) -> None:
        """Commit a checkpoint, which counts once all of it is on disk; or drop one that is not best."""
        if self.saving:
            saving, self.saving, start = self.saving, None, time.time()
            self.calls.when = after(saving.state.iteration)
            sums = saving.sums
            for digests in self.calls.all("finish_save", engines=True):
                sums |= digests
            lasting = saving.is_due or self._is_best(saving.state.iteration)
            if saving.only_best and not lasting:
                shutil.rmtree(saving.folder)
            else:
                keep = self.plan.schedule.keep
                self.folder.commit_checkpoint(saving.folder, saving.state, sums, keep, lasting, self.best)
            self.standing += time.time() - start

    def _restore(self) -> None:
        folder = self._last_whole()
        measured = BestCheckpoints(self.plan.schedule.best, self.folder.earlier())
        record = self.folder.restore(folder, self.plan.schedule.keep, measured)
        if folder:
            self._load(folder, record)
            for name, kinds in record.get("waiting", {}).items():
                buffers = {kind: self._buffered(f"{folder}/{name}-{kind}.npz", kinds[kind]) for kind in kinds}
                self.state.waiting[name] = Waiting(**buffers)
            for values in self.folder.earlier():
                self.best.add(values)
                self.skipped.add(values)
                self.watchdog.add(values)  # which has spoken of them
                self._watch(values, self.state.iteration)
            self.progress.resumed(self.state.iteration)

    def _last_whole(self) -> Path | None:
        """Return the last checkpoint whose files are what was written; None where there is none at all.

        Raises:
            RunError: all of them are damaged.
        """
        problems: list[str] = []
        for folder in map(Path.resolve, reversed(self.folder.checkpoints())):
            if not (problem := self.calls.damage(folder)):
                for problem in problems:
                    self.progress.note(f"{problem}; the run goes on from {folder.name}, which is before it")
                return folder
            problems.append(f"the checkpoint {folder.name} is damaged: {problem}")
        if problems:
            remedy = "bring one back from a copy, or start anew in another --run-dir"
            raise RunError("\n".join(problems) + f"\n  {remedy}")
        return None

    def _buffered(self, path: str, record: Mapping[str, Any]) -> BufferedRows:
        """Return rows that wait, as a checkpoint has them."""
        first, count = self.cluster.places[0], len(record["columns"])
        return BufferedRows.recorded(record, self.calls.columns(first, "read_rows", path, count=count))

    def _export(self) -> None:
        self.progress.say("writing the models")
        self.calls.when = after(self.state.iteration)
        folder = self.folder.begin()
        self.calls.all("export", str(folder), engines=True)
        self.folder.commit_models(folder)
