"""What a shipped graph says of its paper stands in it, with a word on every difference to its parent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from rlgraph.compiler import compile_graph
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.graph_diff import diff_trees
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.function import Function
from rlgraph.syntax import source

ITEM = re.compile(r"^# - ([a-z_]+)\.([a-z_.]+): ([^\s,:;{(]+|\{(?:[^{}]|\{[^}]*\})*\})", re.MULTILINE)
NO_PAPER = {name for name in shipped_graphs() if name.startswith("demo") or name == "calculator_sft"}
OF_THE_TASK = (
    "in",
    "out",
    "rows",
    "state",
    "tools",
    "files",
    "answer",
    "answer_after",
    "template",
    "model",
    "tokenizer",
)


def stated(name: str) -> list[tuple[str, str, Any]]:
    """The values that a graph's opening says of nodes: (node, key, value)."""
    opening = shipped_graphs()[name].read_text(encoding="utf-8").partition("graph:")[0]
    return [(node, key, yaml.safe_load(value)) for node, key, value in ITEM.findall(opening)]


def value(functions: dict[str, Function], name: str, node: str, key: str) -> Any:
    path = key.split(".")
    if node == "schedule":
        return as_written(name).at(("schedule", *path)).value
    if key in ("op", "every", "from"):
        return as_written(name).at(("nodes", node, key)).value
    function = functions[node]
    if path == ["in"]:
        return {port: column.partition("@")[0] for port, column in function.ins.items()}
    if key in function.courses:
        return as_written(name).at(("nodes", node, key)).plain()
    if len(path) == 1:
        return function.attributes[key]
    hook = function.hooks[".".join(path[:-1])]
    return hook.target.rpartition(":")[2] if path[-1] == "kind" else hook.attributes[path[-1]]


@pytest.mark.parametrize("name", sorted({*shipped_graphs()} - NO_PAPER))
def test_what_is_said_of_the_paper_stands_in_the_graph(name: str) -> None:
    functions = dict(compile_graph(name, devices=2).functions["train"])
    items = stated(name)
    assert items, "its opening lists what it has of its paper, as `# - update_policy.kl: k3 (eq. 4)`"
    for node, key, said in items:
        held = value(functions, name, node, key)
        held = {p: c for p, c in held.items() if p in said} if isinstance(said, dict) else held
        assert held == said, f"{node}.{key}"


@pytest.mark.parametrize("name", sorted({*shipped_graphs()} - NO_PAPER))
def test_each_difference_to_the_parent_is_said(name: str) -> None:
    parent = source.read(shipped_graphs()[name]).get("extends")
    if parent is None or parent.value in NO_PAPER:
        return
    said = {(node, key) for node, key, _ in stated(name)}
    for edit in diff_trees(as_written(str(parent.value)), as_written(name)):
        for path in edit.get("set", {}):
            node, _, key = path.partition(".")
            task = key.split(".")[0] in OF_THE_TASK or node in (
                "about",
                "graph",
                "pools",
                "models",
                "schedule",
            )
            assert task or (node, key) in said or (node, "op") in said, f"{path} is not said"
