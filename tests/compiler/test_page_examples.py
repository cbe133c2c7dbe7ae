"""Each YAML example of the pages that users meet first compiles, as a graph or as an edit of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlgraph.compiler import compile_graph

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "agents.md",
    "data.md",
    "data_formats.md",
    "language.md",
    "running.md",
    "planning.md",
    "metrics.md",
    "lora.md",
    "memory.md",
)
BLOCK = re.compile(r"^```yaml([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {"models", "nodes", "pools", "schedule", "eval", "seed"}
ACCURACY = "set: {eval: {report: {accuracy: rewards}}}"
# (page, words of an example) -> the graph that it edits in place of grpo, and an edit that comes first
BASES = {
    ("data_formats.md", "report: {preferred: preferred}"): ("dpo", None),
    ("language.md", "op: advantage.gae"): ("ppo", None),
    ("running.md", "stop: {metric: eval/accuracy"): ("grpo", ACCURACY),
    ("metrics.md", "eval/accuracy"): ("grpo", ACCURACY),
}
DEVICES = {("planning.md", "pools: {train: {devices: 6}, gen: {devices: 2}}"): 8}
MY_OPS = """from rlgraph.ops import boolean, float32, int64, op, prompts, samples, text, tokens


@op()
def my_reward(responses: text[samples]) -> float32[samples]: ...


@op()
def length_penalty(
    rewards: float32[samples], tokens: int64[samples, tokens], *, coef: float = 0.001
) -> float32[samples]: ...


@op(filters=True)
def easy(question: text[prompts], *, most: float = 1000) -> boolean[prompts]: ...
"""
MY_TOOLS = """from rlgraph.ops import prompts, text


def check(guess: int, answer: text[prompts], *, near: int = 0) -> str:
    '''Say whether a guess is right.

    Args:
        guess: a whole number.
    '''
    ...
"""


def examples() -> list[tuple[str, int, str]]:
    """The page, number and text of each example."""
    found = []
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        for number, block in enumerate(BLOCK.finditer(text)):
            found.append((page, number, block[2]))
    return found


EXAMPLES = examples()


def entry(table: dict[tuple[str, str], Any], page: str, text: str, default: Any) -> Any:
    """The value in a table whose key is a page and words of an example."""
    for (page_in_table, words), value in table.items():
        if page_in_table == page and words in text:
            return value
    return default


def edits_of(base: str, example: Any) -> list[Any]:
    """The edits that bring an example, a list of edits, sections or nodes, into a graph."""
    if isinstance(example, list):
        return example
    assert isinstance(example, dict)
    if example.keys() <= SECTIONS:
        models = {f"models.{name}": model for name, model in example.pop("models", {}).items()}
        nodes = example.pop("nodes", {})
        edits = [{"add": models}] if models else []
        edits += edits_of(base, nodes) if nodes else []
        return [*edits, {"set": example}] if example else edits
    nodes_of_base = compile_graph(base, devices=2).functions["train"]
    edits = []
    for name, value in example.items():
        if name not in nodes_of_base:
            edits.append({"add": {name: value}})
        elif "op" in value:
            edits.append({"replace": {name: value}})
        else:
            edits.append({"set": {f"{name}.{key}": setting for key, setting in value.items()}})
    return edits


def graph_text(page: str, text: str) -> str:
    """An example as a whole graph."""
    example = yaml.safe_load(text)
    if isinstance(example, dict) and "graph" in example:
        return text
    base, first = entry(BASES, page, text, ("grpo", None))
    if isinstance(example, dict) and "edits" in example:
        return yaml.safe_dump({"graph": "example", "extends": base, **example}, sort_keys=False)
    edits = edits_of(base, example)
    if first is not None:
        edits = [yaml.safe_load(first), *edits]
    return yaml.safe_dump({"graph": "example", "extends": base, "edits": edits}, sort_keys=False)


IDS = [f"{page}-{number}" for page, number, _ in EXAMPLES]


@pytest.mark.parametrize(("page", "number", "text"), EXAMPLES, ids=IDS)
def test_an_example_compiles(
    page: str, number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_ops.py").write_text(MY_OPS)
    Path("my_tools.py").write_text(MY_TOOLS)
    Path("lora.yaml").write_text("edits:\n  - set: {models.policy.train.lora.rank: 32}\n")
    Path("example.yaml").write_text(graph_text(page, text))
    compile_graph("example.yaml", devices=entry(DEVICES, page, text, 2))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 20
