"""Runs an iteration again, from one of its nodes on: with recorded columns, in this process, for a debugger.

    recorded        prompts ─ rollout ─ rewards
    run again                              └─ advantages ─ update_policy     with the weights of then

Columns of the steps before the node come from the run's record (``schedule.record_every``), the weights from
the checkpoint before the iteration. Nothing of the run is changed. Each pool has one device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlgraph.errors import RunError, nearest
from rlgraph.files import read_json
from rlgraph.frontend.compose import compose
from rlgraph.frontend.graph_of_run import graph_of_run
from rlgraph.frontend.kept_graph import GRAPH
from rlgraph.ir.actions import Copy, Sync
from rlgraph.ir.dependencies import reached
from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import Plan, Step
from rlgraph.lowering import plan_tree
from rlgraph.nodes.support.record_file import about, read, steps_of
from rlgraph.passes.lower import in_one_process
from rlgraph.planning.auto_settings import as_planned, fixed
from rlgraph.printing.step_text import sentence
from rlgraph.reports.measured import read_metrics
from rlgraph.reports.plan_file import load
from rlgraph.runtime.cluster.cluster import InlineCluster, Value
from rlgraph.runtime.columns.chunk import Chunk, row_lengths
from rlgraph.runtime.driver.control import ControlCalls, moment_after
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.iteration import Entry, Execution, FinishedStep
from rlgraph.runtime.driver.metrics import as_json, metrics
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.rundir.kept_columns import recorded_columns
from rlgraph.runtime.rundir.rundir import RunDir, iteration_of
from rlgraph.variables import referred, with_values


@dataclass(frozen=True)
class Compared:
    """A metric or a column of a step, as it was recorded and as it is now."""

    name: str
    recorded: str
    now: str

    @property
    def same(self) -> bool:
        return self.recorded == self.now


@dataclass(frozen=True)
class Replayed:
    """An iteration that ran again: its steps, each with its outcome."""

    title: str
    steps: tuple[tuple[Step, tuple[Compared, ...]], ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *self._lines()]) + "\n"

    def _lines(self) -> Iterator[str]:
        results = list[Compared]()
        for _, outcome in self.steps:
            results += outcome
        name_width = max((len(result.name) for result in results), default=0)
        recorded_width = max((len(result.recorded) for result in results), default=0)
        for step, outcome in self.steps:
            yield f"{step.id:>5}. {sentence(step)}"
            for result in outcome:
                mark = ""
                verdict = "the same"
                if not result.same:
                    mark = "*"
                    verdict = f"now {result.now}"
                yield (
                    f"{mark:>6} {result.name:<{name_width}}  {result.recorded:<{recorded_width}}  {verdict}"
                )
        differing = sum(not result.same for result in results)
        summary = f"{len(results) - differing} results are those of the run"
        if differing:
            summary += f", {differing} differ (marked *)"
        yield summary


class EntryState(NamedTuple):
    """The contents of a checkpoint for the next iteration, without weights and optimizers."""

    versions: dict[str, int]
    positions: dict[str, int]
    states: dict[str, str]


def replay(run_dir: Path, iteration: int, node: str, export: Path | None = None) -> Replayed:
    """Run an iteration of a run again from one of its nodes on.

    Args:
        run_dir: of the run; its folder is enough, but for the files that its graph names.
        iteration: counted from 1.
        node: the first that runs; those after it in the plan run too.
        export: a directory for the models as the iteration leaves them, as transformers loads them.

    Raises:
        RunError: there is no such run, node, record or checkpoint; the graph has changed; or a step failed.
        GraphError: the graph is wrong now.
    """
    # 1. Choose the steps that run; the others are taken from the record.
    plan = in_one_process(_plan_again(run_dir))
    steps = Execution(plan, "train", Entry(iteration - 1, {}), {}).steps
    steps_again = _steps_again(plan, steps, _step_of(plan, steps, iteration, node))
    recorded_steps = [step for step in steps if step not in steps_again]
    _check_versions(plan, recorded_steps, steps_again, iteration)
    columns = _recorded_columns(run_dir, iteration)
    _check_recorded(run_dir, iteration, recorded_steps, steps_again, columns)

    cluster = InlineCluster(plan.pools)
    try:
        # 2. Set up one worker per pool, with the weights on entry to the iteration.
        calls = ControlCalls(plan, cluster)
        variables = referred(plan)
        calls.call_all("join", str(run_dir.resolve()), variables)
        calls.call_all("setup", with_values(plan, variables), calls.rendezvous(), place=True)
        entry_state = _restore(calls, plan, run_dir, iteration, steps_again)

        # 3. Run the steps, behind those that were recorded.
        execution = Execution(
            plan,
            "train",
            Entry(iteration - 1, entry_state.versions),
            entry_state.positions,
            keep=recorded_columns(plan),
            controls=_controls(plan, run_dir, iteration),
            states=entry_state.states,
        )
        _take_record(execution, recorded_steps, columns)
        driver = Driver(plan, cluster, lambda _: None)
        driver.submit((execution, step) for step in steps_again)
        driver.finish(execution)

        # 4. Compare what came of them with what the run has written.
        if export:
            export.mkdir(parents=True, exist_ok=True)
            calls.call_all("export", str(export.resolve()), engines=True)
        title = _title(run_dir, iteration, node)
        return Replayed(title, _compared(execution, steps_again, run_dir, iteration))
    finally:
        cluster.close()


def _plan_again(run_dir: Path) -> Plan:
    """Return the run's plan for one device per pool."""
    if not (run_dir / "plan.json").is_file():
        raise RunError(f"{run_dir} holds no run (no plan.json)")
    saved = load(run_dir / "plan.json")
    assert saved.origin
    pools = saved.origin.composed.get("pools") or {}
    one_device = [f"pools.{pool}.devices=1" for pool in pools]
    for name, model in saved.models.items():
        for key, value in ON_ONE_DEVICE.items():
            if getattr(model.train, key, value) != value:
                one_device.append(f"models.{name}.train.{key}={json.dumps(value)}")
    graph, settings = graph_of_run(run_dir, saved.origin.graph, saved.origin.overrides)
    tree = compose(graph, (*settings, *one_device))
    plan = fixed(plan_tree(as_planned(tree, saved), 1, saved.device))
    if plan.digest != saved.digest:
        law = f"{graph} is no longer the graph that {run_dir} was made from"
        remedy = f"put back what {run_dir / GRAPH} was, or use rlgraph {saved.origin.rlgraph}, which ran it"
        raise RunError(f"{law}\n  {remedy}")
    return plan


def _step_of(plan: Plan, steps: Sequence[Step], iteration: int, node: str) -> Step:
    """Return the step of a node, if it runs in the iteration."""
    step_of_node = {step.node: step for step in steps if not step.inserted}
    if node in step_of_node:
        return step_of_node[node]
    law = f"{plan.graph} has no node `{node}`"
    planned = [step for step in plan.steps if step.node == node]
    if planned:
        region = planned[0].region
        reason = f", it is repeated until `{region}` has its rows" if region else ""
        law = f"`{node}` does not run in iteration {iteration}{reason}"
    lines = [law, f"begin with one of {', '.join(step_of_node)}"]
    hint = nearest(node, step_of_node)
    if hint:
        lines.append(hint)
    raise RunError("\n  ".join(lines))


def _steps_again(plan: Plan, steps: Sequence[Step], start: Step) -> list[Step]:
    """Return the steps from a start on, and the copies, syncs and losses ahead of it that they need."""
    later = {step.id for step in steps if step.id >= start.id}
    joining = {step.id for step in steps if step.joins}
    syncs = {step.id for step in steps if isinstance(step.action, Sync)}
    copies = {step.id for step in steps if isinstance(step.action, Copy)}
    # not recorded: what these do has to be done again, where a later step needs it
    needs = plan.needs["train"].subgraph(later | copies | syncs | joining)
    again = reached(needs, later, lambda _, need: need in syncs or need in joining)
    return [step for step in steps if step.id in again]


def _check_versions(
    plan: Plan, recorded_steps: Sequence[Step], steps_again: Sequence[Step], iteration: int
) -> None:
    """Check that steps read the weights on entry to the iteration, which a checkpoint has."""
    for step in steps_again:
        for model, version in step.models.items():
            if not version:
                continue
            if version.is_older:
                law = f"`{step.node}` reads {model}@{version}, and a checkpoint has {model}@v alone"
                raise RunError(f"{law}\n  begin with a node behind it")
            updates = [update for update in recorded_steps if update.updated == model]
            if updates and plan.since_entry(model, version, iteration):
                law = f"`{step.node}` reads {model}@{version}, which `{updates[0].node}` makes"
                raise RunError(f"{law}\n  begin with `{updates[0].node}`")


def _recorded_columns(run_dir: Path, iteration: int) -> dict[str, Chunk]:
    """Return every column that was recorded of an iteration."""
    folder = steps_of(run_dir).get(iteration)
    if folder is None:
        return {}
    columns: dict[str, Chunk] = {}
    for path in sorted(folder.glob("*.parquet")):
        names = list(about(path).types)
        for name, column in read(path, names).items():
            columns[name] = Chunk(column.values, column.offsets)
    return columns


def _check_recorded(
    run_dir: Path,
    iteration: int,
    recorded_steps: Sequence[Step],
    steps_again: Sequence[Step],
    columns: Mapping[str, Chunk],
) -> None:
    """Check that the columns of all steps that do not run were recorded."""
    for step in recorded_steps:
        if isinstance(step.action, Copy):
            continue
        for column in step.writes:
            if column not in columns:
                node = steps_again[0].node
                law = f"`{node}` needs `{column}` of iteration {iteration}, which was not recorded"
                known = ", ".join(map(str, steps_of(run_dir))) or "none"
                raise RunError(f"{law}\n  recorded iterations: {known} (schedule.record_every)")


def _restore(
    calls: ControlCalls, plan: Plan, run_dir: Path, iteration: int, steps_again: Sequence[Step]
) -> EntryState:
    """Load the weights before an iteration; return what else the run had then.

    Raises:
        RunError: the checkpoint is damaged, or there is none, and a step needs what it would have.
    """
    checkpoints = {iteration_of(path): path for path in RunDir(run_dir).checkpoints()}
    folder = checkpoints.get(iteration - 1)
    if folder:
        problem = calls.damage(folder.resolve())
        if problem:
            raise RunError(f"the checkpoint {folder} is damaged: {problem}\n  choose another iteration")
        state = read_json(folder / "state.json")
        calls.call_all("load", str(folder.resolve()), state["versions"], engines=True)
        calls.restore_held(folder)
        return EntryState(state["versions"], state["positions"], state.get("states", {}))
    if iteration > 1 and _needs_checkpoint(plan, steps_again):
        replayable = [1]  # a checkpoint after the last iteration begins none
        for number in sorted(checkpoints):
            is_of_run = plan.iterations == 0 or number < plan.iterations
            if is_of_run:
                replayable.append(1 + number)
        moment = moment_after(iteration - 1)
        law = f"{run_dir} has no checkpoint {moment}, with which iteration {iteration} began"
        numbers = ", ".join(map(str, dict.fromkeys(replayable)))
        remedy = f"iterations with a checkpoint before them: {numbers} (schedule.save_every, schedule.keep)"
        raise RunError(f"{law}\n  {remedy}")
    versions = {name: 0 for name, model in plan.models.items() if model.train}
    return EntryState(versions, {}, {})


def _needs_checkpoint(plan: Plan, steps: Sequence[Step]) -> bool:
    """Return whether steps read what changes from iteration to iteration: weights, states, or rows held."""
    trained_models = {step.updated for step in plan.steps} - {""}
    for step in steps:
        if trained_models & step.models.keys():
            return True
        if step.inserted:
            continue
        function = plan.functions["train"][step.node]
        if function.state or function.holds:
            return True
    return False


def _controls(plan: Plan, run_dir: Path, iteration: int) -> dict[str, float]:
    """Return the adaptive numbers that the iteration had, as ``update_policy.kl_coef``."""
    recorded = _metrics(run_dir, iteration)
    controls = {}
    for node, function in plan.functions["train"].items():
        for name in function.controllers:
            metric = f"{node}/{name}"
            if metric in recorded:
                controls[metric.replace("/", ".")] = recorded[metric]
    return controls


def _metrics(run_dir: Path, iteration: int) -> Mapping[str, Any]:
    """Return the line of an iteration in metrics.jsonl."""
    return next((line for line in read_metrics(run_dir) if line["step"] == iteration), {})


def _take_record(execution: Execution, steps: Sequence[Step], columns: Mapping[str, Chunk]) -> None:
    """Let an execution have the columns of steps that do not run; copies that it needs are made again."""
    execution.leave_out([step for step in steps if isinstance(step.action, Copy)])
    for step in steps:
        if isinstance(step.action, Copy):
            continue
        references = {name: Value(columns[name]) for name in step.writes}
        execution.add_recorded(step, references, _report(step, columns))


def _report(step: Step, columns: Mapping[str, Chunk]) -> Report | None:
    """Return what a step said of its rows, from the columns that it wrote; None without columns."""
    written = [columns[name] for name in step.writes]
    if not written:
        return None
    selected = None
    if step.run and step.run.filters:
        selected = np.flatnonzero(written[0].values)
    return Report(0.0, 0.0, lengths=row_lengths(written), selected=selected)


def _title(run_dir: Path, iteration: int, node: str) -> str:
    weights = "the models that it began with"
    if iteration > 1:
        weights = f"the checkpoint {moment_after(iteration - 1)}"
    return f"iteration {iteration} of {run_dir}, again from `{node}`, with the weights of {weights}"


def _compared(
    execution: Execution, steps_again: Sequence[Step], run_dir: Path, iteration: int
) -> tuple[tuple[Step, tuple[Compared, ...]], ...]:
    """Compare each step's metrics and columns with those that the run has written."""
    recorded_metrics = _metrics(run_dir, iteration)
    recorded = _recorded_columns(run_dir, iteration)
    outcomes = []
    for step in steps_again:
        if step.inserted:
            continue
        finished = FinishedStep(step, execution.rows.reports[step.id])
        results = []
        for name, value in as_json(metrics([finished])).items():
            results.append(Compared(name, _number_text(recorded_metrics.get(name)), _number_text(value)))
        for name in step.writes:
            column = execution.reference(name, 0).location.get()
            results.append(_compared_column(name, recorded.get(name), column))
        outcomes.append((step, tuple(results)))
    return tuple(outcomes)


def _number_text(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.9g}"


def _compared_column(name: str, recorded: Chunk | None, now: Chunk) -> Compared:
    """Compare a column with the recorded one: rows, how many values differ, and by how much at most."""
    if recorded is None:
        return Compared(name, "not recorded", f"{len(now)} rows")
    recorded_text = _size_text(recorded)
    now_text = _size_text(now)
    if recorded_text != now_text:
        return Compared(name, recorded_text, now_text)
    if isinstance(now.values, list):
        are_equal = list(recorded.values) == list(now.values)
        return Compared(name, recorded_text, now_text if are_equal else f"{now_text}, others")
    differing = np.flatnonzero(recorded.values != now.values)
    if len(differing) == 0:
        return Compared(name, recorded_text, now_text)
    largest = np.abs(recorded.values.astype(float) - now.values.astype(float)).max()
    return Compared(name, recorded_text, f"{len(differing)} of them others, by {largest:.3g} at most")


def _size_text(column: Chunk) -> str:
    return f"{len(column)} rows, {len(column.values)} values"
