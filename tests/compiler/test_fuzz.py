"""Whatever a graph says, compiling it succeeds or raises GraphError."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.errors import GraphError, Mark, Source
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import Plan
from rlgraph.lowering import plan_tree
from rlgraph.printing.plan_text import plan_text
from rlgraph.syntax.source import Tree, parse
from rlgraph.syntax.yaml_text import show_text
from share import examples

TREES = {name: compose(name).plain() for name in shipped_graphs()}
TEXT = partial(
    st.text, alphabet=st.characters(codec="utf-8", exclude_characters="\ue000")
)  # what stands in for ?
QUICK = examples(100)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["???", "policy", "policy@next", "ref", "tokens", "rewards", "auto", "all", "${graph}"]),
    st.sampled_from(
        ["reward.exact", "rollout", "update.policy", "data.examples", "nowhere.py:f", "ppo_clip"]
    ),
    TEXT(max_size=5),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT(max_size=3), inner)
)


def holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a plain tree, as its holder and its key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(pairs):
        yield value, key
        yield from holders(child)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped graph with keys dropped, added or renamed, and values changed or swapped."""
    tree = copy.deepcopy(TREES[draw(st.sampled_from([*TREES]))])
    for _ in range(draw(st.integers(1, 3))):
        places = [*holders(tree)]
        holder, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["drop", "set", "set", "swap", "rename", "add"]))
        if how == "drop":
            del holder[key]
        elif how == "set":
            holder[key] = draw(VALUES)
        elif how == "swap":
            other, place = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder, dict):
            new = draw(
                st.sampled_from(["in", "out", "model", "tokenizer", "eval", "n", "loss", "kind", "x y"])
            )
            holder[new] = holder.pop(key) if how == "rename" else draw(VALUES)
    return tree


def outcome(make: Callable[[], Plan]) -> Plan | None:
    """The plan, or None where a GraphError says why there is none."""
    try:
        plan = make()
    except GraphError:
        return None
    assert plan_text(plan)
    json.loads(plan.json(), parse_constant=[].index)  # Infinity and NaN, which are no JSON, fail
    return plan


def compiles(text: str) -> bool:
    return outcome(lambda: plan_tree(parse(Source("fuzz.yaml", text)), 2)) is not None


@pytest.mark.slow
@QUICK
@given(tree=mutated())
def test_a_mutated_graph(tree: dict[str, Any]) -> None:
    compiles(json.dumps(tree, ensure_ascii=False))


def test_an_unmutated_graph() -> None:
    assert all(compiles(json.dumps(tree)) for tree in TREES.values())


@QUICK
@given(text=st.text(max_size=60))
def test_any_text(text: str) -> None:
    compiles(text)


@QUICK
@given(text=st.text(alphabet="a1:-?{}[],&*!|>'\"%@`#~<=.$ \n\t", max_size=40))
def test_any_punctuation(text: str) -> None:
    compiles(text)


@QUICK
@given(edit=st.dictionaries(st.sampled_from(["add", "set", "replace", "remove"]), VALUES, max_size=2))
def test_any_edit(edit: dict[str, Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(json.dumps({"graph": "fuzz", "extends": "grpo", "edits": [edit]}))
    outcome(lambda: plan_tree(compose(str(path)), 1))


@QUICK
@given(
    value=SCALARS,
    name=st.sampled_from(["rollout.n", "seed", "graph", "nodes", "models.ref", "eval", "x", ""]),
)
def test_any_override(value: Any, name: str) -> None:
    outcome(lambda: plan_tree(compose("grpo", [f"{name}={value}"]), 1))


@QUICK
@given(tree=st.dictionaries(TEXT(min_size=1, max_size=4), VALUES, max_size=3))
def test_what_show_prints_reads_back(tree: dict[str, Any]) -> None:
    again = parse(Source("shown.yaml", show_text(as_tree(tree)) if tree else "{}"))
    assert again.plain() == tree


def as_tree(value: Any) -> Tree:
    mark = Mark(Source("a.yaml", ""), 1, 1)
    if isinstance(value, dict):
        return Tree({name: as_tree(child) for name, child in value.items()}, mark)
    return Tree([as_tree(child) for child in value] if isinstance(value, list) else value, mark)
