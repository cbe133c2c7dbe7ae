"""A run of a graph with a loop, a tool and a parser of the user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.runtime.demo_tools import make_model
from rlgraph.view.recorded import read_timeline

GRAPH = """\
graph: mine
models:
  policy: {path: model, optimizer: {lr: 1e-3}}
nodes:
  prompts: {op: data.prompts, files: [data.jsonl], batch: 4, tools: "${nodes.rollout.tools}"}
  rollout:
    op: rollout.agent
    model: policy
    n: 2
    max_new_tokens: 60
    loop: {kind: "mine.py:persist", tries: 2}
    parser: {kind: "mine.py:always"}
    tools: {check: {kind: "mine.py:Check", near: 1}, sum: {kind: calculator}}
  old_logprobs: {op: logprobs, model: policy}
  advantages: {op: advantage.grpo, in: {rewards: tool_rewards}}
  update: {op: update.policy, model: policy, loss: {kind: ppo_clip}}
schedule: {iterations: 2}
"""
MINE = '''
from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.ops import prompts, text


class Check:
    """Check an answer."""

    def __init__(self, answer: text[prompts], *, near: int) -> None:
        self.answer, self.near, self.found = int(answer), near, 0

    def execute(self, guess: int) -> str:
        self.found += abs(guess - self.answer) <= self.near
        return f"{guess} for {self.answer}"

    def reward(self) -> float:
        return float(self.found)


def always(text: str) -> list[ToolCall]:
    return [ToolCall("check", {"guess": str(guess)}) for guess in (3, 4)]


async def persist(chat: Chat, question: text[prompts], *, tries: int) -> None:
    for _ in range(tries):
        turn = await chat.turn()
        await chat.use(turn.calls)
'''


@pytest.fixture
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", seed=0)
    ends = json.loads((tmp_path / "model/generation_config.json").read_text())
    ends["eos_token_id"] = [1, *range(8, 288, 8)]
    (tmp_path / "model/generation_config.json").write_text(json.dumps(ends))
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(GRAPH)


@pytest.mark.usefixtures("_mine")
def test_a_graph_with_a_loop_a_tool_and_a_parser_of_ones_own(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", "mine.yaml", "--inline", "--run-dir", "out"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["rollout/tool_errors"] == 0 for line in lines)
    assert all(0 < line["rollout/tool_calls"] <= 4 for line in lines)
    for what in ("generation", "tools"):  # seconds of a conversation
        mean, most = (f"perf/{what}_seconds/{end}" for end in ("mean", "max"))
        assert all(0 < line[mean] <= line[most] < line["time/rollout"] for line in lines)
    assert all(
        line["rollout/turns_min"] <= line["rollout/turns"] <= line["rollout/turns_max"] for line in lines
    )
    events = json.loads((tmp_path / "out/timeline.json").read_text().rstrip().rstrip(",") + "]")
    parts = [event for event in events if "part" in event["args"]]
    assert {event["args"]["iteration"] for event in parts} == {2}, "of iterations with a samples file"
    assert {event["tid"] for event in parts} == {f"0 sample {row}" for row in range(8)}
    (whole,) = (e for e in events if e["name"] == "rollout" and e["args"]["iteration"] == 2)
    for event in parts:
        assert event["name"] in ("generation", "tools")
        assert whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"]
    waited = sum(event["dur"] for event in parts if event["name"] == "generation") / 8e6
    assert waited == pytest.approx(lines[1]["perf/generation_seconds/mean"], abs=1e-4)
    assert len(read_timeline(tmp_path / "out")) == len(events) - len(parts)
    samples = "".join(path.read_text() for path in (tmp_path / "out/samples").iterdir())
    assert "<|system|>check\\nsum\\n<|end|><|user|>" in samples
    assert re.search(r"<\|tool\|>3 for (\d)<\|end\|><\|tool\|>4 for \1<\|end\|><\|assistant\|>", samples)


@pytest.mark.slow
@pytest.mark.usefixtures("_mine")
def test_errors_and_logs_say_which_iteration_node_worker_sample_and_prompt(
    run_on_devices: Callable[..., str],
) -> None:
    broken = MINE.replace("self.found +=", "assert guess != 4 or self.answer % 2; self.found +=")
    fails = (
        "turn = await chat.turn()\n        if question == '6+1=': raise ArithmeticError('the abacus broke')"
    )
    Path("mine.py").write_text(broken.replace("turn = await chat.turn()", fails))
    settings = ("mine.yaml", "prompts.shuffle=false", "--devices", "1", "--run-dir", "out")
    said = run_on_devices(*settings, expect=1)
    assert re.search(r"step \d+ of iteration 2 failed on main\[0\]: run rollout", said)
    # prompt 2 of iteration 2 is the seventh question; its samples are 4 and 5
    assert re.search(r"the abacus broke\nit was in sample [45], which is of prompt 2, in turn 1", said)
    log = Path("out/logs/worker-0.log").read_text()
    where = r"\d\d:\d\d:\d\d,\d+ warning \(rollout of iteration 1 on main\[0\]\)"
    first = r'the first, of sample 2: check\({"guess": "4"}\): AssertionError'
    assert re.search(rf"{where} \d calls of tools raised or were late; {first}", log), log
