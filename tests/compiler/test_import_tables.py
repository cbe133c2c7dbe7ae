"""Texts of the import tables send a user to settings of a graph: each of these exists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.importing.draft import FREE, UNKNOWN, Draft
from rlgraph.importing.table import table_of
from rlgraph.nodes import OPS
from rlgraph.ops.registry import load

TABLES = ("areal", "nemo_rl", "openrlhf", "prime_rl", "slime", "trl", "verl", "verl_sft")
WORDS = ("to", "note", "shape", "same", "hand", "none")  # of a row, those that speak of a graph
OP = re.compile(r"\bop: ([a-z_]+(?:\.[a-z_]+)+)")
# a dotted name that is not a part of a path, a file's name or another name
SETTING = re.compile(r"(?<![\w./:{$-])[a-z_]\w*(?:\.[a-z_]\w*)+(?![\w/(])")


def texts_of(name: str) -> Iterator[str]:
    facts = table_of(name).facts
    told = facts.get("told", {})
    yield from told.values() if isinstance(told, dict) else (remark["text"] for remark in told)
    for rows in facts["sections"].values():
        for row in rows.values():
            yield from (row[word] for word in WORDS if isinstance(row.get(word), str))


@cache
def attributes_by_node() -> dict[str, set[str]]:
    """What a node of this name takes in the graphs that are shipped, whichever op it has there."""
    attributes = defaultdict[str, set[str]](lambda: {*FREE, "model"})
    for graph in shipped_graphs():
        for node, settings in compose(graph).plain().get("nodes", {}).items():
            attributes[node] |= attributes_of(settings["op"])
    for op in OPS:
        family = op.partition(".")[0]
        for node in (family, f"{family}s"):  # a node is named for the family of its op: rewards, advantages
            attributes[node] |= attributes_of(op)
    return attributes


def attributes_of(op: str) -> set[str]:
    return set(load(OPS[op], op).attributes.model_fields)


def is_setting_of_a_graph(setting: str) -> bool:
    first, second, *below = setting.split(".")
    if first == "models":
        return not below or Draft("grpo").value(".".join(("models.policy", *below))) is not UNKNOWN
    if first == "schedule":
        return Draft("grpo").value(setting) is not UNKNOWN
    return second in attributes_by_node()[first]


@pytest.mark.parametrize("name", TABLES)
def test_ops_that_a_table_names_exist(name: str) -> None:
    ops = {op for text in texts_of(name) for op in OP.findall(text)}
    assert ops <= OPS.keys()


@pytest.mark.parametrize("name", TABLES)
def test_settings_that_a_table_names_exist(name: str) -> None:
    table = table_of(name)
    of_the_other_system = tuple(f".{key}" for key in table.rows)
    names_of_nodes = {*attributes_by_node(), "models", "schedule"}
    missing: dict[str, str] = {}
    for text in texts_of(name):
        for setting in SETTING.findall(text):
            is_theirs = any(key.endswith(f".{setting}") for key in of_the_other_system)
            is_named_so = setting.partition(".")[0] in names_of_nodes and not setting.endswith(".jsonl")
            if is_theirs or setting in OPS or not is_named_so:
                continue
            if not is_setting_of_a_graph(setting):
                missing[setting] = text
    assert not missing
