"""A run whose data have columns of their own: a tool, a loop, a reward and a filter read them by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.nodes.data.recorded import load, wanted_types
from rlgraph.nodes.support.record_file import about, steps_of
from rlgraph.runtime.demo_tools import make_model

GRAPH = """\
graph: mine
models:
  policy: {path: model, optimizer: {lr: 1e-3}}
nodes:
  prompts:
    op: data.prompts
    files: [train.parquet]
    question: prompt
    answer: reward_model.ground_truth
    batch: 4
    tools: "${nodes.rollout.tools}"
    columns:
      tests: {from: extra_info.tests, type: json}
      level: {from: extra_info.level, type: float32}
      tries: {from: extra_info.tries, type: int64}
      messages: {from: prompt, type: json}
  rollout:
    op: rollout.agent
    model: policy
    n: 2
    max_new_tokens: 60
    loop: {kind: "mine.py:persist"}
    parser: {kind: "mine.py:always"}
    tools: {check: {kind: "mine.py:Check"}}
  rewards: {op: "mine.py:told"}
  easy: {op: "mine.py:easy"}
  old_logprobs: {op: logprobs, model: policy}
  advantages: {op: advantage.grpo}
  update: {op: update.policy, model: policy, rows: easy, loss: {kind: ppo_clip}}
schedule: {iterations: 2, record_every: 1}
"""
MINE = '''
from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.ops import Context, boolean, float32, int64, json, op, prompts, samples, text


class Check:
    """Check an answer."""

    def __init__(self, tests: json[prompts]) -> None:
        self.tests = tests

    def execute(self, guess: int) -> str:
        return f"test {self.tests['outputs'][guess]}"


def always(text: str) -> list[ToolCall]:
    return [ToolCall("check", {"guess": "1"})]


async def persist(chat: Chat, tries: int64[prompts]) -> None:
    for _ in range(tries):
        turn = await chat.turn()
        await chat.use(turn.calls)


@op()
def told(
    ctx: Context,
    tests: json[samples],
    answer: text[samples],
    level: float32[samples],
    messages: json[samples],
    turns: int64[samples],
    tries: int64[samples],
) -> float32[samples]:
    """The level of the row of a sample, if all of its columns are of the same row."""
    import torch

    assert [one["outputs"] for one in tests] == [[f"a{own}", f"b{own}"] for own in answer]
    assert [talk[-1]["content"] for talk in messages] == [f"{own}+0=" for own in answer]
    assert bool((turns <= tries).all())
    ctx.record("seen", level)
    return torch.tensor([float(row % 2) for row in ctx.rows])


@op(filters=True)
def easy(level: float32[samples], turns: int64[samples]) -> boolean[samples]:
    """Whether the row of a sample is easy, and it has a turn."""
    return (level < 100) & (turns > 0)
'''


def rows() -> list[dict[str, Any]]:
    """Rows as verl's scripts write them."""
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n}+0="}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {
                "level": n / 2,
                "tries": 1 + n % 2,
                "tests": {"inputs": ["1", "2"], "outputs": [f"a{n}", f"b{n}"]},
            },
        }
        for n in range(8)
    ]


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", seed=0)
    ends = json.loads((tmp_path / "model/generation_config.json").read_text())
    ends["eos_token_id"] = [1, *range(8, 288, 8)]
    (tmp_path / "model/generation_config.json").write_text(json.dumps(ends))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows()), "train.parquet")
    Path("mine.py").write_text(MINE)
    Path("mine.yaml").write_text(GRAPH)
    return "mine.yaml"


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_columns_of_the_data_reach_whoever_names_them(graph: str) -> None:
    ran(graph, "--inline", "--run-dir", "out")
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    # both batches are one epoch of all rows
    assert sum(line["rewards/seen"] for line in lines) / 2 == pytest.approx(sum(n / 2 for n in range(8)) / 8)
    first = json.loads(next(Path("out/samples").iterdir()).read_text().splitlines()[0])
    assert first["tests"]["outputs"] == [f"a{first['answer']}", f"b{first['answer']}"]
    assert "<|tool|>test b" in first["tokens"] and first["level"] == int(first["answer"]) / 2

    folder = steps_of(Path("out"))[1]
    assert about(folder / "prompts.parquet").types["tests"] == "json[prompts]"
    again = load(folder, wanted_types({"tests": "json[samples]", "answer": "text[samples]"}))
    assert [one["outputs"][0] for one in again["tests"]] == [f"a{own}" for own in again["answer"]]

    result = CliRunner().invoke(main, ["replay", "out", "--from", "rewards", "--step", "1"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (
            "extra_info.levl",
            "train.parquet:1: has no column 'extra_info.levl', only 'prompt', 'reward_model', 'ex",
        ),
        ("extra_info.levl", "did you mean `extra_info.level`?"),
        (
            "data_source",
            "train.parquet:1: 'data_source' is no float32, but 'sums'",
        ),
    ],
)
def test_a_path_that_the_files_lack_is_said_before_the_run(graph: str, field: str, said: str) -> None:
    override = f"nodes.prompts.columns.level.from={field}"
    result = CliRunner().invoke(main, ["run", graph, override, "--inline", "--run-dir", "out"])
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
