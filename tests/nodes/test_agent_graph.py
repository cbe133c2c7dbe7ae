"""Agents in graphs: what `check` says of tools, loops and parsers, and which columns they read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph

GRAPH = """\
graph: mine
models:
  policy: {path: a, optimizer: {lr: 1e-3}}
nodes:
  prompts: {op: data.prompts, files: [a.jsonl], batch: 4, tools: "${nodes.rollout.tools}"}
  rollout:
    op: rollout.agent
    model: policy
    max_new_tokens: 60
    loop: {kind: "mine.py:lead", tries: 2}
    parser: {kind: "mine.py:parse"}
    tools:
      guess: {kind: "mine.py:Guess", near: 2}
      look: {kind: search, corpus: corpus.jsonl}
  rewards: {op: reward.exact}
  update: {op: update.policy, model: policy, loss: {kind: sft}}
schedule: {iterations: 2}
"""
MINE = '''
from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.ops import prompts, text


class Guess:
    """Guess."""

    def __init__(self, answer: text[prompts], hint: text[prompts] | None, *, near: int = 0) -> None:
        pass

    def execute(self, number: int) -> str:
        """Guess a number."""


def parse(text: str) -> list[ToolCall]:
    return []


def bad(x) -> str:
    """No annotation."""


async def lead(chat: Chat, source: text[prompts], *, tries: int) -> None:
    await chat.turn()
'''


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(GRAPH)
    (tmp_path / "mine.py").write_text(MINE)
    return path


def said(graph: Path, *overrides: str) -> str:
    result = CliRunner().invoke(main, ["check", str(graph), *overrides])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.output


def test_columns_of_tools_and_loops_are_columns_of_the_rollout(graph: Path) -> None:
    plan = compile_graph(str(graph), (), 1)
    function = plan.functions["train"]["rollout"]
    assert function.ins == {"prompt": "prompt", "answer": "answer", "source": "source"}
    assert {*function.hooks} == {"loop", "parser", "tools.guess", "tools.look"}
    assert function.hooks["tools.guess"].attributes == {"near": 2}
    assert function.hooks["tools.look"].attributes["corpus"] == str(graph.parent / "corpus.jsonl")
    assert function.hooks["loop"].attributes == {"tries": 2}
    shown = plan.functions["train"]["prompts"]
    assert {*shown.hooks} == {"tools.guess", "tools.look"} and not shown.ins


def test_a_tool_s_column_may_have_another_name(graph: Path) -> None:
    plan = compile_graph(str(graph), ("rollout.in.answer=question", "rollout.in.hint=answer"), 1)
    assert plan.functions["train"]["rollout"].ins["answer"] == "question"
    assert plan.functions["train"]["rollout"].ins["hint"] == "answer"


@pytest.mark.parametrize(
    ("override", "law"),
    [
        ("rollout.tools.guess.kind=mine.py:Gues", "mine.py has no function `Gues`"),
        (
            "rollout.tools.guess.kind=mine.py:Gues",
            "accepted: Guess, parse, bad, lead\n  did you mean `Guess`?",
        ),
        ("rollout.tools.guess.kind=seerch", "did you mean `search`?"),
        ("rollout.tools.guess.nearr=3", "`rollout.tools.guess` has no attribute `nearr`"),
        ("rollout.tools.guess.near=x", "`rollout.tools.guess.near` must be a whole number"),
        ("rollout.tools.look.top=few", "`rollout.tools.look.top` must be a whole number"),
        ("rollout.tools={look: {kind: search}}", "`rollout.tools.look` has no `corpus`"),
        ("rollout.tools={look: {corpus: x}}", "`rollout.tools.look` does not say its `kind`"),
        ("rollout.tools={look: {corpus: x}}", "as {kind: calculator}"),
        ("rollout.tools={look: search}", "`rollout.tools.look` must be a mapping"),
        ("rollout.tools=[search]", "`rollout.tools` must be a mapping"),
        ("rollout.tools.guess.kind=mine.py:bad", "parameter x needs a name and an annotation"),
        ("rollout.loop.kind=tool_lop", "did you mean `tool_loop`?"),
        ("rollout.loop={kind: mine.py:parse}", "an agent loop is an async function"),
        ("rollout.parser={kind: mine.py:lead}", "a parser is `def parser(text: str) -> list[ToolCall]`"),
        ("rollout.loop.tries=many", "`rollout.loop.tries` must be a whole number"),
        ("rollout.parser.kind=hermess", "did you mean `hermes`?"),
        ("rollout.truncate=center", "must be 'left', 'right' or 'middle'"),
        ("rollout.in.answers=question", "did you mean `answer`?"),
        ("prompts.tools.look.top=1", "there is no `look` in `nodes.prompts.tools`"),
    ],
)
def test_what_check_says(graph: Path, override: str, law: str) -> None:
    assert law in said(graph, override)


def test_what_is_open_is_asked_for_where_it_was_written(graph: Path) -> None:
    graph.write_text(GRAPH.replace("corpus: corpus.jsonl", "corpus: ???"))
    assert "nodes.rollout.tools.look.corpus=..." in said(graph)
    assert "still open" not in said(graph, "rollout.tools.look.corpus=c.jsonl")


def test_a_rename_reaches_the_columns_of_tools(graph: Path) -> None:
    graph.with_name("edit.yaml").write_text(
        "graph: edited\nextends: mine.yaml\nedits:\n  - rename: {answer: solution}\n"
    )
    plan = compile_graph(str(graph.with_name("edit.yaml")), (), 1)
    assert plan.functions["train"]["rollout"].ins["answer"] == "solution"


@pytest.mark.parametrize("name", ["rollout.agent", "tool_loop", "search", "hermes"])
def test_the_catalog_knows_them(name: str) -> None:
    result = CliRunner().invoke(main, ["nodes", name])
    assert result.exit_code == 0 and name in result.output


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Guess", "`tools: {any_name: {kind: mine.py:Guess}}`"),
        ("lead", "`loop: {kind: mine.py:lead}`"),
        ("parse", "`parser: {kind: mine.py:parse}`"),
        ("bad", "parameter x has no annotation"),
    ],
)
def test_the_catalog_reads_those_in_a_file(name: str, said: str) -> None:
    assert said in CliRunner().invoke(main, ["nodes", f"mine.py:{name}"]).output


def test_the_policy_s_side_of_a_tool_is_listed() -> None:
    assert "chosen by the policy: text" in CliRunner().invoke(main, ["nodes", "search"]).output


def test_what_the_docs_show_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(yaml|python)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    imports = "from rlgraph.ops import prompts, text\nfrom rlgraph.nodes.agent.chat import Chat\n"
    for number, (kind, text) in enumerate(blocks):
        if kind == "python":
            Path(f"block_{number}.py").write_text(imports + text)
    found = {
        name: f"block_{number}.py:{name}"
        for number, (_, text) in enumerate(blocks)
        for name in re.findall(r"^(?:async def|def|class) (\w+)", text, re.MULTILINE)
    }
    found.pop("solve")  # an agent from outside, which declares nothing
    assert {*found} == {"check", "Guess", "single_turn", "tool_loop", "persist", "found"}
    for place in found.values():
        assert CliRunner().invoke(main, ["nodes", place]).exit_code == 0
    nodes = next(text for kind, text in blocks if kind == "yaml" and "tools:" in text)
    head, tail = GRAPH.partition("nodes:\n")[0], GRAPH.partition("  rewards:")[2]
    nodes = nodes.replace("my_tools.py:check", found["check"])
    Path("shown.yaml").write_text(f"{head}nodes:\n{nodes}  rewards:{tail}")
    override = f"rollout.loop={{kind: '{found['persist']}', tries: 3}}"
    assert "shown: ok" in CliRunner().invoke(main, ["check", "shown.yaml", "graph=shown", override]).output


def test_declarations_load_nothing_heavy() -> None:
    script = """
import sys
from rlgraph.ops.registry import load
from rlgraph.reference.describe import KINDS
from rlgraph.nodes import HOOKS
for word, known in HOOKS.items():
    for name, target in known.items():
        load(target, name, KINDS[word])
heavy = {"torch", "transformers", "ray", "pyarrow", "numpy", "jinja2", "bm25s", "simpleeval"} & {*sys.modules}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)
