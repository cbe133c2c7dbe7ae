"""Rewards that run beside the devices, as tasks of Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ran import metrics

from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.ops import TrainEngine, float32, int64, samples, tokens
from rlgraph.ops.declare import op
from rlgraph.ops.op_error import OpError
from rlgraph.ops.signature import signature
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.run import run_graph
from rlgraph.view.recorded import read_timeline
from rlgraph.view.trace import trace

HERE = Path(__file__).parent
ONES, OPS = str(HERE / "ones.yaml"), str(HERE / "beside_ops.py")
MATH = "rewards={op: reward.math}"
pytestmark = pytest.mark.usefixtures("in_demo")


def run(
    run_dir: str, *settings: str, devices: int = 1, graph: str = ONES, **given: Any
) -> list[dict[str, Any]]:
    """Two iterations; the metrics, but times."""
    run_graph(graph, settings, devices, steps=2, run_dir=Path(run_dir), **given)
    return metrics(run_dir)


def graph(name: str, rewards: str) -> str:
    """The graph with other rewards, and what multiplies them behind a step that reads none of them."""
    made = f"graph: {name}\nextends: {ONES}\nedits:\n"
    made += f"  - remove: [eval]\n  - replace: {{rewards: {rewards}}}\n"
    made += f"  - add:\n      mark: {{op: '{OPS}:marked', file: {Path('mark').resolve()}}}\n"
    made += f"      both: {{op: '{OPS}:both'}}\n  - set: {{advantages.in.rewards: both}}\n"
    Path(f"{name}.yaml").write_text(made)
    return f"{name}.yaml"


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_reward_runs_while_devices_go_on() -> None:
    """It waits for what a later step makes: one behind the other, they would never end."""
    waits = graph("waits", f"{{op: '{OPS}:patient', until: {Path('mark').resolve()}}}")
    found = run("a", graph=waits, devices=2)
    Path("mark").touch()
    assert [line["reward/mean"] for line in found] == pytest.approx(
        [line["reward/mean"] for line in run("b", graph=waits, inline=True)], abs=1e-5
    )
    lanes = {(bar.pool, bar.device) for bar in read_timeline(Path("a")) if bar.step == number("waits.yaml")}
    assert lanes == {("main", "0 beside"), ("main", "1 beside")}
    plan = compile_graph("waits.yaml", (), 2)
    events = json.loads(trace(plan, read_timeline(Path("a")), []))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] >= 1000}
    assert names | {2: "device 0 beside", 3: "device 1 beside"} == names


def number(path: str) -> int:
    return next(step.id for step in compile_graph(path, (), 2).steps if step.node == "rewards")


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_it_gives_what_it_gives_in_the_worker() -> None:
    assert run("beside", MATH) == run("inline", MATH, inline=True)
    assert [*Path("beside/logs").glob("beside-*.log")] and not [*Path("inline/logs").glob("beside-*.log")]


@pytest.mark.nightly
def test_one_whose_process_ends_is_done_again() -> None:
    mortal = graph("mortal", f"{{op: '{OPS}:mortal', flag: {Path('flag').resolve()}}}")
    found = run("a", graph=mortal)
    assert Path("flag").exists()
    assert found == run("b", graph=mortal, inline=True)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_one_that_raises_is_named() -> None:
    with pytest.raises(RunError, match=r"(?s)no reward for 28 samples.*run rewards "):
        run("a", graph=graph("wrong", f"{{op: '{OPS}:wrong'}}"))
    details = Path("a/failure.txt").read_text()
    (mark,) = [line for line in details.splitlines() if line.startswith("!")]
    assert "rewards" in mark


def test_what_it_reads_and_writes_stays_with_no_worker() -> None:
    plan = compile_graph(ONES, [MATH], 1)
    execution = Execution(plan, "train", Entry(0, {}), {})
    (step,) = [step for step in plan.steps if step.id in execution.off_worker]
    assert step.node == "rewards" and not execution.ref_table.staying & {*step.reads, *step.writes}
    inside = Execution(compile_graph(ONES, (), 1), "train", Entry(0, {}), {})
    assert not inside.off_worker and inside.ref_table.staying & {"rewards"}


def test_what_needs_a_model_is_refused() -> None:
    @op(beside=True)
    def scored(model: TrainEngine, tokens: int64[samples, tokens]) -> float32[samples]: ...

    with pytest.raises(OpError, match="reads columns, and no model"):
        signature("scored", scored)
