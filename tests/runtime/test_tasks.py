"""Columns that stay with the worker that made them, and several tasks in a call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster.cluster import InlineCluster
from rlgraph.runtime.columns.chunk import Chunk
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.driver.flights import CallsInFlight, PendingCall
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.rows import staying
from rlgraph.runtime.messages.tasks import STORE, ColumnRef, Task, TaskCounter
from rlgraph.runtime.segments import State, stretch
from rlgraph.runtime.worker.worker import Worker
from rlgraph.variables import with_values

ONE = str(Path(__file__).parent / "ones.yaml")


@pytest.fixture
def plan(demo_files: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
    return compile_graph(ONE, (), 1)


def test_what_other_workers_read_does_not_stay(plan: Plan) -> None:
    assert plan.pools == {"main": 1}
    steps = compile_graph(ONE, (), 2).steps
    stays, moves = staying(steps), [step for step in steps if step.kind == "repartition"]
    assert {"old_logprobs"} <= stays
    assert moves and not stays & {column for step in moves for column in step.reads}


def test_what_stays_is_dropped_with_its_last_reader(plan: Plan) -> None:
    cluster = InlineCluster(plan.pools)
    (worker,) = cluster.workers.values()
    kept = []
    perform = worker._perform

    def watched(task: Task, parts: list[Chunk]) -> object:
        made = perform(task, parts)
        kept.append(len(worker.store.resident))
        return made

    worker._perform = watched  # type: ignore[assignment]
    try:
        for place in cluster.places:
            (port,) = cluster.get(cluster.call(place, "free_port"))
            cluster.get(cluster.call(place, "setup", with_values(plan), f"tcp://127.0.0.1:{port}", *place))
        driver, state = Driver(plan, cluster, lambda step: None), State(versions={"policy": 0, "ref": 0})
        executions = [*stretch(plan, driver, state, 2, lambda: False, lambda iteration: frozenset())]
    finally:
        cluster.close()
    assert len(executions) == 2
    assert max(kept) > 2
    assert not worker.store.resident


def test_tasks_hand_parts_to_each_other_and_return_the_rest() -> None:
    worker = Worker()
    part = Chunk(np.arange(3))
    twice = Task("repeat", (2,), (ColumnRef("given", 0),), outputs=(ColumnRef("a"),))
    thrice = Task("repeat", (3,), (ColumnRef("a"),), outputs=(ColumnRef("", STORE),), drops=("a",))
    reports, returned = worker.perform([twice, thrice], (), part)
    assert len(reports) == 2
    assert returned.values.tolist() == np.repeat(np.arange(3), 6).tolist()
    assert not worker.store.resident


def test_an_error_says_which_task_it_is_of() -> None:
    worker = Worker()
    tasks = [
        Task("repeat", (1,), (ColumnRef("given", 0),), outputs=(ColumnRef("a"),)),
        Task("select", ([7],), (ColumnRef("a"),), outputs=(ColumnRef("", STORE),)),
    ]
    with pytest.raises(IndexError) as raised:
        worker.perform(tasks, (), Chunk(np.arange(3)))
    assert raised.value.task == 1  # type: ignore[attr-defined]


def test_a_counter_says_how_many_tasks_were_begun(tmp_path: Path) -> None:
    task_counter = TaskCounter(tmp_path, "main", 1)
    assert TaskCounter(tmp_path, "main", 1).last() == 0
    task_counter.begin()
    for count in range(1, 400):
        task_counter.step()
        assert TaskCounter(tmp_path, "main", 1).last() == count
    task_counter.close()
    again = TaskCounter(tmp_path, "main", 1)  # of a worker that was started anew
    again.begin()
    assert TaskCounter(tmp_path, "main", 1).last() == 0
    again.close()


def test_a_lost_worker_is_put_down_to_the_task_that_it_had_begun(plan: Plan, tmp_path: Path) -> None:
    """Calls report late: those that are done may be pending still."""
    flights = CallsInFlight(tmp_path)
    execution, steps = Execution(plan, "train", Entry(0, {}), {}), plan.steps
    here, there, task_counter = ("main", 0), ("main", 1), TaskCounter(tmp_path, "main", 0)
    task_counter.begin()
    flights.sent_tasks.update({here: 7, there: 2})
    for call, (place, share) in enumerate([(here, steps[:2]), (there, steps[3:5]), (here, steps[2:5])]):
        flights.pending[call] = PendingCall(place, [(execution, step) for step in share], [])
    for begun, at in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (6, 3), (7, 4)]:
        task_counter.count = begun - 1
        task_counter.step()
        assert flights.step_at(here) == (execution, steps[at])
    task_counter.close()
