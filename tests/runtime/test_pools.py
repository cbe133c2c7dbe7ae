"""Plans with two pools, with generation ahead of training, and with parts that leave the device."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ran import assert_gone, metrics
from safetensors.torch import load_file

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.ir.actions import MoveEngine, RunOp, Sync
from rlgraph.ir.plan import Plan, Step
from rlgraph.passes.lower import in_one_process
from rlgraph.planning.simulate import slot_steps
from rlgraph.reports.plan_file import parse
from rlgraph.runtime.cluster.cluster import InlineCluster
from rlgraph.runtime.driver.driver import Driver
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.progress import Progress
from rlgraph.runtime.rundir.rundir import RunDir
from rlgraph.runtime.segments import State, lead, stretch
from rlgraph.runtime.signals import StopSignals
from rlgraph.runtime.training import TrainingRun
from rlgraph.variables import with_values

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")
OPS = HERE / "ones_ops.py"
# with generation ahead, the denominator of the ratio is what the rollout itself computed
AHEAD = ("schedule.buffer={staleness: 1, by: batch}", "update_policy.in.old_logprobs=rollout_logprobs")
pytestmark = pytest.mark.usefixtures("in_demo")


def inline(
    graph: str, *settings: str, run_dir: str, steps: int | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    """Run in this process, each pool on one device; the metrics."""
    run_graph(graph, settings, 1, steps=steps, run_dir=Path(run_dir), resume=resume, inline=True)
    return metrics(run_dir)


def weights(run_dir: str) -> dict[str, Any]:
    return dict(load_file(f"{run_dir}/models/policy/model.safetensors"))


def assert_same_weights(a: str, b: str) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def carry_out(plan: Plan, run_dir: str, steps: int) -> list[dict[str, Any]]:
    """Run a plan as it stands, in this process; the metrics."""
    folder = RunDir.fresh(Path(run_dir), plan.graph)
    plan, cluster = in_one_process(plan), InlineCluster(plan.pools)
    with Progress(plan, steps, folder.path) as progress:
        try:
            TrainingRun(plan, cluster, folder, progress, steps, StopSignals(print), {}).run(resume=False)
        finally:
            cluster.close()
            folder.close()
    return metrics(run_dir)


def with_versions(graph: str) -> str:
    """The graph with a reward that records the version of the weights that generate."""
    edit = f"  - replace: {{rewards: {{op: '{OPS}:ones_served', model: policy, per: 4}}}}\n"
    Path("versions.yaml").write_text(f"graph: versions\nextends: {graph}\nedits:\n{edit}")
    return "versions.yaml"


@pytest.mark.slow
def test_two_pools_give_the_numbers_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # two pools share the cores: with more threads each than the other, one would round differently
    monkeypatch.setattr("rlgraph.runtime.cluster.cluster.threads_each", lambda workers: 1)
    one = inline(ONE, run_dir="one")
    assert inline(TWO, run_dir="two") == one
    assert one[-1]["update_policy/grad_norm"] > 0
    assert_same_weights("one", "two")
    assert "sync policy@v" in Path("two/plan.txt").read_text()


@pytest.mark.slow
def test_generation_uses_weights_as_old_as_the_plan_says() -> None:
    graph, settings = (
        with_versions(TWO),
        (*AHEAD, "schedule={iterations: 6, save_every: 3, buffer: {staleness: 1, by: batch}}"),
    )
    lines = inline(graph, *settings, run_dir="ahead")
    # the pipeline empties at the checkpoint after iteration 3, and with it the lead
    assert [line["served/version"] for line in lines[1:]] == [0, 0, 1, 3, 3, 4]
    lines = inline(
        graph,
        *settings,
        "schedule.buffer={staleness: 2, by: batch}",
        "schedule.save_every=0",
        run_dir="further",
    )
    assert [line["served/version"] for line in lines[1:]] == [0, 0, 0, 1, 2, 3]
    assert Path("ahead/samples/step-000003.jsonl").is_file()


@pytest.mark.slow
def test_a_resume_at_a_boundary_is_the_run_with_that_boundary() -> None:
    settings = (
        *AHEAD,
        "schedule={iterations: 6, save_every: 3, buffer: {staleness: 1, by: batch}}",
        "prompts.batch=5",
    )
    whole = inline(TWO, *settings, run_dir="whole")
    inline(TWO, *settings, run_dir="halves", steps=3)
    halves = inline(TWO, *settings, run_dir="halves", steps=6, resume=True)
    # the first half ended with an evaluation, which the whole did not make
    assert [{n: v for n, v in line.items() if not n.startswith("eval/")} for line in halves[1:]] == [
        {n: v for n, v in line.items() if not n.startswith("eval/")} for line in whole[1:]
    ]
    assert halves[-1]["eval/accuracy"] == whole[-1]["eval/accuracy"]
    assert_same_weights("whole", "halves")


def test_an_interrupt_finishes_what_has_begun() -> None:
    plan = in_one_process(compile_graph(TWO, AHEAD, 1))
    cluster, stop, done, ready = InlineCluster(plan.pools), list[int](), [], with_values(plan)
    try:
        for place in cluster.places:
            cluster.get(cluster.call(place, "setup", ready, f"tcp://127.0.0.1:{free_port(cluster)}", *place))
        driver, state = Driver(plan, cluster, lambda step: None), State(versions={"policy": 0, "ref": 0})
        for execution in stretch(plan, driver, state, 9, lambda: bool(stop), lambda iteration: frozenset()):
            done.append(execution.entry.iteration)
            stop.append(1)
    finally:
        cluster.close()
    assert done == [0, 1]  # the second was begun beside the first
    assert (state.iteration, state.versions["policy"], state.positions["prompts"]) == (2, 2, 14)
    assert not driver.queue.steps and not driver.flights.pending
    # references to columns were let go with their last reader
    assert not execution.refs


def free_port(cluster: InlineCluster) -> int:
    (port,) = cluster.get(cluster.call(cluster.places[0], "free_port"))
    return int(port)


def test_parts_that_leave_the_device_change_no_number() -> None:
    plain = inline(TWO, run_dir="plain", steps=2)
    plan = compile_graph(TWO, (), 1)
    away = {
        "policy.train": ("optimizer", "parameters"),
        "ref.train": ("parameters",),
        "policy.serve": ("weights",),
    }
    moved = replace(plan, away=away, steps=_moving(plan.steps), eval_steps=_moving(plan.eval_steps))
    moved = replace(moved, slot=tuple(step.id for step in moved.steps))
    assert carry_out(moved, "moved", 2) == plain
    assert_same_weights("plain", "moved")
    assert {"load", "offload", "wake", "sleep"} <= {event["cat"] for event in events("moved")}


def _moving(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with every engine brought in right before each that uses it, and put away right after."""
    moved: list[Step] = []
    for step in steps:
        before, after = [], []
        match step.action:
            case Sync(model=model, source=source):
                before = [
                    _move(step, source, MoveEngine(model, "train", "back", ("parameters",))),
                    _move(step, step.pool, MoveEngine(model, "serve", "back", ("weights",))),
                ]
                after = [_move(step, source, MoveEngine(model, "train", "off", ("parameters",)))]
            case RunOp(engine="serve"):
                after = [_move(step, step.pool, MoveEngine(step.model, "serve", "off", ("weights",)))]
            case RunOp(engine="train", updates=updates):
                parts = ("parameters", "optimizer") if updates else ("parameters",)
                before = [_move(step, step.pool, MoveEngine(step.model, "train", "back", parts))]
                after = [_move(step, step.pool, MoveEngine(step.model, "train", "off", parts))]
        moved += [*before, step, *after]
    return tuple(replace(step, id=number) for number, step in enumerate(moved, 1))


def _move(step: Step, pool: str, move: MoveEngine) -> Step:
    node = f"{move.kind}:{step.node}"
    return replace(
        step, node=node, pool=pool, reads=(), writes=(), frees=(), devices=(0,), because="", action=move
    )


def test_inline_runs_each_pool_on_one_device() -> None:
    with pytest.raises(GraphError, match=r"gen\.devices: 2\); 1 is asked for \(--devices, or --inline\)"):
        inline(TWO, "pools.gen.devices=2", run_dir="a")


@pytest.mark.slow
def test_pools_of_unlike_sizes_give_the_same_and_keep_the_plans_order(
    run_on_devices: Callable[..., str],
) -> None:
    alone = inline(TWO, *AHEAD, run_dir="alone")
    # the pool that trains comes second here: its ranks are 1 and 2
    pools = "pools={gen: {devices: 1}, train: {devices: 2}}"
    run_on_devices(TWO, *AHEAD, pools, "--run-dir", "apart")
    for left, right in zip(alone, metrics("apart"), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            # a token at the very edge of the clip may count on either side: one of some 260
            near = 0.005 if name.endswith("clip_fraction") else 1e-4
            assert math.isclose(left[name], right[name], rel_tol=1e-4, abs_tol=near), (name, left, right)
    plan = parse(Path("apart/plan.json").read_text())
    planned = [pair for slot in range(-lead(plan), 4) for pair in slot_steps(plan, slot, 0, 4)]
    for place in (("gen", 0), ("train", 0), ("train", 1)):
        expected = [
            (iteration + 1, step.id)
            for iteration, step in planned
            if (step.pool == place[0] and place[1] in step.devices) or step.source == place[0]
        ]
        assert ran("apart", place) == expected


def ran(run_dir: str, place: tuple[str, int]) -> list[tuple[int, int]]:
    """Iteration and step of what ran on a device, by when it started."""
    own = [e for e in events(run_dir) if (e["pid"], e["tid"]) == place and e["args"]["phase"] == "train"]
    return [(e["args"]["iteration"], e["args"]["step"]) for e in sorted(own, key=lambda e: e["ts"])]


def events(run_dir: str) -> list[dict[str, Any]]:
    return list(json.loads(Path(run_dir, "timeline.json").read_text().rstrip().rstrip(",") + "]"))


def test_a_worker_that_dies_ends_the_run_with_the_plan(run_on_devices: Callable[..., str]) -> None:
    token = uuid.uuid4().hex
    override = f"nodes.rewards={{op: {OPS}:dies}}"
    text = run_on_devices(TWO, override, "--run-dir", "a", expect=1, RLGRAPH_TEST_TOKEN=token)
    details = Path("a/failure.txt").read_text()
    assert any(line.startswith("!") and "run rewards" in line for line in details.splitlines())
    assert "of iteration 2 failed on gen[0]: run rewards" in text
    assert "its worker is gone" in text
    assert [line["step"] for line in metrics("a")] == [0, 1]
    assert_gone(token)
