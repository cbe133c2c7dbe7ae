"""Runs that go on with other settings, or from a checkpoint that is not the last one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ran import metrics, same_weights

from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan
from rlgraph.runtime.export import export
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.changes import changes

ONE = str(Path(__file__).parent / "ones.yaml")
SCHEDULE = "schedule={iterations: 4, save_every: 1, keep: 4}"


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None) -> None: ...


def train(run_dir: str, *settings: str, **options: Any) -> None:
    run_graph(ONE, (SCHEDULE, *settings), 1, run_dir=Path(run_dir), inline=True, **options)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_goes_back_is_the_uninterrupted_one_and_keeps_what_came_after() -> None:
    train("a")
    os.rename("a", "whole")
    train("a")
    train("a", resume_from="step-000002")
    assert metrics("a") == metrics("whole")
    assert same_weights("a", "whole")
    events = json.loads(Path("a/timeline.json").read_text().rstrip().rstrip(",") + "]")
    steps = [(event["args"]["iteration"], event["args"]["phase"], event["args"]["step"]) for event in events]
    assert len(steps) == len({*steps}), "no step comes twice"
    assert [line["after"] for line in lines("a/resumes.jsonl")] == [2]
    assert lines("a/resumes.jsonl")[0]["changed"] == {}
    left = "a/aside/step-000002"
    assert metrics(left) == metrics("whole")
    assert sorted(os.listdir(f"{left}/checkpoints")) == ["step-000003", "step-000004"]
    assert sorted(os.listdir(f"{left}/samples")) == [
        "step-000003.jsonl",
        "step-000004-eval.jsonl",
        "step-000004.jsonl",
    ]
    assert same_weights(left, "whole")
    export(Path(left), Path("out"), checkpoint="step-000003")


@pytest.mark.slow
def test_what_may_change_holds_from_the_checkpoint_on(capsys: pytest.CaptureFixture[str]) -> None:
    train("a", "models.policy.optimizer={lr: 1e-3, schedule: linear, total_steps: 12}")
    changed = (
        "models.policy.optimizer={lr: 5e-4, schedule: linear, total_steps: 12}",
        "update_policy.loss.clip=0.1",
        "schedule={iterations: 5, save_every: 2, keep: 4}",
        "eval.every=1",
    )
    before = metrics("a")
    train("a", *changed, resume_from="step-000002")
    said = capsys.readouterr().out
    assert "note: what came after step-000002 is in a/aside/step-000002: rlgraph report a/aside" in said
    assert "note: changed from here on: models.policy.optimizer.lr: 0.001 -> 0.0005" in said
    assert "resumed after iteration 2" in said
    now = metrics("a")
    assert now[:3] == before[:3]
    assert [line["step"] for line in now] == [0, 1, 2, 3, 4, 5]
    rates = [line["update_policy/lr"] for line in now[1:]]
    told = [line["update_policy/lr"] for line in before[1:]]
    assert rates[:2] == told[:2]
    assert rates[2:4] == pytest.approx([rate / 2 for rate in told[2:]]), "at once, where the schedule stands"
    assert all("eval/accuracy" in line for line in now[3:])
    record = lines("a/resumes.jsonl")[-1]
    assert record["after"] == 2
    assert record["changed"]["models.policy.optimizer.lr"] == [1e-3, 5e-4]
    assert record["changed"]["eval.every"] == [None, 1]
    train("a", *changed, resume=True)
    assert lines("a/resumes.jsonl")[-1] == {**lines("a/resumes.jsonl")[-1], "after": 5, "changed": {}}


@pytest.mark.slow
def test_a_checkpoint_that_is_not_there_is_named_before_anything_is_moved() -> None:
    train("a", steps=2)
    with pytest.raises(RunError) as raised:
        train("a", resume_from="step-00002")
    law = "a has no checkpoint step-00002: it has step-000001, step-000002\n  did you mean `step-000002`?"
    assert str(raised.value) == law
    shard = Path("a/checkpoints/step-000001/policy/shard-00000-of-00001.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"damaged: policy/shard.*\n  choose another with --resume-from: "):
        train("a", resume_from="step-000001")
    assert not Path("a/aside").exists() and not Path("a/resumes.jsonl").exists()


def planned(*settings: str, graph: str = ONE) -> Plan:
    return compile_graph(graph, settings, 1)


REFUSED = [
    ("models.policy.path=elsewhere", "models.policy.path"),
    ("models.policy.optimizer.kind=muon", "models.policy.optimizer.kind"),
    ("models.policy.train.lora={rank: 4}", "models.policy.train.lora"),
    ("models.policy.train.dtype=bfloat16", "models.policy.train.dtype"),
    ("nodes.rewards={op: reward.exact}", "nodes.rewards.op"),
    ("nodes.advantages={op: advantage.rloo}", "nodes.advantages.op"),
    ("seed=7", "seed"),
]


@pytest.mark.parametrize(("setting", "name"), REFUSED)
def test_what_its_checkpoint_contradicts_is_refused_by_name(setting: str, name: str) -> None:
    with pytest.raises(RunError) as raised:
        changes(Path("a"), planned().fields, planned("rollout.n=8", setting))
    law, *said, remedy = str(raised.value).splitlines()
    assert law == "a can't go on with other settings than its checkpoint was made with:"
    assert [line.split(": ")[0].strip() for line in said if name in line] == [name]
    assert not any("rollout.n" in line for line in said), "that may change"
    assert remedy == (
        "  set them back; or begin a run with its weights: rlgraph export a --to DIR, then "
        "models.NAME.path=DIR and another --run-dir"
    )


def test_a_model_or_a_node_that_comes_or_goes_is_refused() -> None:
    with pytest.raises(RunError, match=r"models\.ref: nothing -> .*\n    nodes\.ref_logprobs: nothing ->"):
        changes(Path("a"), planned(graph="dr_grpo").fields, planned(graph="grpo"))


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("prompts.files=[test.parquet]", "nodes.prompts.files"),
        ("models.policy.serve.max_rows=7", "models.policy.serve.max_rows"),
        ("models.policy.train.micro_tokens=99", "models.policy.train.micro_tokens"),
        ("rewards.per=2", "nodes.rewards.per"),
        ("eval.report={ones: rewards}", "eval.report.ones"),
        ("pools.main.devices=1", "pools.main.devices"),
    ],
)
def test_what_no_checkpoint_holds_may_change(setting: str, path: str) -> None:
    assert path in [change.name for change in changes(Path("a"), planned().fields, planned(setting))]


def test_attributes_that_made_what_a_checkpoint_holds_stay() -> None:
    replay = compile_graph("replay", devices=1)
    held = next(node for node, f in replay.functions["train"].items() if f.holds)
    key = next(iter({*replay.functions["train"][held].attributes} & {"capacity", "staleness", "keep"}))
    with pytest.raises(RunError, match=rf"nodes\.{held}\.{key}"):
        changes(Path("a"), replay.fields, compile_graph("replay", [f"{held}.{key}=7"], 1))
