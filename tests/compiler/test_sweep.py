"""Which runs a sweep has, its table and its page; tests/runtime/test_sweep_run.py runs one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.sweep.combinations import combinations, shortened
from rlgraph.sweep.list_fields import list_depth
from rlgraph.sweep.results import results

FILES = "prompts.files=[a.jsonl]"


def test_a_list_is_swept_where_the_graph_takes_one_value() -> None:
    runs = combinations("grpo", [FILES, "update_policy.loss.clip=[0.1,0.2]", "seed=[0,1]"])
    assert [run.name for run in runs] == [
        f"clip={clip},seed={seed}" for clip in ("0.1", "0.2") for seed in (0, 1)
    ]
    assert runs[1].overrides == [FILES, "update_policy.loss.clip=0.1", "seed=1"]


def test_where_it_takes_a_list_a_list_of_lists_is_swept() -> None:
    runs = combinations("grpo", ["prompts.files=[[a.jsonl],[b.jsonl,c.jsonl]]"])
    assert [run.overrides for run in runs] == [[FILES], ["prompts.files=[b.jsonl, c.jsonl]"]]


def test_sections_and_names_are_swept_too() -> None:
    runs = combinations("grpo", ["models.policy.train=[{recompute: true},{recompute: false}]"])
    assert [run.values["models.policy.train"] for run in runs] == ["{recompute: true}", "{recompute: false}"]
    assert len(combinations("grpo", ["update_policy.loss.kind=[ppo_clip,gspo,cispo]"])) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([FILES], "nothing is swept: no setting has several values"),
        (["seed=[]"], "`seed` is a whole number, 0 or more"),
        (["rollout.m=[1,2]"], "`rollout` has no attribute `m`"),
        (["rollout.n=[4,-1]"], "`rollout.n` must be at least 1; it is -1"),
        (["update_policy.loss.kind=[ppo_clip,gsp]"], "did you mean `gspo`?"),
    ],
)
def test_all_is_checked_before_anything_runs(settings: list[str], said: str) -> None:
    with pytest.raises(GraphError) as caught:
        combinations("grpo", settings)
    assert said in str(caught.value)


def test_the_command_says_so_and_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["sweep", "grpo", "rollout.n=[4,-1]"])
    assert result.exit_code == 1 and "it is -1" in result.output
    assert not [*tmp_path.iterdir()]


def test_names_are_as_short_as_tells_them_apart() -> None:
    assert shortened(["a.n", "b.n", "b.clip"]) == ["a.n", "b.n", "clip"]
    assert shortened(["n", "b.n"]) == ["n", "b.n"]


def test_the_table_and_the_page(tmp_path: Path) -> None:
    runs = combinations("grpo", [FILES, "update_policy.loss.clip=[0.1,0.2]", "seed=[0,1]"])
    reached = {"clip=0.1,seed=0": 0.5, "clip=0.1,seed=1": 0.7, "clip=0.2,seed=0": 0.4}
    for name, value in reached.items():
        (tmp_path / name).mkdir()
        lines = [
            {"step": 0, "eval/accuracy": 0.3},
            {"step": 1, "reward/mean": 0.2},
            {"step": 2, "eval/accuracy": value},
        ]
        text = "".join(json.dumps(line | {"eval/accuracy/mean": 1.0}) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    found = results("grpo", runs, tmp_path)
    assert [line.split() for line in found.text().splitlines()] == [
        ["clip", "runs", "eval/accuracy"],
        ["0.1", "2", "0.600", "±", "0.141", "*"],
        ["0.2", "1", "0.400"],
    ]
    found.save(tmp_path)
    assert (tmp_path / "table.csv").read_text().splitlines()[1:] == [
        '"clip=0.1,seed=0",0.1,0,0.5',
        '"clip=0.1,seed=1",0.1,1,0.7',
        '"clip=0.2,seed=0",0.2,0,0.4',
        '"clip=0.2,seed=1",0.2,1,',
    ]
    page = (tmp_path / "sweep.html").read_text()
    data = re.search(r'<script type="application/json" id="contents">(.*?)</script>', page)
    assert data
    shown = json.loads(data[1])
    assert [(line["name"], len(line["runs"])) for line in shown["curves"]] == [
        ("clip=0.1", 2),
        ("clip=0.2", 1),
    ]
    assert shown["curves"][0]["runs"][1]["metrics"]["eval/accuracy"] == [0.3, None, 0.7]
    assert "reward/mean" in shown["curves"][0]["runs"][0]["metrics"], (
        "every metric is there, not the compared alone"
    )
    assert shown["headline"][1] == ["highest eval/accuracy", "0.600 with clip=0.1"]
    assert [row["highest"] for row in shown["rows"]] == [[2], []]
    assert dict(shown["runs"])[str(tmp_path / "clip=0.2,seed=1")] == "has not begun"


def test_a_sweep_without_an_evaluation_compares_the_reward(tmp_path: Path) -> None:
    runs = combinations("grpo", [FILES, "seed=[0,1]"])
    assert results("grpo", runs, tmp_path).text().split() == ["runs", "0"]
    (tmp_path / "seed=0").mkdir()
    (tmp_path / "seed=0" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n')
    found = results("grpo", runs, tmp_path)
    assert found.text().split() == ["runs", "reward/mean", "1", "0.250", "*"]
    assert found.summary(runs[0]) == "reward/mean 0.250"


OPS = """from rlgraph.ops import float32, op, samples, text


@op()
def marked(responses: text[samples], *, words: list[str] = [], bonus: float = 1.0) -> float32[samples]: ...
"""


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("seed", 0),
        ("use", 1),
        ("rollout.n", 0),
        ("rollout.stop", 1),
        ("prompts.files", 1),
        ("prompts.where.level", 1),
        ("update_policy.rows", 1),
        ("update_policy.rows.is", 1),
        ("update_policy.loss", 0),
        ("update_policy.loss.clip", 0),
        ("update_policy.loss.clip.linear", 1),
        ("models.policy.train", 0),
        ("models.policy.train.lora.targets", 1),
        ("models.policy.optimizer.betas", 1),
        ("models.policy.serve.sglang.options.anything", 0),
        ("prompts.template_options.anything", math.inf),
        ("schedule.epochs.prompts", 0),
        ("eval.report.accuracy", 0),
        ("eval.nodes.rollout.stop", 1),
        ("pools.main.devices", 0),
        ("mine.words", 1),
        ("mine.bonus", 0),
        ("rollout.nothing", 0),
    ],
)
def test_lists_are_as_deep_as_what_the_graph_declares(name: str, depth: float, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(OPS)
    graph = tmp_path / "mine.yaml"
    graph.write_text("graph: mine\nextends: grpo\nedits: [{add: {mine: {op: 'ops.py:marked'}}}]\n")
    assert list_depth(compose(str(graph)), name) == depth


def test_values_of_a_wrong_type_are_not_taken_for_a_sweep() -> None:
    with pytest.raises(GraphError, match=r"prompts.files"):
        combinations("grpo", ["prompts.files=[1,2]"])
