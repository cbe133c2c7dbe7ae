"""The tutorials' code blocks, run as written."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import registry
from rlgraph.runtime.run import run_graph

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"```\w+ (\S+\.\w+)\n(.*?)```", re.DOTALL)


def write_blocks(tutorial: str) -> None:
    """Write the files of a tutorial here: its blocks that name a file, one after the other."""
    files: dict[str, list[str]] = {}
    for name, body in BLOCK.findall((TUTORIALS / tutorial).read_text()):
        files.setdefault(name, []).append(body)
    for name, bodies in files.items():
        Path(name).write_text(("\n\n" if name.endswith(".py") else "").join(bodies))


def test_your_own_ops(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    write_blocks("your_own_ops.md")
    settings = ["prompts.batch=8", "rollout.n=4", "update_policy.minibatches=2"]
    run_graph("my_grpo.yaml", settings, 1, steps=2, inline=True, run_dir=Path("run"))
    line = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["penalised/penalty"] == pytest.approx(0.02 * line["rollout/length"])
    plan = Path("run/plan.txt").read_text()
    assert "select the rows of penalised that stay" in plan
    kind = json.loads(Path("run/plan.json").read_text())["functions"]["train"]["update_policy"]["hooks"]
    assert kind["loss"]["target"].endswith("my_ops.py:dro")
    run_graph("my_sums.yaml", settings, 1, steps=1, inline=True, run_dir=Path("sums"))
    assert "prompts (my_source.py:sums)" in Path("sums/plan.txt").read_text()


def test_the_mistake_that_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_blocks("your_own_ops.md")
    ops = Path("my_ops.py")
    ops.write_text(ops.read_text().replace('rows="group"', 'rows="groups"'))
    with pytest.raises(GraphError) as caught:
        compile_graph("my_grpo.yaml")
    assert f"```\n{caught.value}\n```" in (TUTORIALS / "your_own_ops.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("cots: 0.02", "did you mean `cost`?"),
        ("cost: -1", "must be at least 0; it is -1"),
        ("cost: 0.02, in: {rewards: rollout_logprobs}", "is float32[samples, tokens]"),
    ],
)
def test_its_mistakes_are_found(
    wrong: str, said: str, demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_blocks("your_own_ops.md")
    graph = Path("my_grpo.yaml")
    graph.write_text(graph.read_text().replace("cost: 0.02", wrong))
    with pytest.raises(GraphError) as caught:
        compile_graph("my_grpo.yaml")
    assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("_tool")
def test_a_tool() -> None:
    settings = ["prompts.batch=4", "rollout.n=4", "update_policy.minibatches=2", "eval.every=0"]
    settings += ["models.policy.path=demo_tool_files/model", "rollout.max_new_tokens=8"]
    run_graph("my_agent.yaml", settings, 1, steps=1, inline=True, run_dir=Path("run"))
    sample = json.loads(next(Path("run/samples").glob("*.jsonl")).read_text().splitlines()[0])
    assert "calculator\nscratchpad\n" in sample["tokens"]  # the demo's template shows names alone
    assert "rollout/called" in Path("run/metrics.jsonl").read_text()
    assert runpy.run_path("my_tools.py")["scratchpad"]("1" * 30, "2*3=", longest=4) == "1111 (2*3=)"


@pytest.mark.parametrize("name", ["a_tool.md", "qwen3_8b.md"])
def test_screens_are_what_the_commands_print(
    name: str, tool_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_tool_files").symlink_to(tool_files / "demo_tool_files")
    write_blocks(name)
    page = (TUTORIALS / name).read_text()
    screens = re.findall(r"```\n\$ rlgraph (.*?)\n(.*?)\n```", page, re.DOTALL)
    assert screens
    for command, screen in screens:
        result = CliRunner().invoke(main, shlex.split(command))
        printed = result.stdout + result.stderr
        for piece in screen.split("...\n"):
            assert piece.strip("\n") in printed, printed
    for graph in Path().glob("*.yaml"):
        assert CliRunner().invoke(main, ["check", str(graph), "--strict"]).exit_code == 0


@pytest.fixture
def _tool(tool_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_tool_files").symlink_to(tool_files / "demo_tool_files")
    write_blocks("a_tool.md")


NEW = ("qae", "topr", "pods")
FEW = ["models.policy.path=demo_files/model", "prompts.batch=8", "update_policy.minibatches=2"]


@pytest.fixture
def _new(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    write_blocks("a_new_algorithm.md")


@pytest.mark.usefixtures("_new")
@pytest.mark.parametrize("name", NEW)
def test_a_new_algorithm_is_twenty_lines_and_runs(name: str) -> None:
    text = Path(f"{name}.py").read_text() + Path(f"{name}.yaml").read_text()
    assert len([line for line in text.splitlines() if line]) <= 20
    run_graph(f"{name}.yaml", [*FEW, "eval.every=0"], 1, steps=2, inline=True, run_dir=Path(name))
    lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2 and "update_policy/loss" in lines[-1]
    plan = json.loads(Path(name, "plan.json").read_text())
    assert f"{name}.py:" in json.dumps(plan["functions"]["train"])


@pytest.mark.usefixtures("_new")
def test_qae_by_hand() -> None:
    op = registry.load(str(Path("qae.py").resolve()) + ":quantile")
    mask = Ragged.of([[False, True]] * 10, torch.bool)
    group = torch.tensor([0] * 5 + [1] * 5)
    rewards = torch.tensor([0.0, 0, 0, 1, 0, 1, 1, 0, 1, 1])  # of the first one is right, of the second four
    out = op.body(rewards, group, mask, k=0.4)
    sigma = 0.2**0.5
    assert out.values[1::2].tolist() == pytest.approx(
        [0, 0, 0, 1 / sigma, 0, 0, 0, -1 / sigma, 0, 0], abs=1e-4
    )
    assert out.values[::2].tolist() == [0] * 10
    # the least reward that a share k does not exceed: of eight, the fourth
    ladder = op.body(torch.arange(8.0), torch.zeros(8, dtype=torch.int64), mask.take(torch.arange(8)), k=0.4)
    assert (ladder.values[1::2] == 0).nonzero().tolist() == [[3]]


@pytest.mark.usefixtures("_new")
def test_topr_by_hand() -> None:
    op = registry.load(str(Path("topr.py").resolve()) + ":topr")
    old = Ragged.of([[0.0, -1.0, -1.0], [0.0, -1.0, -1.0], [0.0, -1.0]])
    now = Ragged.of([[0.0, -1.5, -1.5], [0.0, -1.5, -1.5], [0.0, -0.5]])
    logprobs = now.like(now.values.clone().requires_grad_())
    advantages = Ragged.of([[0.0, 2.0, 2.0], [0.0, -2.0, -2.0], [0.0, -2.0]])
    op.body(logprobs, old, advantages).values.sum().backward()
    tapered = 2 * torch.tensor(-1.0).exp()  # the response is e^-1 times as likely as it was
    expected = [
        0,
        -2,
        -2,
        0,
        float(tapered),
        float(tapered),
        0,
        2,
    ]  # the third has become likelier: at most 1
    assert logprobs.values.grad.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("_new")
def test_pods_by_hand() -> None:
    op = registry.load(str(Path("pods.py").resolve()) + ":most_varied")
    rewards = torch.tensor([0.5, 0.0, 1.0, 0.5, 0.4, 3.0, 3.1, 2.9])
    group = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    assert op.body(rewards, group, keep=2).tolist() == [False, True, True, False, False, False, True, True]
    assert op.body(rewards, group, keep=9).all()
    chosen = op.body(rewards[:5], group[:5], keep=3).nonzero().squeeze(1).tolist()
    best = max(rewards[list(c)].var(correction=0) for c in itertools.combinations(range(5), 3))
    assert len(chosen) == 3 and rewards[chosen].var(correction=0) == pytest.approx(best)
