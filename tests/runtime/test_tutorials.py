"""The tutorials' code blocks, run as written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
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
