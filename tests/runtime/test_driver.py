"""Which steps a worker is given in one call, and how long a driver waits for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ran import metrics

from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.ir.actions import MoveEngine
from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster.cluster import InlineCluster
from rlgraph.runtime.driver import driver as driver_module
from rlgraph.runtime.driver.batches import CallBatcher, ShareSummary, StartedStep, WorkerBatch, goes_along
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.flights import CallsInFlight, PendingCall
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.queue import StepQueue
from rlgraph.runtime.driver.step_calls import WorkerCall
from rlgraph.runtime.driver.versions import ServedVersions
from rlgraph.runtime.messages.tasks import STORE, WORKER, ColumnRef, Place, Task, TaskCounter
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")
pytestmark = pytest.mark.usefixtures("in_demo")


def ran(graph: str, run_dir: str) -> list[dict[str, Any]]:
    run_graph(graph, (), 1, steps=2, run_dir=Path(run_dir), inline=True)
    return metrics(run_dir)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Of every call that is made, its pool and what the worker does; as of workers that are processes."""
    seen: list[tuple[str, list[str]]] = []
    plain = InlineCluster.call

    def call(self: InlineCluster, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        if method == "perform":
            tasks: Sequence[Task] = args[0]
            seen.append((place[0], [str(t.args[0]) if t.method == "run" else t.method for t in tasks]))
        return plain(self, place, method, *args, returns=returns)

    monkeypatch.setattr(InlineCluster, "call", call)
    return seen


@pytest.mark.slow
def test_steps_in_a_row_go_in_one_call_and_change_no_number(
    calls: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ran(ONE, "alone")
    apart = [done for _, done in calls]
    assert all(done[-1:] == [one for one in done if one not in ("repartition", "repeat")] for done in apart)
    calls.clear()
    monkeypatch.setattr(InlineCluster, "inline", False)
    assert ran(ONE, "together") == alone
    together = [done for _, done in calls]
    assert [one for done in together for one in done] == [one for done in apart for one in done]
    assert ["rewards", "old_logprobs", "ref_logprobs", "advantages", "update_policy"] in together
    # what makes rows ends a call: how others lie depends on it
    assert {done[-1] for done in together if "rollout" in done} == {"rollout"}


def test_what_another_pool_waits_for_ends_a_call(
    calls: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ran(TWO, "alone")
    calls.clear()
    monkeypatch.setattr(InlineCluster, "inline", False)
    assert ran(TWO, "together") == alone
    assert ("gen", ["rewards"]) in [(pool, done[-1:]) for pool, done in calls]  # the trainer moves them
    assert max(len(done) for pool, done in calls if pool == "train") > 1


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    plan = compile_graph(ONE, (), 2)
    cluster = SimpleNamespace(
        inline=False, shares=False, places=[("main", 0), ("main", 1)], unresponsive=dict
    )
    return Driver(plan, cluster, lambda step: None, tmp_path)  # type: ignore[arg-type]


def execution(plan: Plan) -> Execution:
    return Execution(plan, "train", Entry(0, {}), {})


PLACE = ("main", 0)


@pytest.mark.parametrize(
    ("only_copies", "last_execution", "awaits", "goes"),
    [
        (False, 1, {"its call"}, True),  # it waits for what the steps before it wait for
        (False, 1, set(), True),  # what it reads has been reported
        (False, 1, {"another call"}, False),  # the steps before it would wait for that, too
        (False, 2, {"its call"}, False),  # it is of another iteration
        (True, 2, {"another call"}, True),  # a move of columns goes with the step behind it
    ],
)
def test_a_step_that_waits_for_more_holds_up_none_before_it(
    only_copies: bool, last_execution: int, awaits: set[str], goes: bool
) -> None:
    shares = {PLACE: ShareSummary(only_copies, last_execution, {"its call"})}
    assert goes_along(shares, 1, {PLACE: awaits}) == goes
    assert goes_along(shares, 1, {("main", 1): awaits})  # a worker without a share has nothing to hold up


def test_a_batch_is_judged_by_calls_that_have_not_reported() -> None:
    here = execution(compile_graph(ONE, (), 2))
    op = next(step for step in here.steps if step.kind == "run" and step.reads)
    move = next(step for step in here.steps if step.kind == "repartition")
    makers = {"column": "its call", "other": "another call"}
    makes = WorkerCall(PLACE, "run", (), (ColumnRef("column", "column"),))
    later = {
        name: WorkerCall(PLACE, "run", (), (ColumnRef(name, name),)) for name in ("column", "other", "old")
    }
    batch = CallBatcher()
    assert batch.accepts(here, [later["other"]], makers)
    batch.add(StartedStep(here, move, [makes]))
    assert batch.accepts(here, [later["other"]], makers)  # a move waits for its step
    batch.add(StartedStep(here, op, [makes]))
    assert batch.accepts(here, [later["column"]], makers)
    assert batch.accepts(here, [later["old"]], makers)  # what has been reported is there
    assert not batch.accepts(here, [later["other"]], makers)
    assert not batch.accepts(execution(here.plan), [later["column"]], makers)  # of another iteration


def test_a_worker_gets_one_call_for_the_steps_and_processes_beside_it_one_each() -> None:
    here = execution(compile_graph(ONE, (), 2))
    steps, batch = here.steps[:3], CallBatcher()
    for number, step in enumerate(steps):
        calls = [WorkerCall((step.pool, device), f"{number}", ()) for device in range(2)]
        batch.add(StartedStep(here, step, calls, off_worker=number == 1))
    started, batches = batch.take()
    assert [one.step for one in started] == [*steps] and not batch.started
    made = [(one.place, [call.method for _, call in one.share], one.off_worker) for one in batches]
    on_workers = [(("main", device), ["0", "2"], False) for device in range(2)]
    assert made == on_workers + [(("main", device), ["1"], True) for device in range(2)]


def test_references_follow_a_call_and_tasks_have_their_places() -> None:
    here = execution(compile_graph(ONE, (), 1))
    step = next(step for step in here.steps if step.kind == "run" and not step.reads)
    refs = (ColumnRef("a", "ref a"), ColumnRef("b"), ColumnRef("c", "ref c"))
    share = [(StartedStep(here, step, []), WorkerCall(PLACE, "run", (), refs, unfinished_columns=1))]
    (task,), references = WorkerBatch(PLACE, share, off_worker=False).tasks(STORE)
    assert references == ["ref a", "ref c"]
    assert [ref.location for ref in task.inputs] == [0, WORKER, 1]
    assert len(task.outputs) == len(step.writes) + 1


def test_a_step_that_waits_holds_up_its_own_pool_only() -> None:
    plan = compile_graph(TWO, (), 1)
    here, queue = execution(plan), StepQueue()
    source = next(step for step in here.steps if not step.reads and not step.inserted)
    reader = next(step for step in here.steps if {*source.writes} & {*step.reads})
    later = next(step for step in here.steps if step.pool == reader.pool and step.id > reader.id)
    elsewhere = replace(source, id=99, pool="other")
    queue.append((here, step) for step in (reader, source, elsewhere, later))
    ready = [step for _, step in queue.ready(lambda: None)]
    expected = [elsewhere] if source.pool == reader.pool else [source, elsewhere]
    assert ready == expected
    assert [queued.step for queued in queue.steps] == [s for s in (reader, source, later) if s not in ready]


def test_a_queue_calls_started_steps_where_the_next_one_reads_them() -> None:
    here, queue = execution(compile_graph(ONE, (), 1)), StepQueue()
    reader = next(step for step in here.steps if step.reads)
    queue.append([(here, reader)])
    calls: list[str] = []

    def call_started() -> None:
        calls.append("called")
        here.happened |= {event for _, event in queue.steps[0].needs}

    assert [step for _, step in queue.ready(call_started)] == [reader]
    assert calls == ["called"] and not queue.steps


def test_rounds_come_before_the_collect_that_waits_for_them() -> None:
    here, queue = execution(compile_graph(ONE, (), 1)), StepQueue()
    first, collect, last = here.steps[:3]
    queue.append([(here, first), (here, collect)])
    queue.insert_before(collect, [(here, last)])
    assert [queued.step for queued in queue.steps] == [first, last, collect]


def test_calls_in_flight_know_who_makes_what_until_it_has_reported() -> None:
    here = execution(compile_graph(ONE, (), 2))
    flights, share = CallsInFlight(), [(here, step) for step in here.steps[:2]]
    flights.add("reports", PendingCall(PLACE, share, ["a", "b"]))
    flights.add("judged", PendingCall(PLACE, share[1:], ["c"], off_worker=True))
    assert flights.makers == {"a": "reports", "b": "reports", "c": "judged"}
    assert flights.sent_tasks[PLACE] == 2  # those beside the worker are not its own
    assert flights.running() == {"main": here.steps[1]}
    assert flights.awaited_by(here) == (*share[1], PLACE)
    flights.finish("reports")
    assert flights.makers == {"c": "judged"} and [*flights.pending] == ["judged"]
    assert flights.running() == {"main": here.steps[1]}


def test_weights_that_are_there_are_not_sent_again() -> None:
    plan = compile_graph(TWO, (), 1)
    sync = next(step for step in plan.steps if step.source)
    (model,) = sync.models
    served, calls = ServedVersions(lenders=()), [WorkerCall(PLACE, "engine", ())]
    assert served.needed_calls(sync, calls, {model: 1}) == calls
    assert [call.method for call in served.needed_calls(sync, calls, {model: 1})] == ["stay"]
    assert served.needed_calls(sync, calls, {model: 2}) == calls
    assert served.versions == {model: 2}
    off = replace(sync, action=MoveEngine(model, "serve", "off", ("weights",)))
    assert ServedVersions(lenders=()).needed_calls(off, calls, {}) == calls
    served.needed_calls(off, calls, {})
    assert served.versions == {}
    assert served.needed_calls(sync, calls, {model: 2}) == calls  # the engine has given them up


def test_a_wait_ends_where_no_step_begins_and_names_the_one_it_is_for(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = driver.plan.schedule.model_copy(update={"timeout": 10.0})
    driver.plan = replace(driver.plan, schedule=short)
    here, place, task_counter = execution(driver.plan), ("main", 0), TaskCounter(tmp_path, "main", 0)
    task_counter.begin()
    task_counter.step()
    now, shown = [0.0], []

    def wait(references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        now[0] += timeout
        if now[0] in (8, 16):  # the second and the third step begin
            task_counter.step()
        return [], [*references]

    steps = here.steps[:3]
    monkeypatch.setattr("rlgraph.runtime.driver.driver.time.monotonic", lambda: now[0])
    monkeypatch.setattr(driver, "watch", lambda running: shown.append(running["main"]))
    driver.cluster.wait = wait  # type: ignore[method-assign]
    driver.flights.pending["reports"] = PendingCall(place, [(here, step) for step in steps], [])
    driver.flights.sent_tasks[place] = 3
    with pytest.raises(RunError, match=rf"step {steps[2].id} of iteration 1 .*\n(.*\n)*.*nothing came for"):
        driver.finish(here)
    assert [step for step, _ in groupby(shown)] == steps and now[0] == 27
    task_counter.close()


def test_the_driver_imports_no_tensors() -> None:
    files = Path(driver_module.__file__).parent.glob("*.py")
    modules = [f"rlgraph.runtime.driver.{path.stem}" for path in files]
    script = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
heavy = {{"torch", "ray", "transformers", "sglang"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
