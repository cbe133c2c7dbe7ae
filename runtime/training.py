"""The training loop: iterations, and between them metrics, samples, evaluations and checkpoints.

``TrainingRun._train_to_boundary`` is the loop; its numbered comments say what follows an iteration, in order.
All of it is one class, since each of these reads and changes the same state of a run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
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
from rlgraph.runtime.driver.control import ControlCalls, moment_after
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.metrics import evaluation_details, failed_rewards, metrics, performance, times
from rlgraph.runtime.driver.row_buffer import BufferedRows, Waiting, gathering
from rlgraph.runtime.driver.stages import stages
from rlgraph.runtime.due import Clocks, DueTimes
from rlgraph.runtime.messages.errors import resume_command
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
    digests: dict[str, str]  # file -> its digest, of those that are written
    is_due: bool  # else it stays for a restart, or as one of the best
    only_best: bool  # it is dropped unless it is one of the best


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that was handed to the driver."""

    execution: Execution
    submit_seconds: float  # for which the run stood still to hand it over


@dataclass
class Line:
    """The metrics of an iteration, not yet written, and the evaluation that adds to them."""

    values: dict[str, Any]
    end: int  # iterations after which the run may end, where a metric is reached
    failed: tuple[int, int] = (0, 0)  # samples without a reward, and samples
    evaluation: Evaluation | None = None


class TrainingRun:
    """A run from its workers' start to the exported models.

    Invariants:
        - ``state`` is that after the last complete iteration. Engines are in it too, unless steps of a later
          iteration have begun.
        - At most one checkpoint is being written (``saving``), and at most one line waits for its evaluation
          (``line``). Each is finished before the next one begins.
        - A checkpoint counts once it is committed, a line once it is in metrics.jsonl; lines are written in
          the order of iterations.
        - ``total`` only shrinks: an early stop ends the run sooner.
    """

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
        """Create a run that has not started.

        Args:
            plan: what to run.
            cluster: the workers, which have started.
            folder: the directory of the run.
            progress: tells the user how far the run is.
            total: iterations, those before a checkpoint from which it resumes among them.
            signals: say when the run is to stop.
            rows: the number of rows of each source whose epochs are counted.
        """
        self.plan = plan
        self.cluster = cluster
        self.folder = folder
        self.progress = progress
        self.total = total
        self.signals = signals
        self.driver = Driver(plan, cluster, progress.steps, folder.path / "logs")
        self.calls = ControlCalls(plan, cluster)
        self.shown_notes = set[str]()
        # a checkpoint empties the pipeline: generation ahead would have other weights, and no overlap
        self.saves_every_iteration = plan.schedule.restarts > 0 and not lead(plan)
        self.state = State(versions={name: 0 for name, model in plan.models.items() if model.train})
        self.saving: Saving | None = None
        self.line: Line | None = None
        self.save_seconds = 0.0  # for which checkpoints stopped the run since the last line of metrics
        self.skipped = SkippedSteps(plan)
        self.early = EarlyStop(plan.schedule.stop)
        self.due_times = DueTimes(plan, rows)
        self.best = BestCheckpoints(plan.schedule.best)
        self.time_zero = 0.0  # on the clock of ``due``, when ``state.seconds`` was 0
        self.watchdog = Watchdog(plan)

    def run(self, resume: bool) -> None:
        """Train from the start, or the last checkpoint, to the last iteration; then export the models.

        Raises:
            RunError: something failed, Ctrl-C came, or an update took none of its optimizer steps.
            StoppedError: it was stopped otherwise, and has saved a checkpoint.
        """
        self._setup(resume)
        checkpoint_bytes = self.calls.call_all("checkpoint_bytes", engines=True)
        self.folder.check_room(sum(checkpoint_bytes))
        if resume:
            self._restore()
        with self.signals.orderly():
            self._train()
            with self._saving_on_error(self.state.iteration):
                self._end_line()
            self._save_now()
            self.progress.best = self.best.text(self.best.among(self.folder.lasting()))
        if self.signals.reasons:
            reason = self.signals.reasons[0]
            error = RunError if reason == "SIGINT" else StoppedError
            law = f"stopped after iteration {self.state.iteration} ({reason})"
            raise error(f"{law}\n  continue with: {resume_command(self.folder.path)}")
        self._export()
        self.skipped.check(self.progress.note)

    def evaluate(self, checkpoint: Path | None) -> None:
        """Evaluate once, with the weights of a checkpoint or with those of the models' files."""
        self._setup(resume=False)
        if checkpoint:
            self._load(checkpoint, read_json(checkpoint / STATE))
        self.folder.metrics({"step": self.state.iteration, **self._evaluate()})

    def _train(self) -> None:
        """Run the iterations that are left, or those until the run is told to stop."""
        self.time_zero = due.seconds_now() - self.state.seconds
        is_evaluated_at_start = self.plan.eval_steps and self.plan.eval_before
        is_new = self.state.iteration == 0 and not self.folder.earlier()
        if is_evaluated_at_start and is_new:
            values = {"step": 0, **self._evaluate()}
            self.folder.metrics(values)
            self._check_early_stop(values, 0)
        while self.state.iteration < self.total and not self.signals.reasons:
            self._train_to_boundary()

    def _train_to_boundary(self) -> None:
        """Run the iterations up to the next one behind which the pipeline has to be empty (``_boundary``).

        What comes behind the iterations between runs while later ones are in flight; what comes behind the
        last has the devices alone.
        """
        end = self._boundary()
        is_profiled = self.state.iteration + 1 in self.folder.profile
        if is_profiled:
            self.calls.call_all("begin_profile", place=True)
        measured_until = time.time()
        clocks = self._clocks()
        for execution in stretch(
            self.plan, self.driver, self.state, end, self._should_stop, self._columns_to_keep
        ):
            # 1. Move the clocks on: they say what is due behind this iteration. Whether it is recorded was
            #    settled behind the one before, since its columns had to be kept.
            is_recorded = self._is_recorded(self.state.iteration - 1)
            self.state.seconds = due.seconds_now() - self.time_zero
            previous_clocks = clocks
            clocks = self._clocks()
            self.state.due = sorted(self.due_times.after(previous_clocks, clocks))

            # None of 2 to 8 changes weights: where one fails, this iteration is saved before the run ends.
            with self._saving_on_error(end):
                # 2. Record its columns, to train from and to replay.
                if is_recorded:
                    self._record(execution)

                # 3. Measure it.
                values = self._measure(execution, measured_until)
                measured_until = time.time()
                if self.save_seconds:
                    values["time/save"] = self.save_seconds
                    self.save_seconds = 0.0
                if self.state.iteration == 1:
                    self._note_missing_stop_metric(values)

                # 4. Write the line of the iteration before, where its evaluation ran beside this iteration.
                self._end_line()

                # 5. Stop early where a metric says so: ``total`` shrinks, and with it what is due at the end.
                self._check_early_stop(values, end)

                # 6. Write samples, wherever a checkpoint is due.
                has_samples = self._is_due(due.SAVE)
                if has_samples:
                    self._write_samples(execution)

                # 7. Begin the evaluation that is due, with the weights as they are now.
                self.line = Line(values, end, failed_rewards(execution.finished_steps))
                if self.plan.eval_steps and self._is_due(due.EVALUATE):
                    self.line.evaluation = self._begin_evaluation()

                # 8. Wait for it, and write the line; a stream trains on meanwhile. The evaluation
                #    may have stopped the run, and then this iteration is the last, which has samples.
                if not self._trains_beside_evaluation():
                    self._end_line()
                if not has_samples and self._is_due(due.SAVE):
                    self._write_samples(execution)

            # 9. Commit the checkpoint of the iteration before: it was written while this one ran.
            self._finish_save()

            # 10. Begin a checkpoint, to be written while the next iteration runs.
            if self.saves_every_iteration or self._is_due(due.SAVE):
                self._begin_save()
            elif self._may_be_best():
                self._begin_save(only_best=True)
            if self.saves_every_iteration:
                self._finish_save()  # a restart loses no more than the iteration that it happens in
        if is_profiled:
            self._end_line()
            self.calls.call_all("end_profile", self.folder.trace(self.state.iteration), place=True)

    def _trains_beside_evaluation(self) -> bool:
        """Return whether the next iteration begins before the evaluation of this one has ended."""
        is_last = self.state.iteration >= self.total
        return self.plan.schedule.stream is not None and not self.saves_every_iteration and not is_last

    def _end_line(self) -> None:
        """Write the line that waits, if any, once its evaluation is done."""
        if self.line is None:
            return
        line = self.line
        self.line = None
        if line.evaluation:
            measured = self._end_evaluation(line.evaluation)
            self._check_early_stop({"step": line.values["step"], **measured}, line.end)
            line.values |= measured
        self.folder.metrics(line.values)
        self._rank(line.values)
        self.skipped.add(line.values)
        self.progress.iteration(line.values, line.failed)
        for alarm in self.watchdog.add(line.values):
            self.folder.alarm(alarm)
            self.progress.note(alarm_text(alarm))

    # When the run ends, and what is due

    def _should_stop(self) -> bool:
        return bool(self.signals.reasons or self.early.reached)

    def _check_early_stop(self, values: Mapping[str, Any], end: int) -> None:
        """End the run where the metric of ``schedule.stop`` is reached, with the iterations in flight.

        These end at iteration ``end`` at most.
        """
        if self.early.reached:
            return
        self.early.add(values)
        if self.early.reached:
            iteration = self.state.iteration
            in_flight_until = min(end, iteration + lead(self.plan))
            # an evaluation that overlapped training may be of an earlier boundary than where the run is
            self.total = max(iteration, in_flight_until)
            self.progress.ends(self.early.reached)

    def _note_missing_stop_metric(self, values: Mapping[str, Any]) -> None:
        """Tell the user where the metric that ends the run is not among those of an iteration."""
        note = self.early.missing(values)
        if note:
            self.progress.note(note)

    def _boundary(self) -> int:
        """Return the next iteration behind which something may happen that needs an empty pipeline."""
        clocks = self._clocks()
        for iteration in range(self.state.iteration + 1, self.total):
            if self.saves_every_iteration:
                return iteration
            if any(self.due_times.may_come(name, iteration, clocks) for name in (due.SAVE, due.EVALUATE)):
                return iteration
            # an iteration that is profiled runs alone, so that nothing else is in its trace
            if iteration in self.folder.profile or iteration + 1 in self.folder.profile:
                return iteration
        return self.total

    def _is_boundary(self, end: int) -> bool:
        """Return whether no later iteration begins before what comes behind this one is done."""
        return self.state.iteration >= min(end, self.total)

    def _clocks(self) -> Clocks:
        return Clocks(self.state.iteration, self.state.seconds, self.state.positions)

    def _is_due(self, name: str) -> bool:
        """Return whether something periodic is due behind the last iteration; at the end of a run, all is."""
        return self.state.iteration == self.total or name in self.state.due

    def _columns_to_keep(self, iteration: int) -> frozenset[str]:
        """Return the columns that an iteration, counted from 0, keeps for its samples file and its record."""
        columns = frozenset[str]()
        is_last = iteration + 1 == self.total
        may_be_last = self.plan.schedule.stop is not None
        if is_last or may_be_last or self.due_times.may_come(due.SAVE, iteration + 1, self._clocks()):
            columns |= frozenset(kept_columns.sample_columns(self.plan, "train"))
        is_ahead = iteration > self.state.iteration  # of the iteration that decides
        if is_ahead:
            may_be_recorded = self.due_times.may_come(due.RECORD, iteration, self._clocks())
        else:
            may_be_recorded = self._is_recorded(iteration)
        if may_be_recorded:
            columns |= kept_columns.recorded_columns(self.plan)
        return columns

    def _is_recorded(self, iteration: int) -> bool:
        """Return whether an iteration, counted from 0, is recorded: the first, or one behind an interval.

        ``state.due`` still has to be what was due before it.
        """
        if iteration == 0:
            return bool(self.plan.schedule.record_every)
        return due.RECORD in self.state.due

    # Workers

    def _setup(self, resume: bool) -> None:
        """Let the workers meet, and load the models."""
        rendezvous = self.calls.rendezvous()
        variables = referred(self.plan)
        self.calls.call_all("join", str(self.folder.path.resolve()), variables)
        self.progress.say("loading models")
        hosts = self.calls.call_all("environment")
        devices = [
            {"pool": pool, "device": device, **host}
            for (pool, device), host in zip(self.cluster.places, hosts, strict=True)
        ]
        self.folder.environment(devices)
        enough_memory(self.plan, devices)
        if resume:  # workers that were lost may still be ending
            wait_for_memory(self.plan, self.cluster.places, partial(self.calls.call_all, "free_memory"))
        reports = self.calls.call_all("setup", with_values(self.plan, variables), rendezvous, place=True)
        self._note(reports)

    def _note(self, reports: Iterable[Report]) -> None:
        """Tell the user once what workers noticed."""
        for report in reports:
            for note in report.notes:
                if note not in self.shown_notes:
                    self.shown_notes.add(note)
                    self.progress.note(note)

    # Metrics and evaluations

    def _measure(self, execution: Execution, since: float) -> dict[str, Any]:
        """Return the metrics line of an iteration; its timeline is written on the way."""
        finished = execution.finished_steps
        for item in finished:
            self._note(item.reports.values())
        self.folder.timeline(finished, self.state.iteration, self._is_due(due.SAVE))
        step_seconds = time.time() - since
        values: dict[str, Any] = {"step": self.state.iteration}
        values |= metrics(finished)
        values |= execution.measured()
        values |= stages(execution)
        values["time/step"] = step_seconds
        values |= times(self.plan, finished)
        values |= performance(self.plan, finished, values)
        return values

    def _evaluate(self) -> dict[str, float]:
        return self._end_evaluation(self._begin_evaluation())

    def _begin_evaluation(self) -> Evaluation:
        """Hand over an evaluation of the weights as they are now."""
        start = time.time()
        execution = Execution(
            self.plan,
            "eval",
            Entry(self.state.iteration, self.state.versions),
            self.state.positions,
            keep=frozenset(kept_columns.sample_columns(self.plan, "eval")),
            controls=self.state.controls,
            states=self.state.states,
        )
        self.driver.settle()
        self.driver.submit((execution, step) for step in self.plan.eval_steps)
        return Evaluation(execution, time.time() - start)

    def _end_evaluation(self, evaluation: Evaluation) -> dict[str, float]:
        """Wait for an evaluation; return its metrics, and the seconds that the run stood still for it."""
        start = time.time()
        execution = evaluation.execution
        iteration = execution.entry.iteration
        self.calls.moment = f"in the evaluation {moment_after(iteration)}"
        self.driver.finish(execution)
        self.folder.timeline(execution.finished_steps, iteration, spans=True)
        values = {}
        for metric, column in self.plan.report.items():
            column_parts = [ref.location for ref in execution.refs[column] if ref]
            total, count = self.calls.call((execution.pools[column], 0), "mean", *column_parts)
            values[f"eval/{metric}"] = total / count if count else float("nan")
        values |= evaluation_details(self.plan, execution.finished_steps)
        self._write_samples(execution)
        self.progress.evaluation(iteration, values)
        stood_still = evaluation.submit_seconds + time.time() - start
        return {**values, "time/eval": stood_still}

    # Columns on disk

    def _write_samples(self, execution: Execution) -> None:
        """Write the first rows of an iteration or an evaluation to its samples file."""
        iteration = execution.entry.iteration
        if execution.phase == "train":
            iteration += 1  # files count iterations that are done
        self.calls.moment = moment_after(iteration)
        excerpts = kept_columns.excerpts(execution)
        if not excerpts:
            return
        path = self.folder.samples(iteration, execution.phase)
        columns = []
        rows_of_columns = []
        for column, sources in excerpts:
            columns.append(column)
            for source in sources:  # each device cuts out its rows, so that no more travels
                _, selected = self.cluster.call(source.place, "select", source.rows, source.chunk, returns=2)
                rows_of_columns.append(selected)
        _, token_sources = excerpts[0]
        pool, _ = token_sources[0].place
        rows = self.calls.call((pool, 0), "write_samples", path, columns, *rows_of_columns)
        if rows:
            self.folder.trackers.samples(execution.phase, rows, iteration)
            self.progress.samples(execution.phase, rows)

    def _record(self, execution: Execution) -> None:
        """Write the columns of an iteration; they count once all of them are on disk."""
        self.calls.moment = moment_after(self.state.iteration)
        folder = self.folder.begin(FOLDER)
        for metadata in kept_columns.records(execution):
            columns = list(metadata.types)
            all_rows = np.arange(execution.rows.count(metadata.domain))
            selections = [execution.selection(column).take(all_rows) for column in columns]
            arguments, refs = gathering(selections)
            column_parts = [ref.location for ref in refs]
            path = str(folder / file_of(metadata.domain))
            place = execution.pools[columns[0]], 0
            self.calls.call(place, "write_recorded", path, metadata, *arguments, *column_parts)
        self.folder.commit_recorded(folder, self.state.iteration)

    # Checkpoints

    def _begin_save(self, only_best: bool = False) -> None:
        """Copy a checkpoint to host memory; it is written while the next iteration runs.

        With ``only_best`` it stays if it is one of the best, by what its evaluation measures until then.
        """
        start = time.time()
        self.progress.say("saving a checkpoint")
        self.calls.moment = moment_after(self.state.iteration)
        folder = self.folder.begin("checkpoints")
        self.calls.call_all("begin_save", str(folder), engines=True)
        digests = {**self._write_waiting(folder), **self._write_node_rows(folder)}
        self.saving = Saving(folder, replace(self.state), digests, self._is_due(due.SAVE), only_best)
        self.save_seconds += time.time() - start

    def _write_waiting(self, folder: Path) -> dict[str, str]:
        """Write the rows that wait behind regions; return the digest of each file."""
        digests = {}
        for region, waiting in self.state.waiting.items():
            for kind, buffered in waiting.non_empty().items():
                file = f"{region}-{kind}.npz"
                arguments, refs = buffered.gathering(list(buffered.columns))
                column_parts = [ref.location for ref in refs]
                place = self.cluster.places[0]
                path = str(folder / file)
                digests[file] = self.calls.call(place, "write_rows", path, *arguments, *column_parts)
        return digests

    def _write_node_rows(self, folder: Path) -> dict[str, str]:
        """Write the rows that nodes hold, such as a replay buffer's; return the digest of each file."""
        digests = {}
        for place, node in self.calls.holders():
            file = f"{node}-held.npz"
            digests[file] = self.calls.call(place, "write_held", node, str(folder / file))
        return digests

    def _finish_save(self) -> None:
        """Commit a checkpoint, which counts once all of it is on disk; or drop one that is not best."""
        if self.saving is None:
            return
        start = time.time()
        saving = self.saving
        self.saving = None
        iteration = saving.state.iteration
        self.calls.moment = moment_after(iteration)
        digests = saving.digests
        for digests_of_worker in self.calls.call_all("finish_save", engines=True):
            digests |= digests_of_worker
        is_lasting = saving.is_due or self._is_best(iteration)
        if saving.only_best and not is_lasting:
            shutil.rmtree(saving.folder)
        else:
            keep = self.plan.schedule.keep
            self.folder.commit_checkpoint(saving.folder, saving.state, digests, keep, is_lasting, self.best)
        self.save_seconds += time.time() - start

    def _save_now(self) -> None:
        """Have a checkpoint of the last iteration on disk."""
        self._finish_save()
        if self.folder.saved() < self.state.iteration:
            self._begin_save()
            self._finish_save()

    @contextmanager
    def _saving_on_error(self, end: int) -> Iterator[None]:
        """Save what is trained if the block fails, before its error ends the run.

        The block does what comes behind an iteration: an evaluation, a line of metrics, the timeline, a file
        of samples, or what is printed: none changes weights. Where steps of an iteration before ``end`` may
        have begun, engines are not as ``state`` says, and nothing is saved.
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
        with suppress(SystemExit):  # from notes that nobody reads
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

    def _rank(self, values: Mapping[str, Any]) -> None:
        """Take what an evaluation has measured, if any; say so where its checkpoint is the best so far."""
        self.best.add(values)
        iteration = values["step"]
        ranking = self._ranking_with(iteration)
        if ranking and ranking[0].iteration == iteration:
            self.progress.note(self.best.text(ranking))

    def _ranking_with(self, iteration: int) -> list[Ranked]:
        """Return the best of all lasting checkpoints, of one that is being written, and of an iteration."""
        if self.best.best is None:
            return []
        iterations = {*self.folder.lasting(), iteration}
        if self.saving:
            iterations.add(self.saving.state.iteration)
        return self.best.among(iterations)

    def _is_best(self, iteration: int) -> bool:
        """Return whether an iteration is among the best, by what evaluations have measured so far."""
        return iteration in {ranked.iteration for ranked in self._ranking_with(iteration)}

    def _may_be_best(self) -> bool:
        """Return whether the last iteration is among the best, or its evaluation under way may say so."""
        if self.best.best is None:
            return False
        is_being_evaluated = self.line is not None and self.line.evaluation is not None
        return is_being_evaluated or self._is_best(self.state.iteration)

    # Resuming

    def _load(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Take the weights, optimizers, positions in the data and states that a checkpoint has."""
        self.state = State(**{name: value for name, value in record.items() if name != "waiting"})
        self.calls.moment = moment_after(self.state.iteration)
        self.calls.call_all("load", str(folder), self.state.versions, engines=True)
        self.calls.restore_held(folder)

    def _restore(self) -> None:
        """Go on from the last checkpoint, and drop what was written after it; without one, from the start."""
        folder = self._last_intact_checkpoint()
        measured = BestCheckpoints(self.plan.schedule.best, self.folder.earlier())
        record = self.folder.restore(folder, self.plan.schedule.keep, measured)
        if folder is None:
            return
        self._load(folder, record)
        for region, kinds in record.get("waiting", {}).items():
            buffers = {}
            for kind, buffer_record in kinds.items():
                buffers[kind] = self._read_waiting(f"{folder}/{region}-{kind}.npz", buffer_record)
            self.state.waiting[region] = Waiting(**buffers)
        for values in self.folder.earlier():
            self.best.add(values)
            self.skipped.add(values)
            self.watchdog.add(values)  # its alarms were shown when they came
            self._check_early_stop(values, self.state.iteration)
        self.progress.resumed(self.state.iteration)

    def _last_intact_checkpoint(self) -> Path | None:
        """Return the last checkpoint whose files are what was written; None where there is none at all.

        Raises:
            RunError: all of them are damaged.
        """
        problems: list[str] = []
        for checkpoint in reversed(self.folder.checkpoints()):
            folder = checkpoint.resolve()
            problem = self.calls.damage(folder)
            if not problem:
                for damaged in problems:
                    self.progress.note(f"{damaged}; the run goes on from {folder.name}, which is before it")
                return folder
            problems.append(f"the checkpoint {folder.name} is damaged: {problem}")
        if problems:
            remedy = "bring one back from a copy, or start anew in another --run-dir"
            raise RunError("\n".join(problems) + f"\n  {remedy}")
        return None

    def _read_waiting(self, path: str, record: Mapping[str, Any]) -> BufferedRows:
        """Return rows that wait behind a region, as a checkpoint has them."""
        place = self.cluster.places[0]
        columns = self.calls.columns(place, "read_rows", path, count=len(record["columns"]))
        return BufferedRows.recorded(record, columns)

    def _export(self) -> None:
        self.progress.say("writing the models")
        self.calls.moment = moment_after(self.state.iteration)
        folder = self.folder.begin()
        self.calls.call_all("export", str(folder), engines=True)
        self.folder.commit_models(folder)
