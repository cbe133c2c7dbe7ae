"""What `rlgraph plan GRAPH --against plan.json` says is different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.ir.actions import Merge, RunOp
from rlgraph.ir.plan import Plan, Step
from rlgraph.ir.prediction import Peak, Prediction
from rlgraph.ir.steps import Version
from rlgraph.printing.plan_diff import _moved, against_text, differences
from share import examples, families

GRPO = compile_graph("grpo", devices=2)


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def after(*overrides: str, devices: int = 2) -> list[str]:
    """What is different about GRPO after overrides, without the indentation."""
    return [line.strip() for line in differences(GRPO, compile_graph("grpo", overrides, devices))]


@pytest.mark.parametrize("name", families())
def test_nothing_is_different_about_the_same_plan(name: str) -> None:
    assert differences(compile_graph(name, devices=3), compile_graph(name, devices=3)) == []


@pytest.mark.parametrize(("old", "new"), [("ppo", "grpo"), ("grpo", "demo")], ids=["steps", "evaluation"])
def test_two_graphs(golden: Callable[[str, str], None], old: str, new: str) -> None:
    golden(f"against/{old}-{new}.txt", against_text(*(compile_graph(name, devices=2) for name in (old, new))))


def test_one_attribute() -> None:
    lines = ["in every iteration", "changed  step 4, rollout", "temperature: 1.0 -> 0.5"]
    assert after("rollout.temperature=0.5")[:3] == lines
    assert after("rollout.n=4")[-1] == "domain   samples: 8 for each of prompts -> 4 for each of prompts"
    assert "loss.clip: 0.2 -> 0.3" in after("update_policy.loss.clip=0.3")


def test_models_schedule_and_notes() -> None:
    assert after("schedule.iterations=3") == ["schedule.iterations: 500 -> 3"]
    assert after("models.policy.path=Qwen/Qwen2.5-3B", "models.ref.path=Qwen/Qwen3-4B") == [
        "model policy: path: Qwen/Qwen2.5-0.5B-Instruct -> Qwen/Qwen2.5-3B",
        "model ref: path: Qwen/Qwen2.5-0.5B-Instruct -> Qwen/Qwen3-4B",
    ]
    assert any(
        line.startswith("note, new: left out `old_logprobs`") for line in after("update_policy.minibatches=1")
    )
    assert "still open, no longer: nodes.prompts.files" in after("prompts.files=[a.jsonl]")


def test_more_devices_are_said_once() -> None:
    assert after(devices=3) == ["pools.main: 2 -> 3"]
    lines = after(devices=1)
    assert lines[0] == "pools.main: 2 -> 1"
    assert "removed  step 2, repartition prompt onto main[0-1]" in lines


def step(name: str, **changes: object) -> Plan:
    """GRPO's plan with one step changed."""
    changed = {s.node: s for s in GRPO.steps}[name]
    return replace(GRPO, steps=tuple(replace(s, **changes) if s is changed else s for s in GRPO.steps))  # type: ignore[arg-type]


def test_every_part_of_a_step_has_its_words() -> None:
    def said(**changes: object) -> list[str]:
        return [line.strip() for line in differences(GRPO, step("rewards", **changes))[2:]]

    assert said(reads=("responses",)) == ["no longer reads answer*samples"]
    assert said(writes=("rewards", "scores")) == ["writes scores as well"]
    assert said(frees=("rewards",)) == ["frees rewards, no longer responses, answer*samples"]
    assert said(devices=(0,)) == ["runs on main[0], no longer on main[0-1]"]
    assert said(pool="other", devices=(1,)) == ["runs on other[1], no longer on main[0-1]"]
    assert said(layout="one")[0] == "layout: even -> one"
    rewards = next(s for s in GRPO.steps if s.node == "rewards")
    reading = replace(run_of(rewards), models={"ref": Version(0)})
    assert said(action=reading) == ["models.ref: nothing -> v"]
    assert said(after=()) == ["no longer waits for answer*samples, rollout"]
    assert said(because="so", id=7) == []


def test_steps_that_move() -> None:
    order = [s.node for s in GRPO.steps]
    assert order.index("old_logprobs") + 1 == order.index("ref_logprobs")
    steps = list(GRPO.steps)
    i = order.index("old_logprobs")
    steps[i], steps[i + 1] = replace(steps[i + 1], id=i + 1), replace(steps[i], id=i + 2)
    lines = differences(GRPO, replace(GRPO, steps=tuple(steps)))
    assert [line.strip() for line in lines] == [
        "in every iteration",
        "moved    ref_logprobs: was after old_logprobs, is after repartition:old_logprobs",
    ]


@examples(100)
@given(order=st.permutations(range(7)))
def test_the_others_keep_their_order_and_no_fewer_could_move(order: list[int]) -> None:
    old, new = [str(n) for n in range(7)], [str(n) for n in order]
    moved = _moved(old, new)
    rest = [name for name in new if name not in moved]
    assert rest == sorted(rest)
    best = [1] * 7  # longest increasing run that ends at each place, the plain way
    for i in range(7):
        best[i] = 1 + max((best[j] for j in range(i) if order[j] < order[i]), default=0)
    assert len(rest) == max(best)


def run_of(step: Step) -> RunOp:
    """The op that a step runs; of another step, one that would take its place."""
    return step.run or RunOp("some_op", {})


CHANGES: list[Callable[[Step], dict[str, object]]] = [
    lambda s: {"reads": (*s.reads, "x")},
    lambda s: {"writes": (*s.writes, "x")},
    lambda s: {"frees": s.frees[1:] or ("x",)},
    lambda s: {"devices": (*s.devices, 2)},
    lambda s: {"layout": s.layout + "/2"},
    lambda s: {"action": Merge()},
    lambda s: {"action": replace(run_of(s), op="x")},
    lambda s: {"action": replace(run_of(s), models={**run_of(s).models, "x": Version(0)})},
    lambda s: {"action": replace(run_of(s), filters=not run_of(s).filters)},
    lambda s: {"action": replace(run_of(s), updates=not run_of(s).updates)},
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_any_step_is_passed_over(change: Callable[[Step], dict[str, object]]) -> None:
    for number, old in enumerate(GRPO.steps):
        new = replace(old, **change(old))  # type: ignore[arg-type]
        steps = (*GRPO.steps[:number], new, *GRPO.steps[number + 1 :])
        assert differences(GRPO, replace(GRPO, steps=steps))
        assert differences(replace(GRPO, steps=steps), GRPO)


@pytest.mark.parametrize(
    "change",
    [
        {"graph": "x"},
        {"seed": 1},
        {"eval_every": 3},
        {"report": {"a": "rewards"}},
        {"digest": "x"},
        {"notes": ("x",)},
        {"open_values": ()},
        {"models": {}},
        {"eval_steps": GRPO.steps},
    ],
)
def test_no_other_change_is_passed_over(change: dict[str, object]) -> None:
    assert differences(GRPO, replace(GRPO, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"about": "x"}, {"origin": None}])
def test_what_decides_nothing_is(change: dict[str, object]) -> None:
    assert differences(GRPO, replace(GRPO, **change)) == []  # type: ignore[arg-type]


def predicted(seconds: float) -> Plan:
    steps = tuple(replace(step, seconds=(seconds, 2 * seconds), bytes=8) for step in GRPO.steps)
    peak = {"main": Peak(1, 2, "rollout", {"weights": 1})}
    prediction = Prediction("h100-8", (seconds, 2 * seconds), {}, (), {})
    return replace(GRPO, steps=steps, peak=peak, predicted=prediction)


def test_predictions_are_compared_where_both_plans_have_them() -> None:
    assert differences(GRPO, predicted(1.0)) == differences(predicted(1.0), GRPO) == []
    assert differences(predicted(1.0), predicted(1.0)) == []
    lines = [line.strip() for line in differences(predicted(1.0), predicted(3.0))]
    assert lines[:4] == [
        "predicted.seconds: [1.0, 2.0] -> [3.0, 6.0]",
        "in every iteration",
        "changed  step 1, prompts",
        "seconds: [1.0, 2.0] -> [3.0, 6.0]",
    ]


def test_exit_codes(tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    assert call("plan", "grpo", "--devices", "3", "-o", saved).exit_code == 0
    same = call("plan", "grpo", "--against", saved)  # for as many devices as the saved one
    assert (same.exit_code, same.stdout, same.stderr) == (0, "", "")
    other = call("plan", "grpo", "schedule.iterations=3", "--against", saved)
    assert (other.exit_code, other.stdout) == (1, "schedule.iterations: 500 -> 3\n")
    assert call("plan", "grpo", "--devices", "4", "--against", saved).stdout == "pools.main: 3 -> 4\n"
    assert call("plan", saved, "--against", saved).exit_code == 0
    wrong = call("plan", "grpoo", "--against", saved)
    assert wrong.exit_code == 1 and not wrong.stdout and "did you mean `grpo`?" in wrong.stderr


@pytest.mark.parametrize("args", [("--format", "json"), ("-o", "x.json")])
def test_differences_are_words(
    tmp_path: Path, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call("plan", "grpo", "-o", "plan.json")
    assert call("plan", "grpo", "--against", "plan.json", *args).exit_code == 2
    assert call("plan", "grpo", "seed=1", "--against", "plan.json", "-o", "x.txt").exit_code == 1
    assert Path("x.txt").read_text() == "seed: 0 -> 1\n"
