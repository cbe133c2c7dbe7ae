"""A rollout with n: 1 makes one row per prompt; and the law that ReMax's baseline is of a greedy one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.ir.graph import Graph
from rlgraph.ir.plan import Plan
from rlgraph.lowering import lower

OUTS = ("tokens", "loss_mask", "rollout_logprobs", "responses", "group", "truncated")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def second(name: str, n: int = 1, prompt: str = "prompt") -> str:
    """An edit that adds a rollout whose columns all start with its name."""
    outs = ", ".join(f"{out}: {name}_{out}" for out in OUTS)
    call = f"op: rollout, model: policy, n: {n}, max_new_tokens: 8, in: {{prompt: {prompt}}}"
    return f"add: {{{name}: {{{call}, out: {{{outs}}}}}}}"


def written(base: str, *edits: str) -> str:
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def lowered(base: str, *edits: str) -> Graph:
    return lower(bind(compose(written(base, *edits)), 2))


def planned(base: str, *edits: str, devices: int = 2) -> Plan:
    return compile_graph(written(base, *edits), devices=devices)


def problems(base: str, *edits: str) -> list[Problem]:
    with pytest.raises(GraphError) as caught:
        lowered(base, *edits)
    return list(caught.value.problems)


def test_a_column_of_a_rollout_of_one_is_repeated_to_the_samples_of_another() -> None:
    graph = lowered("remax")
    advantages = graph.node("advantages")
    assert advantages.domain == "samples"
    (copy,) = [node for node in graph.nodes if node.writes == ("greedy_rewards*samples",)]
    assert (copy.kind, copy.domain) == ("repeat", "samples")
    assert graph.domains["samples:greedy"].times == 1


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("first", ["rollout", "greedy"])
def test_whichever_is_written_first_the_samples_decide(n: int, first: str) -> None:
    """What has tokens makes a node's rows; one row per prompt follows them, also where both have n: 1."""
    order = [f"set: {{rollout.n: {n}}}"]
    if first == "greedy":
        whole = compose("remax").plain()["nodes"]["rollout"]
        order += ["remove: [rollout]", f"add: {{rollout: {whole}}}".replace("'", "")]
    graph = lowered("remax", *order)
    sampled = graph.columns["tokens"].domain
    assert graph.node("advantages").domain == graph.node("update_policy").domain == sampled
    assert graph.domains[sampled].maker == "rollout"


def test_a_filter_of_the_samples_selects_from_what_was_repeated() -> None:
    plan = planned("remax", "add: {good: {op: filter.threshold, min: 0.5}}", "set: {advantages.rows: good}")
    copies = {step.writes[0]: step.kind for step in plan.steps if step.inserted and step.writes}
    assert copies["greedy_rewards*samples"] == "repeat"
    assert copies["greedy_rewards*samples/good"] == "select"


def test_of_two_columns_without_tokens_the_first_read_decides() -> None:
    Path("mine.py").write_text(
        "from rlgraph.ops import float32, op, samples\n\n\n"
        "@op()\ndef gain(rewards: float32[samples], other: float32[samples]) -> float32[samples]:\n"
        "    '''How much more.'''\n"
    )
    gain = "add: {gain: {op: 'mine.py:gain', in: {other: greedy_rewards}}}"
    graph = lowered("remax", gain, "set: {shaped.in: {rewards: gain}, rollout.n: 1}")
    assert graph.columns["gain"].domain == "samples"


@pytest.mark.parametrize(
    ("n", "prompt", "column", "said"),
    [
        (2, "prompt", "more_truncated", "set: {more.n: 1}"),
        (1, "p2", "more_truncated", "come from the same rollout or source"),
        (
            1,
            "prompt",
            "more_loss_mask",
            "come from the same rollout or source",
        ),  # tokens are each sample's own
    ],
)
def test_what_stays_unrelated(n: int, prompt: str, column: str, said: str) -> None:
    axis = ", tokens" if "mask" in column else ""
    Path("mine.py").write_text(
        "from rlgraph.ops import boolean, float32, op, samples, tokens\n\n\n"
        f"@op()\ndef other(loss_mask: boolean[samples, tokens], cut: boolean[samples{axis}]) -> "
        "float32[samples]:\n    '''Of two rollouts.'''\n"
    )
    data = "{prompt: p2, question: q2, answer: a2, source: s2}"
    edits = [
        f"add: {{others: {{op: data.prompts, files: [b.jsonl], batch: 8, out: {data}}}}}",
        second("more", n, prompt),
        f"set: {{rewards: {{op: 'mine.py:other', in: {{cut: {column}}}}}}}",
    ]
    (problem,) = problems("grpo", *edits)
    assert (problem.kind, said in problem.remedy) == ("unrelated-domains", True)
    assert f"more ─ {column} ─┐" in problem.drawing
    if "set:" in problem.remedy:
        lowered("grpo", *edits, problem.remedy[problem.remedy.index("set:") :])


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (["set: {greedy.temperature: 1.0}"], "samples at temperature 1.0"),
        (["set: {greedy.model: ref}"], "`greedy` samples with ref@v, `rollout` with policy@v"),
        (["set: {greedy.model: policy@next}"], "`greedy` samples with policy@v+1"),
        (["set: {rollout.model: ref}"], "`greedy` samples with policy@v, `rollout` with ref@v"),
        (["remove: [greedy.temperature]", "set: {greedy.model: ref}"], "temperature 1.0"),
        (
            ["remove: [greedy, greedy_rewards]", "set: {advantages.in.greedy_rewards: rewards}"],
            "very samples",
        ),
    ],
)
def test_a_baseline_of_anything_else_is_refused_and_its_remedy_accepted(edits: list[str], said: str) -> None:
    # the loss has a ratio, so that nothing else of these graphs is wrong
    ratio = ["set: {update_policy.loss: {kind: ppo_clip}}"]
    if "set: {rollout.model: ref}" in edits:
        ratio.append("set: {old_logprobs.model: ref, ref_logprobs.model: policy}")
    (problem,) = [problem for problem in problems("remax", *ratio, *edits) if problem.kind == "no-greedy"]
    assert said in problem.law
    assert "rollout (" in problem.drawing
    remedy = re.split(r", (?=set: )", problem.remedy)
    lowered("remax", *ratio, *edits, *remedy)


def test_both_rollouts_of_a_stale_schedule_sample_with_the_same_weights() -> None:
    apart = (
        "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
    )
    graph = lowered("remax", apart, "add: {rollout_weights: {op: correction.tis}}")
    assert graph.node("greedy").weights == graph.node("rollout").weights == "policy@v-1"
