"""Runs an iteration again, from one of its nodes on: with recorded columns, in this process, for a debugger.

    recorded        prompts ─ rollout ─ rewards
    run again                              └─ advantages ─ update_policy     with the weights of then

What is before the node is taken from the run's record (``schedule.record_every``), the weights from the
checkpoint before the iteration. Nothing of the run is changed. Each pool has one device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlgraph.errors import RunError, nearest
from rlgraph.files import read_json
from rlgraph.frontend.compose import compose
from rlgraph.ir.actions import Collect, Copy, Sync
from rlgraph.ir.dependencies import reached
from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import Plan, Step
from rlgraph.lowering import plan_tree
from rlgraph.nodes.support.record_file import about, read, steps_of
from rlgraph.passes.lower import in_one_process
from rlgraph.planning.auto_settings import as_planned, fixed
from rlgraph.printing.plan_text import sentence
from rlgraph.reports.measured import read_metrics
from rlgraph.reports.plan_file import load
from rlgraph.runtime.cluster.cluster import InlineCluster, Value
from rlgraph.runtime.columns.part import Part
from rlgraph.runtime.driver.control import ControlCalls, after
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.iteration import Entry, Execution, FinishedStep
from rlgraph.runtime.driver.metrics import as_json, metrics
from rlgraph.runtime.driver.row_buffer import BufferedRows
from rlgraph.runtime.messages.report import Report
from rlgraph.runtime.messages.tasks import ColumnRef
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
        every = [one for _, outcome in self.steps for one in outcome]
        name = max((len(one.name) for one in every), default=0)
        width = max((len(one.recorded) for one in every), default=0)
        for step, outcome in self.steps:
            yield f"{step.id:>5}. {sentence(step)}"
            for one in outcome:
                told = "the same" if one.same else f"now {one.now}"
                yield f"{'' if one.same else '*':>6} {one.name:<{name}}  {one.recorded:<{width}}  {told}"
        other = sum(not one.same for one in every)
        differ = f", {other} differ (marked *)" if other else ""
        yield f"{len(every) - other} results are those of the run{differ}"


def replay(run_dir: Path, iteration: int, node: str, export: Path | None = None) -> Replayed:
    """Run an iteration of a run again from one of its nodes on.

    Args:
        run_dir: of the run; its graph must still be where it was, and the same.
        iteration: counted from 1.
        node: the first that runs; those after it in the plan run too.
        export: a directory for the models as the iteration leaves them, as transformers loads them.

    Raises:
        RunError: there is no such run, node, record or checkpoint; the graph has changed; or a step failed.
        GraphError: the graph is wrong now.
    """
    plan = in_one_process(_plan_again(run_dir))
    steps = Execution(plan, "train", Entry(iteration - 1, {}), {}).steps
    again = _again(plan, steps, _first(plan, steps, iteration, node))
    recorded = [step for step in steps if step not in again]
    _weights_are_there(plan, recorded, again, iteration)
    columns = _recorded(run_dir, iteration, recorded, again)
    cluster = InlineCluster(plan.pools)
    try:
        calls = ControlCalls(plan, cluster)
        calls.all("join", str(run_dir.resolve()), values := referred(plan))
        calls.all("setup", with_values(plan, values), calls.meeting(), place=True)
        versions, positions, states = _restore(calls, plan, run_dir, iteration, again)
        entry, keep = Entry(iteration - 1, versions), recorded_columns(plan)
        past = _controls(plan, run_dir, iteration)
        execution = Execution(plan, "train", entry, positions, None, keep, controls=past, states=states)
        for step in recorded:
            _give(execution, step, columns)
        driver = Driver(plan, cluster, lambda _: None)
        driver.submit((execution, step) for step in again)
        driver.finish(execution)
        if export:
            export.mkdir(parents=True, exist_ok=True)
            calls.all("export", str(export.resolve()), engines=True)
        return Replayed(_title(run_dir, iteration, node), _compared(execution, again, run_dir, iteration))
    finally:
        cluster.close()


def _plan_again(run_dir: Path) -> Plan:
    """Return the run's plan for one device per pool."""
    if not (run_dir / "plan.json").is_file():
        raise RunError(f"{run_dir} holds no run (no plan.json)")
    saved = load(run_dir / "plan.json")
    assert saved.origin
    pools = saved.origin.composed.get("pools") or {}
    single = [f"pools.{name}.devices=1" for name in pools]
    for name, model in saved.models.items():
        shared = {
            key: alone for key, alone in ON_ONE_DEVICE.items() if getattr(model.train, key, alone) != alone
        }
        single += [f"models.{name}.train.{key}={json.dumps(alone)}" for key, alone in shared.items()]
    tree = compose(saved.origin.graph, (*saved.origin.overrides, *single))
    plan = fixed(plan_tree(as_planned(tree, saved), 1, saved.device))
    if plan.digest != saved.digest:
        law = f"{saved.origin.graph} is no longer the graph that {run_dir} was made from"
        raise RunError(f"{law}\n  compare it with {run_dir}/graph.yaml: rlgraph diff")
    return plan


def _first(plan: Plan, steps: Sequence[Step], iteration: int, node: str) -> Step:
    """Return the step of a node, if it runs in the iteration."""
    runs = {step.node: step for step in steps if not step.inserted}
    if node in runs:
        return runs[node]
    law = f"{plan.graph} has no node `{node}`"
    if known := [step for step in plan.steps if step.node == node]:
        until = f", it is repeated until `{known[0].region}` has its rows" if known[0].region else ""
        law = f"`{node}` does not run in iteration {iteration}{until}"
    remedies = filter(None, [f"begin with one of {', '.join(runs)}", nearest(node, runs)])
    raise RunError("\n  ".join([law, *remedies]))


def _again(plan: Plan, steps: Sequence[Step], first: Step) -> list[Step]:
    """Return the steps from the first on, and before them the copies, syncs and losses that they need."""
    later = {step.id for step in steps if step.id >= first.id}
    joining = {step.id for step in steps if step.joins}
    syncs = {step.id for step in steps if isinstance(step.action, Sync)}
    copies = {step.id for step in steps if isinstance(step.action, Copy)}
    made_again = copies | syncs | joining
    needs = plan.needs["train"].subgraph(later | made_again)
    again = reached(needs, later, lambda _, need: need in syncs or need in joining)
    return [step for step in steps if step.id in again]


def _weights_are_there(plan: Plan, recorded: Sequence[Step], again: Sequence[Step], iteration: int) -> None:
    """Check that a checkpoint has the weights on entry to the iteration, no older and no newer ones."""
    for step in again:
        for model, version in step.models.items():
            updates = [other for other in recorded if other.updated == model]
            if version and version.is_older:
                law = f"`{step.node}` reads {model}@{version}, and a checkpoint has {model}@v alone"
                raise RunError(f"{law}\n  begin with a node behind it")
            if updates and version and plan.since_entry(model, version, iteration):
                law = f"`{step.node}` reads {model}@{version}, which `{updates[0].node}` makes"
                raise RunError(f"{law}\n  begin with `{updates[0].node}`")


def _recorded(
    run_dir: Path, iteration: int, recorded: Sequence[Step], again: Sequence[Step]
) -> dict[str, Part]:
    """Return the columns of the steps that do not run."""
    wanted = [column for step in recorded if not isinstance(step.action, Copy) for column in step.writes]
    columns = _recorded_of(run_dir, iteration)
    if missing := [column for column in wanted if column not in columns]:
        known = ", ".join(map(str, steps_of(run_dir))) or "none"
        law = f"`{again[0].node}` needs `{missing[0]}` of iteration {iteration}, which was not recorded"
        raise RunError(f"{law}\n  recorded iterations: {known} (schedule.record_every)")
    return columns


def _recorded_of(run_dir: Path, iteration: int) -> dict[str, Part]:
    """Return every column that was recorded of an iteration."""
    folder = steps_of(run_dir).get(iteration)
    files = sorted(folder.glob("*.parquet")) if folder else []
    columns = [column for path in files for column in read(path, [*about(path).types]).items()]
    return {name: Part(column.values, column.offsets) for name, column in columns}


def _restore(
    calls: ControlCalls, plan: Plan, run_dir: Path, iteration: int, again: Sequence[Step]
) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """Restore the weights before an iteration; return their versions, positions in the data, and states."""
    checkpoints = {iteration_of(path): path for path in RunDir(run_dir).checkpoints()}
    changing = {step.updated for step in plan.steps} - {""}
    if folder := checkpoints.get(iteration - 1):
        if problem := calls.damage(folder.resolve()):
            raise RunError(f"the checkpoint {folder} is damaged: {problem}\n  choose another iteration")
        state = read_json(folder / "state.json")
        calls.all("load", str(folder.resolve()), state["versions"], engines=True)
        calls.restore_held(folder)
        return state["versions"], state["positions"], state.get("states", {})
    functions = plan.functions["train"]
    own = [functions[step.node] for step in again if not step.inserted]
    stateful = any(function.state or function.holds for function in own)
    if iteration > 1 and (stateful or any(changing & step.models.keys() for step in again)):
        known = ", ".join(str(1 + number) for number in checkpoints) or "none"
        law = f"{run_dir} has no checkpoint {after(iteration - 1)}, with which iteration {iteration} began"
        remedy = f"with a checkpoint before them: 1, {known} (schedule.save_every, schedule.keep)"
        raise RunError(f"{law}\n  {remedy}")
    return {name: 0 for name, model in plan.models.items() if model.train}, {}, {}


def _controls(plan: Plan, run_dir: Path, iteration: int) -> dict[str, float]:
    """Return the adaptive numbers that the iteration had."""
    metrics_then, functions = _metrics(run_dir, iteration), plan.functions["train"]
    names = [f"{node}/{name}" for node, function in functions.items() for name in function.controllers]
    return {name.replace("/", "."): metrics_then[name] for name in names if name in metrics_then}


def _metrics(run_dir: Path, iteration: int) -> Mapping[str, Any]:
    """Return the line of an iteration in metrics.jsonl."""
    return next((line for line in read_metrics(run_dir) if line["step"] == iteration), {})


def _give(execution: Execution, step: Step, columns: Mapping[str, Part]) -> None:
    """Count a step as done, with its recorded columns."""
    execution.unsubmitted.discard(step.id)
    if isinstance(step.action, Copy):
        return
    parts = [columns[name] for name in step.writes]
    for name in step.writes:
        execution.refs[name] = [ColumnRef(name, Value(columns[name]))]
    execution.happened |= {step.id, *step.writes}
    if not parts:
        return
    lengths = next((part for part in parts if part.offsets is not None), parts[0]).lengths
    kept = np.flatnonzero(parts[0].values) if step.run and step.run.filters else None
    execution.rows.reports[step.id] = {(step.pool, 0): Report(0.0, 0.0, lengths=lengths, kept=kept)}
    if isinstance(step.action, Collect):
        domain = execution.columns[step.writes[0]].domain
        execution.rows.collected[domain] = BufferedRows(lengths, np.zeros(len(lengths), np.int64))


def _title(run_dir: Path, iteration: int, node: str) -> str:
    weights = f"the checkpoint {after(iteration - 1)}" if iteration > 1 else "the models that it began with"
    return f"iteration {iteration} of {run_dir}, again from `{node}`, with the weights of {weights}"


def _compared(
    execution: Execution, again: Sequence[Step], run_dir: Path, iteration: int
) -> tuple[tuple[Step, tuple[Compared, ...]], ...]:
    before, columns = _metrics(run_dir, iteration), _recorded_of(run_dir, iteration)
    outcomes = []
    for step in (step for step in again if not step.inserted):
        now = as_json(metrics([FinishedStep(step, execution.rows.reports[step.id])]))
        compared = [Compared(name, _text(before.get(name)), _text(value)) for name, value in now.items()]
        parts = [(name, execution.reference(name, 0).location.get()) for name in step.writes]
        compared += [_column(name, columns.get(name), part) for name, part in parts]
        outcomes.append((step, tuple(compared)))
    return tuple(outcomes)


def _text(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.9g}"


def _column(name: str, then: Part | None, now: Part) -> Compared:
    """Compare a column with the recorded one: rows, how many values differ, and by how much at most."""
    if then is None:
        return Compared(name, "not recorded", f"{len(now)} rows")
    a, b = (f"{len(part)} rows, {len(part.values)} values" for part in (then, now))
    if a != b or isinstance(now.values, list):
        different = "" if a != b or list(then.values) == list(now.values) else ", others"
        return Compared(name, a, b + different)
    others = np.flatnonzero(then.values != now.values)
    if not len(others):
        return Compared(name, a, b)
    most = np.abs(then.values.astype(float) - now.values.astype(float)).max()
    return Compared(name, a, f"{len(others)} of them others, by {most:.3g} at most")
