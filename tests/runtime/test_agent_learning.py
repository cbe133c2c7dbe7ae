"""The shipped tool graphs run, and a policy learns to call a tool that it can't do without.

The task is a small one of the kind of calculator_tool's, which takes minutes: each question has a digit for
an answer, drawn without a rule, and only the tool knows it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.runtime.demo import questions
from rlgraph.runtime.demo_tools import make_model, tool_call, traces

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
TOOL = '''
from rlgraph.ops import prompts, text


def calculator(answer: text[prompts]) -> str:
    """Tell the answer."""
    return answer
'''


def run(*arguments: str) -> list[dict[str, float]]:
    """The lines that a run wrote."""
    result = CliRunner().invoke(main, ["run", *arguments, "--inline"])
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    folder = Path(arguments[arguments.index("--run-dir") + 1])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(name: str, rows: list[dict[str, object]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_traces_are_turns_behind_what_came_before_them() -> None:
    train, test = questions(0, "*")
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    rows = [*traces(train, 0)]
    later = [row for row in rows if len(row["question"]) == 3]
    first = [row for row in rows if len(row["question"]) == 1]
    called = [row for row in first if "<tool_call>" in row["answer"]]
    assert len(first) == len(train) and len(called) == len(later)
    assert 0.2 < len(called) / len(first) < 0.3
    for row in first:
        a, b = row["question"][0]["content"].rstrip("=").split("*")
        assert row["answer"] in (str(int(a) * int(b)), tool_call("calculator", expression=f"{a}*{b}"))


@pytest.mark.nightly
def test_a_policy_learns_to_call_the_tool_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("demo_tool_files/model"), seed=0)
    Path("tool.py").write_text(TOOL)
    drawn, examples, asked = random.Random(0), [], []
    for number in range(400):
        question, answer = f"{number}?", str(drawn.randrange(10))
        asked.append({"question": question, "answer": answer})
        turns = [{"role": "user", "content": question}]
        if number % 4:
            examples.append({"question": turns, "answer": str(drawn.randrange(10))})  # a guess
            continue
        call = tool_call("calculator")
        heard = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
        answered = {"question": [*turns, *heard], "answer": answer}
        examples += [{"question": turns, "answer": call}, *[answered] * 4]
    write("traces.jsonl", examples)
    write("train.jsonl", asked[:300])
    write("test.jsonl", asked[300:])
    shared = [
        "eval.nodes.prompts.files=[test.jsonl]",
        "schedule.save_every=1000",
    ]
    taught = run(
        "calculator_sft",
        *shared,
        "examples.files=[traces.jsonl]",
        "examples.batch=48",
        "eval.nodes.rollout.tools.calculator.kind=tool.py:calculator",
        "schedule.iterations=60",
        "--run-dir",
        "runs/calculator_sft",
    )
    learned = run(
        "calculator_tool",
        *shared,
        "prompts.files=[train.jsonl]",
        "prompts.batch=16",
        "rollout.tools.calculator.kind=tool.py:calculator",
        "schedule.iterations=14",
        "--run-dir",
        "runs/calculator_tool",
    )
    before, after = learned[0], learned[-1]
    assert taught[-1]["eval/accuracy"] < 0.8 and before["eval/tool_calls/called"] < 0.8
    assert after["eval/tool_calls/called"] > 0.95
    assert after["eval/accuracy"] > before["eval/accuracy"] + 0.2


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the GSM8K questions at {DATA}")
def test_the_search_tool_runs_on_a_corpus_of_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem of GSM8K is a passage with its solution; the policy is asked what the solution is."""
    monkeypatch.chdir(tmp_path)
    problems = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()[:1000]]
    write("corpus.jsonl", [{"text": f"{row['question']} {row['answer']}"} for row in problems])
    asked = [
        {"question": row["question"][:60], "golden_answers": [row["answer"].rpartition(" ")[2]]}
        for row in problems
    ]
    write("train.jsonl", asked[:64])
    make_model(Path("model"), seed=0)
    Path("always.py").write_text(
        "from rlgraph.nodes.agent.parsers import ToolCall\n\n\n"
        "def always(text: str) -> list[ToolCall]:\n"
        '    return [ToolCall("search", {"query": "How many clips did Natalia sell"})]\n'
    )
    config = json.loads(Path("model/generation_config.json").read_text())
    Path("model/generation_config.json").write_text(
        json.dumps({**config, "eos_token_id": [*range(1, 288, 8)]})
    )
    lines = run(
        "search_tool",
        "models.policy.path=model",
        "prompts.files=[train.jsonl]",
        "prompts.batch=4",
        "rollout.tools.search.corpus=corpus.jsonl",
        "rollout.tools.search.top=2",
        "rollout.max_new_tokens=700",
        "rollout.max_result_tokens=200",
        "rollout.parser={kind: always.py:always}",
        "rollout.n=2",
        "schedule.iterations=2",
        "--run-dir",
        "out",
    )
    assert len(lines) == 2
    assert all(line["rollout/called"] == 1 and line["rollout/tool_errors"] == 0 for line in lines)
    samples = "".join(path.read_text() for path in Path("out/samples").iterdir())
    assert "<|system|>search\\n<|end|><|user|>" in samples
    assert "<|tool|>[1] Natalia sold clips to 48 of her friends in April" in samples
