"""Files, edits, overrides and interpolation become one tree whose values know where they came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.syntax.source import Tree, read
from rlgraph.syntax.yaml_text import show_text


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def edited(folder: Path, edits: str, parent: str = "grpo") -> Tree:
    return compose(write(folder, "edited.yaml", f"graph: edited\nextends: {parent}\nedits:\n{edits}"))


def kind_of(graph: str, *overrides: str) -> str:
    with pytest.raises(GraphError) as caught:
        compose(graph, overrides)
    return caught.value.problems[0].kind


def at(tree: Tree, path: str) -> object:
    return tree.at(tuple(path.split("."))).plain()


def test_a_chain_of_graphs() -> None:
    tree = compose("demo")  # demo extends grpo extends ppo
    assert at(tree, "graph") == "demo"
    assert at(tree, "nodes.rollout.n") == 8
    assert at(tree, "nodes.rollout.max_new_tokens") == 4
    assert "critic" not in tree.items["models"].items
    assert "extends" not in tree.items and "edits" not in tree.items


def test_a_relative_parent_is_beside_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "sub/parent.yaml", "graph: parent\nabout: old\nnodes: {}\nschedule: {iterations: 1}\n")
    child = write(tmp_path, "sub/child.yaml", "graph: child\nextends: parent.yaml\n")
    monkeypatch.chdir("/")
    tree = compose(child)
    assert (at(tree, "graph"), at(tree, "about")) == ("child", "old")


def test_a_file_comes_before_a_shipped_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "ppo", "graph: mine\n")
    assert at(compose("ppo"), "graph") == "mine"


def test_circles_of_graphs(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "graph: a\nextends: b.yaml\n")
    write(tmp_path, "b.yaml", "graph: b\nextends: c.yaml\n")
    write(tmp_path, "c.yaml", "graph: c\nextends: ./a.yaml\n")
    assert kind_of(str(tmp_path / "a.yaml")) == "extends-cycle"


def test_add(tmp_path: Path) -> None:
    tree = edited(
        tmp_path, "  - add: {second: {op: reward.exact}, models.judge: {path: x/y, frozen: true}}\n"
    )
    assert at(tree, "nodes.second") == {"op": "reward.exact"}
    assert [*tree.items["nodes"].items][-1] == "second"
    assert at(tree, "models.judge.path") == "x/y"


def test_remove(tmp_path: Path) -> None:
    tree = edited(
        tmp_path, "  - remove: [advantages, rollout.temperature, models.ref]\n  - remove: rewards\n"
    )
    assert not {"advantages", "rewards"} & {*tree.items["nodes"].items}
    assert "temperature" not in tree.items["nodes"].items["rollout"].items
    assert [*tree.items["models"].items] == ["policy"]


def test_replace_keeps_the_place(tmp_path: Path) -> None:
    tree = edited(tmp_path, "  - replace: {rewards: {op: reward.exact}, rollout.n: 2}\n")
    assert [*tree.items["nodes"].items] == [*compose("grpo").items["nodes"].items]
    assert at(tree, "nodes.rewards") == {"op": "reward.exact"}
    assert at(tree, "nodes.rollout.n") == 2


def test_set_reaches_attributes_with_defaults(tmp_path: Path) -> None:
    tree = edited(tmp_path, "  - set: {rollout.top_k: 5, models.policy.train.dtype: bfloat16}\n")
    assert at(tree, "nodes.rollout.top_k") == 5
    assert at(tree, "models.policy.train") == {"dtype": "bfloat16"}


def test_edits_apply_in_order(tmp_path: Path) -> None:
    tree = edited(tmp_path, "  - set: {rollout.n: 2}\n  - set: {rollout.n: 3}\n")
    assert at(tree, "nodes.rollout.n") == 3


@pytest.mark.parametrize(
    ("edits", "kind"),
    [
        ("  - set: {nodes.nowhere: {op: rollout}}\n", "edit-missing"),
        ("  - set: {rollout.sub.sub: 1}\n", "edit-missing"),
        ("  - set: {'': 1}\n", "edit-missing"),
        ("  - set: {rollout..n: 1}\n", "edit-missing"),
        ("  - replace: {rollout.nn: 1}\n", "edit-missing"),
        ("  - remove: [models.nowhere]\n", "edit-missing"),
        ("  - add: {rollout: {op: rollout}}\n", "add-existing"),
        ("  - add: {graph: x}\n", "add-existing"),
        ("  - {set: {rollout.n: 1}, remove: [rewards]}\n", "bad-edit"),
        ("  - remove: [[rewards]]\n", "bad-edit"),
        ("  - add: rewards\n", "bad-edit"),
        ("  - move: {}\n", "unknown-edit"),
        ("  - null\n", "bad-edit"),
    ],
)
def test_edits_are_strict(tmp_path: Path, edits: str, kind: str) -> None:
    with pytest.raises(GraphError) as caught:
        edited(tmp_path, edits)
    assert caught.value.problems[0].kind == kind


def test_no_edits_is_a_copy(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "graph: a\nextends: grpo\n")
    assert compose(path).plain() == {**compose("grpo").plain(), "graph": "a"}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rollout.n=16", "nodes.rollout.n", 16),
        ("nodes.rollout.n=16", "nodes.rollout.n", 16),
        ("models.policy.optimizer.lr=1e-5", "models.policy.optimizer.lr", 1e-5),
        ("prompts.files=[a.jsonl, b.jsonl]", "nodes.prompts.files", ["a.jsonl", "b.jsonl"]),
        ("update_policy.loss={kind: sft}", "nodes.update_policy.loss", {"kind": "sft"}),
        ("prompts.suffix=", "nodes.prompts.suffix", ""),
        ("prompts.suffix='#'", "nodes.prompts.suffix", "#"),
        ("prompts.suffix=a=b", "nodes.prompts.suffix", "a=b"),
        ("schedule.iterations=???", "schedule.iterations", "???"),
        ("seed=7", "seed", 7),
        (" rollout.n = 3", "nodes.rollout.n", 3),
    ],
)
def test_overrides(override: str, path: str, value: object) -> None:
    assert at(compose("grpo", [override]), path) == value


def test_an_override_is_marked_on_the_command_line() -> None:
    tree = compose("grpo", ["rollout.n=[16"[:-3] + "many"])
    mark = tree.items["nodes"].items["rollout"].items["n"].mark
    assert str(mark) == "command line"
    with pytest.raises(GraphError) as caught:
        compile_graph("grpo", ["rollout.n=many"], 1)
    assert str(caught.value).splitlines() == [
        "command line: `rollout.n` must be a whole number; it is 'many'",
        "  1 | rollout.n=many",
        "    |           ^",
    ]


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("rollout.n", "bad-override"),
        ("=3", "edit-missing"),
        ("rolout.n=3", "edit-missing"),
        ("prompts.answer_after=####", "bad-override"),
        ("rollout.n=[1", "not-yaml"),
        ("rollout.n=*x", "not-yaml"),
        ("rollout.n={a: 1, a: 2}", "duplicate-key"),
        ("models.critic={path: x}", "edit-missing"),
    ],
)
def test_overrides_are_strict(override: str, kind: str) -> None:
    assert kind_of("grpo", override) == kind


def test_a_wrong_override_is_shown_as_it_was_typed() -> None:
    with pytest.raises(GraphError, match=r"1 \| rollout\.n=\[1"):
        compose("grpo", ["rollout.n=[1"])


def test_interpolation_keeps_types() -> None:
    overrides = ["rollout.n=${update_policy.minibatches}"]
    with pytest.raises(GraphError, match="refers to what is not there: no `update_policy`"):
        compose("grpo", overrides)
    tree = compose("grpo", ["rollout.n=${nodes.update_policy.minibatches}"])
    assert at(tree, "nodes.rollout.n") == 4
    tree = compose("grpo", ["models.ref.optimizer=${models.policy.optimizer}"])
    assert at(tree, "models.ref.optimizer") == {"lr": 1e-6}


def test_interpolation_inside_texts() -> None:
    tree = compose("grpo", ["about='${graph} with ${nodes.rollout.n} samples, ${models.ref.frozen}'"])
    assert at(tree, "about") == "grpo with 8 samples, true"


def test_interpolation_follows_chains_and_comes_after_overrides() -> None:
    tree = compose("ppo", ["models.policy.path=a/b", "models.critic.path=${models.ref.path}"])
    assert at(tree, "models.ref.path") == at(tree, "models.critic.path") == "a/b"


def test_interpolated_values_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST", "${graph}")
    assert (
        at(compose("grpo", ["about='${env:RLGRAPH_TEST} of ${graph}'"]), "about")
        == "${env:RLGRAPH_TEST} of grpo"
    )


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST", "12")
    assert at(compose("grpo", ["rollout.n=${env:RLGRAPH_TEST}"]), "nodes.rollout.n") == 12
    monkeypatch.delenv("RLGRAPH_TEST")
    assert kind_of("grpo", "rollout.n=${env:RLGRAPH_TEST}") == "no-env"


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("models.policy.path=${models.policy.path}", "interpolation-cycle"),
        ("models.policy.path=${models.ref.path}", "interpolation-cycle"),
        ("models.policy.path=${models}", "interpolation-cycle"),
        ("models.policy.path=${nowhere}", "no-reference"),
        ("models.policy.path=${}", "no-reference"),
        ("models.policy.path=${graph", "open-interpolation"),
        ("models.policy.path='x${schedule}'", "not-a-text"),
    ],
)
def test_interpolation_is_strict(override: str, kind: str) -> None:
    assert kind_of("grpo", override) == kind


@pytest.mark.parametrize("part", ["'${aN}', '${aN}'", "'${aN}${aN}'", "'x${aN}', '${aN}x'"])
@pytest.mark.parametrize("first", ["[1, 1, 1, 1]", "'1111'"])
def test_references_that_multiply(part: str, first: str, tmp_path: Path) -> None:
    lines = [f"a0: {first}"] + [f"a{n}: [{part.replace('N', str(n - 1))}]" for n in range(1, 60)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert {"too-large", "not-a-text"} & {kind_of(str(tmp_path / "bomb.yaml"))}


def test_texts_that_multiply(tmp_path: Path) -> None:
    lines = ["a0: " + "x" * 1000] + [f"a{n}: '${{a{n - 1}}}${{a{n - 1}}}'" for n in range(1, 40)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert kind_of(str(tmp_path / "bomb.yaml")) == "too-large"


def test_what_refers_to_an_open_value_is_open_with_it() -> None:
    plan = compile_graph("grpo", ["models.policy.path=???", "prompts.files=['${models.policy.path}/a']"], 1)
    assert plan.open_values[0] == "models.policy.path"
    assert plan.models["ref"].path == "???"


def test_paths_are_relative_to_the_file_that_they_stand_in(tmp_path: Path) -> None:
    write(
        tmp_path, "parent/parent.yaml", "graph: p\nextends: grpo\nedits: [{set: {models.policy.path: ./m}}]\n"
    )
    child = write(tmp_path, "child/child.yaml", "graph: c\nextends: ../parent/parent.yaml\n")
    models = compile_graph(child, devices=1).models
    here = tmp_path / "parent" / "m"
    assert [Path(models[name].path).resolve() for name in ("policy", "ref")] == [here, here]
    assert compile_graph(child, ["models.policy.path=./m"], 1).models["ref"].path == "m"


def test_a_hub_id_is_no_path(tmp_path: Path) -> None:
    graph = write(
        tmp_path, "a.yaml", "graph: a\nextends: grpo\nedits: [{set: {models.policy.path: org/name}}]\n"
    )
    assert compile_graph(graph, devices=1).models["policy"].path == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert compile_graph(graph, devices=1).models["policy"].path == str(tmp_path / "org" / "name")


@pytest.mark.parametrize("name", shipped_graphs())
def test_what_show_prints_reads_back_as_the_same(name: str, tmp_path: Path) -> None:
    for origin in (False, True):
        path = write(tmp_path, "shown.yaml", show_text(compose(name), origin))
        assert read(Path(path)).plain() == compose(name).plain()


def test_every_wrong_setting_is_told_and_what_they_leave_is_checked() -> None:
    with pytest.raises(GraphError) as caught:
        compile_graph("grpo", ["rollout.n=eight", "rolout.n=3", "models.policy.path=", "pools={main:"], 1)
    kinds = [problem.kind for problem in caught.value.problems]
    assert kinds[:2] == ["edit-missing", "not-yaml"] and kinds.count("wrong-value") == 3
    assert "quote it for the shell" in str(caught.value)


def test_a_wrong_edit_that_others_need_is_told_alone(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    edits = "[{add: {rollout: {op: rollout}}}, {set: {update_policy.loss.kind: nothing}}]"
    path.write_text(f"graph: g\nextends: grpo\nedits: {edits}\n")
    with pytest.raises(GraphError) as caught:
        compile_graph(str(path), devices=1)
    assert [problem.kind for problem in caught.value.problems] == ["add-existing"]


LORA = "about: adapters\nedits: [{set: {models.policy.train.lora.rank: 32, rollout.n: 4}}]\n"
LONG = "edits: [{set: {rollout.n: 6, rollout.max_new_tokens: 4096}}]\n"


def test_fragments_apply_in_order_between_the_parent_and_the_edits(tmp_path: Path) -> None:
    write(tmp_path, "lora.yaml", LORA)
    write(tmp_path, "recipes/long.yaml", LONG)
    text = "graph: mine\nextends: grpo\nuse: [lora.yaml, recipes/long.yaml]\n"
    graph = write(tmp_path, "mine.yaml", text)
    tree = compose(graph)
    assert (at(tree, "nodes.rollout.n"), at(tree, "nodes.rollout.max_new_tokens")) == (6, 4096)
    assert at(tree, "models.policy.train.lora.rank") == 32 and "use" not in tree.items
    assert at(tree, "about") == at(compose("grpo"), "about")  # a fragment's is its own
    shown = show_text(tree, origin=True)
    assert "rank: 32" in shown and "lora.yaml:2" in shown and "long.yaml:1" in shown
    edited = write(tmp_path, "edited.yaml", text + "edits: [{set: {rollout.n: 16}}]\n")
    assert at(compose(edited), "nodes.rollout.n") == 16
    other_way = write(
        tmp_path, "other.yaml", text.replace("lora.yaml, recipes/long", "recipes/long.yaml, lora")
    )
    assert at(compose(other_way), "nodes.rollout.n") == 4


def test_fragments_of_a_whole_graph_and_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "lora.yaml", LORA)
    whole = show_text(compose("grpo")) + "use: lora.yaml\n"
    assert at(compose(write(tmp_path, "whole.yaml", whole)), "nodes.rollout.n") == 4
    monkeypatch.chdir(tmp_path)
    assert at(compose("grpo", ["use=[lora.yaml]"]), "models.policy.train.lora.rank") == 32
    assert at(compose("grpo", ["rollout.n=2", "use=lora.yaml"]), "nodes.rollout.n") == 4  # in their order
    assert at(compose("grpo", ["use=lora.yaml", "rollout.n=2"]), "nodes.rollout.n") == 2


def test_paths_in_a_fragment_are_relative_to_it(tmp_path: Path) -> None:
    write(tmp_path, "data/train.yaml", "edits: [{set: {prompts.files: [a.jsonl]}}]\n")
    graph = write(tmp_path, "mine.yaml", "graph: mine\nextends: grpo\nuse: [data/train.yaml]\n")
    files = compile_graph(graph, devices=1).functions["train"]["prompts"].attributes["files"]
    assert files == [str(tmp_path / "data/a.jsonl")]


def test_a_fragment_alone_is_no_graph(tmp_path: Path) -> None:
    graph = write(tmp_path, "lora.yaml", LORA)
    with pytest.raises(GraphError, match=r"use: \[lora.yaml\]"):
        compose(graph)
