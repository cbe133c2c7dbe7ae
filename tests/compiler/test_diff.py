"""What ``diff`` prints, applied to the one graph, gives the other."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.cli.main import main
from rlgraph.errors import GraphError, Source
from rlgraph.frontend.compose import as_written, compose
from rlgraph.frontend.edits import apply
from rlgraph.frontend.graph_diff import diff_text, diff_trees, diff_yaml
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.frontend.tree_paths import SECTIONS
from rlgraph.syntax.source import Tree, parse
from share import examples, rest_nightly

PLAIN = {name: as_written(name).plain() for name in shipped_graphs()}
PAIRS = rest_nightly(itertools.product(PLAIN, PLAIN), lambda a, b: a == b or "ppo" in (a, b))
QUICK = examples(150)
NAMES = st.sampled_from(
    ["n", "op", "loss", "in", "a.b", "x y", "", "nodes", "schedule", "models", "???", "n'\""]
)
LEAVES = st.sampled_from(
    [None, True, 1, 1.0, 0, "1", "", "???", "${graph}", "a: b", "# x", "models.ref", [], [1]]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


def tree_of(plain: dict[str, Any]) -> Tree:
    return parse(Source("graph.yaml", json.dumps(plain)))


def same(a: Any, b: Any) -> bool:
    """Equal in values and types, whatever the order of keys."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def applied(a: Tree, text: str) -> Tree:
    """A graph after the edits of a YAML text."""
    edits = parse(Source("edits.yaml", text)).items["edits"]
    for edit in edits.value:
        a = apply(a, edit)
    return a


def holders(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if isinstance(value, dict):
        for key, child in [*value.items()]:
            yield value, key
            yield from holders(child)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped graph with values changed, taken out and added, at any depth."""
    plain = copy.deepcopy(PLAIN[draw(st.sampled_from([*PLAIN]))])
    for _ in range(draw(st.integers(0, 4))):
        holder, key = draw(st.sampled_from([*holders(plain)] or [(plain, "graph")]))
        how = draw(st.sampled_from(["drop", "set", "add"]))
        if how == "drop":
            holder.pop(key, None)
        elif how == "set" or holder is plain:
            holder[key] = draw(VALUES)
        else:
            holder[draw(NAMES)] = draw(VALUES)
    return plain


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_all_pairs_of_shipped_graphs(a: str, b: str, tmp_path: Path) -> None:
    text = diff_yaml(diff_trees(as_written(a), as_written(b)))
    path = tmp_path / "edited.yaml"
    path.write_text(f"graph: {b}\nextends: {a}\n{text}")
    assert same(as_written(str(path)).plain(), PLAIN[b])
    assert same(compose(str(path)).plain(), compose(b).plain())
    assert (text == "edits: []\n") == (a == b)


@QUICK
@given(a=mutated(), b=mutated())
def test_mutated_graphs(a: dict[str, Any], b: dict[str, Any]) -> None:
    old, new = tree_of(a), tree_of(b)
    edits = diff_trees(old, new)
    assert same(applied(old, diff_yaml(edits)).plain(), b)
    assert bool(edits) == (not same(a, b))
    assert bool(diff_text(old, new)) == bool(edits)


@QUICK
@given(graphs=st.lists(mutated(), min_size=3, max_size=4))
def test_chains(graphs: list[dict[str, Any]]) -> None:
    first, *_ = trees = [tree_of(plain) for plain in graphs]
    for old, new in itertools.pairwise(trees):
        first = applied(first, diff_yaml(diff_trees(old, new)))
    assert same(first.plain(), graphs[-1])


@QUICK
@given(a=mutated(), b=mutated())
def test_no_edit_says_what_another_says(a: dict[str, Any], b: dict[str, Any]) -> None:
    edits = diff_trees(tree_of(a), tree_of(b))
    names = [name for edit in edits for content in edit.values() for name in content]
    full = [tuple(n.split(".")) if n.split(".")[0] in SECTIONS else ("nodes", *n.split(".")) for n in names]
    for one, other in itertools.permutations(full, 2):
        assert other[: len(one)] != one


def test_nothing_differs_but_the_order() -> None:
    plain = PLAIN["ppo"]
    turned = {name: dict(reversed(v.items())) if isinstance(v, dict) else v for name, v in plain.items()}
    assert diff_trees(tree_of(plain), tree_of(turned)) == []


def test_values_of_other_types_differ() -> None:
    for one, other in itertools.permutations([1, 1.0, True, "1", None], 2):
        a, b = ({"nodes": {"x": {"n": value}}} for value in (one, other))
        assert diff_trees(tree_of(a), tree_of(b)) == [{"set": {"x.n": other}}]


def test_names_that_paths_can_not_say() -> None:
    a = {"eval": {"report": {"acc.train": "a", "b": "c"}}}
    b = {"eval": {"report": {"acc.train": "x", "b": "c"}}}
    assert diff_trees(tree_of(a), tree_of(b)) == [{"replace": {"eval.report": b["eval"]["report"]}}]


def test_a_node_named_as_a_section_has_its_full_path() -> None:
    a, b = ({"nodes": {"schedule": {"n": n}}, "schedule": {}} for n in (1, 2))
    assert diff_trees(tree_of(a), tree_of(b)) == [{"set": {"nodes.schedule.n": 2}}]


def test_what_follows_an_interpolation_is_not_set_beside_it() -> None:
    other = tree_of({**PLAIN["ppo"], "models": {**PLAIN["ppo"]["models"]}})
    other = apply(other, parse(Source("edit", "set: {models.policy.path: a/b}")))
    assert diff_trees(as_written("ppo"), other) == [{"set": {"models.policy.path": "a/b"}}]


def test_a_section_that_no_graph_has_is_refused() -> None:
    with pytest.raises(GraphError, match="no such section"):
        diff_trees(tree_of({"node": 1}), tree_of({"node": 2}))


@pytest.mark.parametrize("form", ["text", "yaml"])
@pytest.mark.parametrize(("a", "b"), [("ppo", "grpo"), ("grpo", "demo")])
def test_diff_prints_edits(golden: Callable[[str, str], None], a: str, b: str, form: str) -> None:
    result = CliRunner().invoke(main, ["diff", a, b, "--format", form])
    assert result.exit_code == 1 and not result.stderr
    golden(f"diff/{a}-{b}.{form}", result.stdout)


def test_exit_codes(tmp_path: Path) -> None:
    call = CliRunner().invoke
    assert (call(main, ["diff", "ppo", "ppo"]).exit_code, call(main, ["diff", "ppo", "ppo"]).stdout) == (
        0,
        "",
    )
    assert call(main, ["diff", "ppo", "ppo", "--format", "yaml"]).stdout == "edits: []\n"
    wrong = call(main, ["diff", "ppo", "pppo"])
    assert wrong.exit_code == 1 and not wrong.stdout and "did you mean `ppo`?" in wrong.stderr
    assert call(main, ["diff", "ppo"]).exit_code == 2
