"""What each pass does to a small graph, and what holds of every plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_text import graph_text
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.graph import Graph
from rlgraph.ir.plan import Plan, Step
from rlgraph.lowering import lower, plan_tree
from rlgraph.passes import PASSES
from rlgraph.passes.prune import prune
from rlgraph.passes.verify import verify
from rlgraph.printing.plan_diff import against_text
from rlgraph.printing.plan_text import plan_text
from rlgraph.syntax.source import Source, parse
from rlgraph.syntax.yaml_text import show_text
from share import FAMILIES, edits_of, examples, rest_nightly

HEAD = """
graph: small
models:
  policy: {path: a/b, optimizer: {lr: 1e-4}}
  ref: {path: a/b, frozen: true}
schedule: {iterations: 3}
nodes:
  prompts: {op: data.prompts, files: [a.jsonl], batch: 8}
  rollout: {op: rollout, model: policy, n: 4, max_new_tokens: 8}
  rewards: {op: reward.exact}
"""
TAIL = """
  old_logprobs: {op: logprobs, model: policy}
  advantages: {op: advantage.grpo}
  update_policy: {op: update.policy, model: policy, minibatches: 2, loss: {kind: ppo_clip}}
"""


def lowered(text: str, devices: int = 1, until: str = "order") -> Graph:
    graph = bind(parse(Source("small.yaml", text)), devices)
    for apply in PASSES:
        graph = apply(graph)
        verify(graph, apply.__name__)
        if apply.__name__ == until:
            return graph
    raise AssertionError(f"no pass {until}")


def planned(text: str, devices: int = 1) -> Plan:
    return plan_tree(parse(Source("small.yaml", text)), devices)


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_infer_finds_edges_columns_and_domains() -> None:
    graph = lowered(HEAD + TAIL, until="infer")
    update = graph.node("update_policy")
    assert update.reads == ("tokens", "loss_mask", "rollout_logprobs", "old_logprobs", "advantages")
    assert graph.columns["advantages"].label == "float32[samples, tokens]"
    assert graph.columns["prompt"].label == "int64[prompts, prompt_tokens]"
    assert (graph.domains["samples"].parent, graph.domains["samples"].times) == ("prompts", 4)
    assert [reader.name for reader in graph.readers("rewards")] == ["advantages"]


def test_infer_repeats_a_prompt_column_once_for_all_its_readers() -> None:
    graph = lowered(HEAD + "  again: {op: reward.exact}\n" + TAIL, until="infer")
    repeats = [node for node in graph.nodes if node.kind == "repeat"]
    assert [(node.reads, node.writes) for node in repeats] == [(("answer",), ("answer*samples",))]
    assert "answer*samples" in graph.node("rewards").reads and "answer*samples" in graph.node("again").reads


def test_infer_maps_by_in_and_out() -> None:
    text = HEAD.replace(
        "op: reward.exact", "op: reward.exact, in: {responses: words}, out: {rewards: scores}"
    )
    text = text.replace("n: 4,", "n: 4, out: {responses: words},")
    graph = lowered(
        text + TAIL.replace("advantage.grpo", "advantage.grpo, in: {rewards: scores}"), until="infer"
    )
    assert graph.node("rewards").reads[0] == "words"
    assert graph.columns["scores"].writer == "rewards"


def test_infer_reads_optional_columns_only_where_an_attribute_asks() -> None:
    reads = {}
    for kl_coef in ("0", "0.1"):
        text = HEAD + "  ref_logprobs: {op: logprobs, model: ref}\n"
        text += TAIL.replace("minibatches: 2", f"kl_coef: {kl_coef}")
        reads[kl_coef] = "ref_logprobs" in lowered(text, until="infer").node("update_policy").reads
    assert reads == {"0": False, "0.1": True}


def test_two_rollouts_make_two_domains() -> None:
    outs = "tokens: t2, loss_mask: m2, rollout_logprobs: l2, responses: r2, group: g2, truncated: c2"
    second = f"  second: {{op: rollout, model: policy, n: 2, max_new_tokens: 8, out: {{{outs}}}}}\n"
    graph = lowered(HEAD + second + "  more: {op: reward.exact, in: {responses: r2}}\n" + TAIL, until="infer")
    assert graph.columns["t2"].domain == "samples:second"
    assert {node.name for node in graph.nodes if node.kind == "repeat"} == {
        "answer*samples",
        "answer*samples:second",
    }


def test_version_puts_a_reader_before_the_update_wherever_it_is_written() -> None:
    late = "  late: {op: logprobs, model: policy}\n  after: {op: logprobs, model: policy@next}\n"
    graph = lowered(HEAD + TAIL + late, until="version")
    assert graph.node("late").version == graph.node("update_policy").version == 0
    assert set(graph.node("update_policy").after) >= {"rollout", "late", "old_logprobs"}
    assert (graph.node("after").version, graph.node("after").after) == (1, ("update_policy",))


def test_updates_follow_one_another() -> None:
    second = TAIL.strip("\n").splitlines()[-1].replace("update_policy", "second")
    graph = lowered(HEAD + TAIL + second, until="version")
    assert [graph.node(n).version for n in ("update_policy", "second")] == [0, 1]
    assert "update_policy" in graph.node("second").after


def test_old_logprobs_written_after_the_update_still_run_before_it() -> None:
    lines = TAIL.strip("\n").splitlines()
    graph = lowered(HEAD + "\n".join([lines[2], lines[1], lines[0]]))
    order = names(graph)
    assert order.index("old_logprobs") < order.index("update_policy")


def test_prune_drops_what_leads_to_no_update_and_says_so() -> None:
    plan = compile_graph("grpo", ["update_policy.kl_coef=0", "prompts.files=[a]"], 1)
    assert plan.notes == ("pruned `ref_logprobs`: it leads to no update",)
    assert "ref" not in plan.models
    assert "ref_logprobs" not in plan.columns["train"]
    assert "note: pruned `ref_logprobs`" in plan_text(plan)


def test_prune_with_nothing_to_do_returns_its_input() -> None:
    graph = lowered(HEAD + TAIL, until="version")
    assert prune(graph) is graph


def test_prune_drops_the_repeat_of_what_it_drops() -> None:
    text = HEAD + TAIL.replace("advantage.grpo", "advantage.grpo, in: {rewards: other}")
    graph = lowered(text + "  other: {op: reward.math}\n", until="prune")
    assert "rewards" not in names(graph) and "answer*samples" in names(graph)


def test_a_graph_without_updates_keeps_everything() -> None:
    assert set(names(lowered(HEAD, until="prune"))) == {"prompts", "rollout", "rewards", "answer*samples"}


def test_partition_moves_nothing_on_one_device() -> None:
    graph = lowered(HEAD + TAIL, 1, "partition")
    assert not [node for node in graph.nodes if node.kind == "repartition"]
    assert {node.layout for node in graph.nodes} == {"one"}


def test_partition_on_two_devices() -> None:
    graph = lowered(HEAD + TAIL, 2, "partition")
    assert {node.name: node.layout for node in graph.nodes if not node.inserted} == {
        "prompts": "one",
        "rollout": "even",
        "rewards": "even",
        "old_logprobs": "balanced/2",
        "advantages": "even",
        "update_policy": "balanced/2",
    }
    moves = {node.name: node.reads for node in graph.nodes if node.kind == "repartition"}
    assert moves == {
        "repartition:rollout": ("prompt",),
        "repartition:answer*samples": ("answer",),
        "repartition:old_logprobs": ("tokens", "loss_mask"),
        "repartition:update_policy": ("rollout_logprobs", "advantages"),
    }


def test_partition_moves_again_for_another_number_of_minibatches() -> None:
    second = (
        TAIL.strip("\n").splitlines()[-1].replace("update_policy", "second").replace("ches: 2", "ches: 3")
    )
    graph = lowered(HEAD + TAIL + second, 2, "partition")
    assert {"tokens@balanced/2", "tokens@balanced/3"} <= {*graph.columns}


def test_sync_comes_once_a_version() -> None:
    outs = "tokens: t2, loss_mask: m2, rollout_logprobs: l2, responses: r2, group: g2, truncated: c2"
    third = outs.replace("2", "3")
    more = f"  second: {{op: rollout, model: policy, max_new_tokens: 8, out: {{{outs}}}}}\n"
    more += f"  third: {{op: rollout, model: policy@next, max_new_tokens: 8, out: {{{third}}}}}\n"
    graph = bind(parse(Source("small.yaml", HEAD + more + TAIL)), 1)
    for apply in PASSES:  # without prune: nothing reads what the second and third make
        graph = apply(graph) if apply.__name__ != "prune" else graph
    syncs = [node.name for node in graph.nodes if node.kind == "sync"]
    assert syncs == ["sync:policy", "sync:policy+1"]
    order = names(graph)
    assert order.index("sync:policy") < order.index("rollout")
    assert order.index("update_policy") < order.index("sync:policy+1") < order.index("third")


def test_order_is_deterministic() -> None:
    assert [compile_graph("ppo", devices=3) for _ in range(3)].count(compile_graph("ppo", devices=3)) == 3


def test_order_takes_a_chain_of_thousands() -> None:
    chain = "".join(
        f"  u{n}: {{op: update.policy, model: policy, loss: {{kind: sft}}}}\n" for n in range(2000)
    )
    graph = lowered(HEAD + chain)
    order = [name for name in names(graph) if name.startswith("u")]
    assert order == [f"u{n}" for n in range(2000)]


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_of_a_family(family: str, golden: Callable[[str, str], None]) -> None:
    """The whole text on two devices, and what is different on one."""
    two, one = (compile_graph(family, devices=devices) for devices in (2, 1))
    golden(f"plan/{family}.txt", f"{plan_text(two)}\n== on one device\n{against_text(two, one)}")


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_of_its_edits(family: str, golden: Callable[[str, str], None]) -> None:
    """What is different about the plans of the other shipped graphs, on two devices and on one."""
    found = []
    for name in edits_of(family):
        two, one = (
            against_text(compile_graph(family, devices=devices), compile_graph(name, devices=devices))
            for devices in (2, 1)
        )
        found += [f"== {name}, on two devices\n{two}", f"== {name}, on one device\n{one}"]
    if found:
        golden(f"plan/{family}-edits.txt", "\n".join(found))


def test_show_with_origins(golden: Callable[[str, str], None]) -> None:
    golden("show/demo-origin.txt", show_text(compose("demo"), origin=True))


def test_a_failed_step_is_marked() -> None:
    plan = compile_graph("grpo", devices=2)
    (line,) = [line for line in plan_text(plan, ("train", 4)).splitlines() if line.startswith("!")]
    assert line == "!   4. run rollout (rollout) with policy@v on main[0-1]"


def check_columns(plan: Plan, phase: str, steps: tuple[Step, ...]) -> None:
    """A column is written once, before its readers, and freed once, after the last of them."""
    columns, alive, freed = plan.columns[phase], set(), set()
    for number, step in enumerate(steps, 1):
        assert step.id == number
        assert set(step.reads) <= alive, f"{step.node} reads what is not there"
        assert not set(step.writes) & (alive | freed), f"{step.node} writes again"
        assert all(before < step.id for before in step.after)
        alive |= set(step.writes)
        assert set(step.frees) <= alive
        if step.kind in ("run", "repeat"):
            assert all(columns[name].layout == step.layout for name in (*step.reads, *step.writes))
        if step.kind == "repartition":
            assert all(columns[name].layout == step.layout for name in step.writes)
            assert all(columns[name].layout != step.layout for name in step.reads)
        alive, freed = alive - set(step.frees), freed | set(step.frees)
        later = {name for after in steps[number:] for one in plan.terms(after) for name in one.reads}
        assert not set(step.frees) & later and not (alive - later - set(plan.report.values()))
    assert alive == (set(plan.report.values()) if phase == "eval" else set())


def check_plan(plan: Plan, devices: int) -> None:
    for phase, steps in (("train", plan.steps), ("eval", plan.eval_steps)):
        if steps:
            check_columns(plan, phase, steps)
    assert devices > 1 or not [step for step in plan.steps if step.kind == "repartition"]
    for step in (*plan.steps, *plan.eval_steps):
        assert set(step.devices) <= set(range(devices))
        assert set(step.models) <= {*plan.models}
    assert json.loads(plan.json())["graph"] == plan.graph


@examples(100)
@given(name=st.sampled_from([*shipped_graphs()]), devices=st.integers(1, 64))
def test_columns_live_as_long_as_they_are_read_on_any_number(name: str, devices: int) -> None:
    check_plan(compile_graph(name, devices=devices), devices)


@pytest.mark.parametrize(
    ("name", "devices"),
    rest_nightly(product(shipped_graphs(), range(1, 9)), lambda name, devices: devices in (1, 8)),
)
def test_columns_live_as_long_as_they_are_read(name: str, devices: int) -> None:
    check_plan(compile_graph(name, devices=devices), devices)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Valid graphs: a rollout, any number of scores, log-probs and updates, in any order in the file."""
    model = st.sampled_from(["policy", "ref"])
    nodes: dict[str, Any] = {
        "prompts": {"op": "data.prompts", "files": ["a.jsonl"], "batch": 8},
        "rollout": {"op": "rollout", "model": "policy", "n": draw(st.integers(2, 4)), "max_new_tokens": 8},
        "old_logprobs": {"op": "logprobs", "model": "policy"},
    }
    rewards = [f"rewards{n}" for n in range(draw(st.integers(1, 3)))]
    nodes |= {name: {"op": draw(st.sampled_from(["reward.exact", "reward.math"]))} for name in rewards}
    logprobs = ["old_logprobs", *(f"logprobs{n}" for n in range(draw(st.integers(0, 3))))]
    nodes |= {name: {"op": "logprobs", "model": draw(model)} for name in logprobs[1:]}
    nodes["ref_logprobs"] = {"op": "logprobs", "model": "ref"}
    olds = [name for name in logprobs if nodes[name]["model"] == "policy"]
    refs = ["ref_logprobs", *(name for name in logprobs if name not in olds)]
    advantages = [f"advantages{n}" for n in range(draw(st.integers(1, 2)))]
    for name in advantages:
        nodes[name] = {"op": "advantage.grpo", "in": {"rewards": draw(st.sampled_from(rewards))}}
    for number in range(draw(st.integers(1, 3))):
        ins = {
            "advantages": draw(st.sampled_from(advantages)),
            "old_logprobs": draw(st.sampled_from(olds)),
            "ref_logprobs": draw(st.sampled_from(refs)),
        }
        nodes[f"update{number}"] = {
            "op": "update.policy",
            "model": "policy",
            "minibatches": draw(st.integers(1, 3)),
            "kl_coef": 0.1,
            "loss": {"kind": "ppo_clip"},
            "in": ins,
        }
    return {name: nodes[name] for name in draw(st.permutations([*nodes]))}


@examples(60)
@given(nodes=graphs(), devices=st.integers(1, 5))
def test_columns_live_as_long_as_they_are_read_in_any_graph(nodes: dict[str, Any], devices: int) -> None:
    text = HEAD.partition("nodes:")[0] + "nodes: " + json.dumps(nodes)
    check_plan(planned(text, devices), devices)


def test_a_graph_of_nothing_is_an_empty_plan() -> None:
    plan = planned("graph: nothing\nnodes: {}\nschedule: {iterations: 1}")
    assert plan.steps == () and "0 steps per iteration" in plan_text(plan)


def test_the_verifier_names_the_pass() -> None:
    graph = lowered(HEAD + TAIL)
    broken = Graph(**{**vars(graph), "nodes": graph.nodes[1:]})
    with pytest.raises(AssertionError, match="pass order: "):
        verify(broken, "order")


def test_lowering_is_pure() -> None:
    graph = bind(compose("grpo"), 2)
    before = graph_text(graph)
    first, second = lower(graph), lower(graph)
    assert first == second and graph_text(graph) == before


def test_a_cycle_by_versions_is_an_error_of_the_graph() -> None:
    tree = compose("ppo", ["values.model=critic@next"])
    with pytest.raises(GraphError, match="nodes wait for each other"):
        lower(bind(tree, 2))


def test_a_users_op(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlgraph.ops import float32, op, samples, text\n\n\n"
        "@op()\ndef length(responses: text[samples], *, limit: int = 8) -> float32[samples]:\n"
        "    '''Shorter is better.'''\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD.replace("reward.exact", "mine.py:length, limit: 4") + TAIL)
    plan = compile_graph(str(path), devices=1)
    function = plan.functions["train"]["rewards"]
    assert function.target == f"{tmp_path.resolve()}/mine.py:length"
    assert function.attributes == {"limit": 4}
