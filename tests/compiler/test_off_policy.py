"""What rows of older weights need: which graphs are refused, and that each edit that is named mends one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.bind import bind
from rlgraph.frontend.compose import compose
from rlgraph.ir.graph import Graph
from rlgraph.lowering import lower

APART = "set: {pools: {train: {devices: 1}, gen: {devices: 1}}, schedule.buffer: {staleness: 1, by: batch}}"
REINFORCE = "set: {update_policy.loss: {kind: reinforce}, update_policy.minibatches: 1}"
TIS = "add: {rollout_weights: {op: correction.tis}}"
TO_ROLLOUT = "set: {update_policy.in.old_logprobs: rollout_logprobs}"
DECOUPLED = "replace: {update_policy.loss: {kind: decoupled_ppo}}"
RENAMED = "set: {rollout.out: {rollout_logprobs: measured}}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lowered(base: str, *edits: str) -> Graph:
    """A shipped graph with edits, each as YAML, through all passes."""
    body = "".join(f"  - {edit}\n" for edit in edits)
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\n" + (f"edits:\n{body}" if edits else ""))
    return lower(bind(compose("edited.yaml"), 2))


def problems(base: str, *edits: str) -> list[Problem]:
    with pytest.raises(GraphError) as caught:
        lowered(base, *edits)
    return list(caught.value.problems)


def named(remedy: str) -> list[list[str]]:
    """The ways out that a remedy names, ``a, or b``, each as its edits."""
    return [re.split(r", (?=(?:add|set|replace|remove): )", way) for way in remedy.split(", or ")]


def test_the_rollout_of_a_stale_schedule_reads_an_older_version() -> None:
    graph = lowered("grpo", APART, TO_ROLLOUT)
    assert graph.node("rollout").weights == "policy@v-1"
    assert graph.node("update_policy").weights == "policy@v"


@pytest.mark.parametrize("base", ["ppo", "grpo", "dapo", "gspo", "cispo", "gmpo", "sapo", "reinforce_pp"])
@pytest.mark.parametrize("edits", [(), (RENAMED,)], ids=["", "renamed"])
def test_a_ratio_to_a_recompute_is_refused_and_each_edit_that_is_named_makes_it_legal(
    base: str, edits: tuple[str, ...]
) -> None:
    lowered(base, *edits)  # legal as long as nothing is stale
    (problem,) = problems(base, APART, *edits)
    assert problem.kind == "stale-ratio"
    assert "sampled by policy@v-1" in problem.law
    assert "rollout (policy@v-1)" in problem.drawing
    ways = named(problem.remedy)
    assert len(ways) == 3
    for way in ways:
        lowered(base, APART, *edits, *way)


@pytest.mark.parametrize("base", ["opo", "gpg", "rloo", "remax"])
def test_a_loss_without_a_ratio_is_refused_and_weights_make_it_legal(base: str) -> None:
    (problem,) = problems(base, APART)
    assert problem.kind == "off-policy"
    ((edit,),) = named(problem.remedy)
    assert lowered(base, APART, edit).node("update_policy").call.ins["rollout_weights"] == "rollout_weights"
    # and still for one optimizer step alone
    (problem,) = problems(base, APART, edit, "set: {update_policy.minibatches: 2}")
    assert "2 optimizer steps" in problem.law


def test_the_clips_of_the_loss_stay_with_the_first_edit_that_is_named() -> None:
    own = "set: {update_policy.loss.dual_clip: 3.0}"
    (problem,) = problems("dapo", APART, own)
    (edit,), *_ = named(problem.remedy)
    (loss,) = lowered("dapo", APART, own, edit).node("update_policy").hooks.values()
    clips = {"level": "token", "clip": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "delta": None, "cap": 2.0}
    assert loss.op.name == "decoupled_ppo" and {**loss.attributes} == clips


def test_a_recompute_that_nothing_read_is_not_added_again() -> None:
    (problem,) = problems("grpo", APART, REINFORCE)
    assert problem.remedy == TIS
    lowered("grpo", APART, REINFORCE, problem.remedy)


@pytest.mark.parametrize("correction", ["tis, level: sequence", "mis", "reject, threshold: 0.1"])
def test_any_correction_makes_a_recompute_legal(correction: str) -> None:
    graph = lowered("grpo", APART, f"add: {{rollout_weights: {{op: correction.{correction}}}}}")
    update = graph.node("update_policy")
    assert update.call
    assert update.call.ins["rollout_weights"].startswith("rollout_weights")


def test_filtered_rows_are_weighed_too() -> None:
    informative = ("add: {informative: {op: filter.mixed}}", "set: {advantages.rows: informative}")
    graph = lowered("grpo", APART, TIS, *informative)
    assert any(read.startswith("rollout_weights/informative") for read in graph.node("update_policy").reads)
    lowered("grpo", APART, TIS, *informative, "set: {rollout_weights.rows: informative}")


def test_a_users_op_may_assume_a_law_and_read_none_of_its_columns() -> None:
    laws = ("behaviour_logprobs", "greedy_baseline", "sampling_logprobs")
    Path("mine.py").write_text(
        "from rlgraph.ops import float32, op, samples, text\n\n\n"
        f"@op(assumes={laws})\ndef length(responses: text[samples]) -> float32[samples]:\n"
        "    '''Shorter is better.'''\n"
    )
    lowered("grpo", "replace: {rewards: {op: 'mine.py:length'}}")


def test_corrections_chain() -> None:
    chain = "add: {capped: {op: correction.tis}, rollout_weights: "
    chain += "{op: correction.reject, threshold: 0.1, in: {weights: capped}}}"
    graph = lowered("grpo", APART, chain)
    assert "capped" in graph.node("rollout_weights").reads


def test_a_users_own_weights_are_taken_at_their_word() -> None:
    Path("mine.py").write_text(
        "from rlgraph.ops import float32, op, samples, tokens\n\n\n"
        "@op()\ndef ones(rollout_logprobs: float32[samples, tokens]) -> float32[samples, tokens]:\n"
        "    '''All count alike.'''\n"
    )
    for loss in ((), (REINFORCE,)):
        lowered("grpo", APART, *loss, "add: {rollout_weights: {op: 'mine.py:ones'}}")


@pytest.mark.parametrize("stale", [(), (APART,)], ids=["on-policy", "stale"])
@pytest.mark.parametrize("edits", [(TIS, TO_ROLLOUT), (TIS, DECOUPLED)])
def test_correcting_twice_is_refused(edits: tuple[str, ...], stale: tuple[str, ...]) -> None:
    (problem,) = problems("grpo", *stale, *edits)
    assert problem.kind == "corrected-twice"
    lowered("grpo", *stale, *edits, problem.remedy)


@pytest.mark.parametrize("edits", [(TIS,), (DECOUPLED,), (TO_ROLLOUT,), (REINFORCE, TIS)])
def test_a_correction_is_legal_on_policy_too(edits: tuple[str, ...]) -> None:
    lowered("grpo", *edits)


@pytest.mark.parametrize(
    ("kind", "base", "edits"),
    [
        ("wrong-behaviour", "grpo", [TIS, "set: {rollout_weights.in: {rollout_logprobs: ref_logprobs}}"]),
        ("wrong-behaviour", "grpo", [DECOUPLED, "set: {update_policy.in: {rollout_logprobs: ref_logprobs}}"]),
        ("wrong-weights", "grpo", [DECOUPLED, "set: {old_logprobs.model: ref}"]),
        ("wrong-weights", "grpo", [DECOUPLED, TO_ROLLOUT]),
        ("wrong-weights", "grpo", [DECOUPLED, "remove: [old_logprobs]", TO_ROLLOUT]),
        ("wrong-weights", "grpo", [DECOUPLED, "set: {update_policy.in: {old_logprobs: ref_logprobs}}"]),
        ("wrong-weights", "opo", [TIS, "add: {old: {op: logprobs, model: policy}}"
                                  "\n  - set: {rollout_weights.in: {old_logprobs: rollout_logprobs}}"]),
    ],
)  # fmt: skip
def test_weights_of_anything_else_are_refused_and_the_remedy_accepted(
    kind: str, base: str, edits: list[str]
) -> None:
    for stale in ((), (APART,)):
        found = [problem for problem in problems(base, *stale, *edits) if problem.kind == kind]
        assert found, kind
        ((*remedy,),) = named(found[0].remedy)
        lowered(base, *stale, *edits, *remedy)


def test_a_correction_of_rows_from_data_is_refused() -> None:
    edits = [
        "add: {old_logprobs: {op: logprobs, model: policy}, rollout_logprobs: {op: logprobs, model: policy}}"
    ]
    found = problems("demo_sft", *edits, TIS)
    assert {problem.kind for problem in found} == {"no-sampler"}
    lowered("demo_sft", *edits, TIS, found[0].remedy)


def test_another_model_that_sampled_needs_its_own_log_probs_as_ever() -> None:
    (problem,) = [p for p in problems("grpo", TIS, "set: {rollout.model: ref}") if p.kind == "wrong-ratio"]
    assert "model: ref" in problem.remedy


def test_a_second_update_that_weighs_rows_by_the_first_ones_weights_is_refused() -> None:
    second = "add: {second: {op: update.policy, model: policy, loss: {kind: reinforce}}}"
    (problem,) = problems("grpo", APART, TIS, second)
    assert problem.kind == "off-policy"
    assert "it updates policy@v+1" in problem.law


def test_the_decoupled_loss_keeps_its_recompute_only_where_it_makes_several_steps() -> None:
    steps = {}
    for minibatches in (1, 2):
        setting = f"update_policy.minibatches={minibatches}"
        plan = compile_graph("decoupled_ppo", [setting], devices=2)
        steps[minibatches] = "old_logprobs" in [step.node for step in plan.steps]
    assert steps == {1: False, 2: True}


def test_a_policy_update_measures_the_engines_wherever_the_rollout_is_that_of_its_rows() -> None:
    assert "rollout_logprobs" in lowered("grpo").node("update_policy").call.ins
    # an update on rows of data beside it has nothing to compare
    other = "add: {examples: {op: data.examples, files: [a], batch: 4, out: {tokens: t, loss_mask: m}}"
    other += ", sft: {op: update.policy, model: policy, in: {tokens: t, loss_mask: m}, loss: {kind: sft}}}"
    graph = lowered("grpo", other)
    assert set(graph.node("sft").call.ins) == {"tokens", "loss_mask"}


FP8 = "set: {models.policy.serve.engine: sglang, models.policy.serve.sglang.quantization: fp8}"


@pytest.mark.parametrize("base", ["ppo", "grpo", "gspo", "cispo", "reinforce_pp"])
def test_a_rollout_in_8_bits_wants_a_correction_and_each_that_is_named_makes_it_legal(base: str) -> None:
    (problem,) = problems(base, FP8)  # of the same version, and even where the recompute would be left out
    assert problem.kind == "quantized-ratio"
    assert "sampled by policy@v in fp8 (models.policy.serve.sglang.quantization)" in problem.law
    ways = named(problem.remedy)
    assert len(ways) == 3
    for way in ways:
        lowered(base, FP8, *way)


@pytest.mark.parametrize("base", ["gpg", "rloo"])
def test_a_loss_without_a_ratio_wants_weights_for_8_bits(base: str) -> None:
    (problem,) = problems(base, FP8)
    assert problem.kind == "off-policy" and "policy@v in fp8" in problem.law
    ((edit,),) = named(problem.remedy)
    lowered(base, FP8, edit)


def test_a_model_of_its_own_may_be_served_in_8_bits() -> None:
    lowered("grpo", FP8.replace("policy", "ref"))
