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
from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster.cluster import InlineCluster
from rlgraph.runtime.driver import driver as driver_module
from rlgraph.runtime.driver.driver import Driver, PendingCall, StartedStep
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.step_calls import WorkerCall
from rlgraph.runtime.messages.tasks import ColumnRef, Place, Task, TaskCounter
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


def test_a_step_that_waits_for_more_holds_up_none_before_it(driver: Driver) -> None:
    here = execution(driver.plan)
    place = ("main", 0)
    op = next(step for step in here.steps if step.kind == "run" and step.reads)
    move = next(step for step in here.steps if step.kind == "repartition")
    driver.makers = {"column": "its call", "other": "another call"}
    refs = {name: ColumnRef(name, name) for name in ("column", "other", "old")}
    makes = WorkerCall(place, "run", (), (refs["column"],))
    later = {name: WorkerCall(place, "run", (), (ref,)) for name, ref in refs.items()}
    assert driver._follows([], here, later["other"])
    assert driver._follows(
        [(StartedStep(here, move, []), makes)], here, later["other"]
    )  # a move waits for its step
    share = [(StartedStep(here, op, []), makes)]
    assert driver._follows(share, here, later["column"])
    assert driver._follows(share, here, later["old"])  # what has been reported is there
    assert not driver._follows(share, here, later["other"])
    assert not driver._follows(share, execution(driver.plan), later["column"])  # of another iteration


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
    driver.pending["reports"] = PendingCall(place, [(here, step) for step in steps], [])
    driver.sent_tasks[place] = 3
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
