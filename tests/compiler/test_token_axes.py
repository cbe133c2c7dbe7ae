"""Columns meet along the tokens that they were made for, and a model reads its own vocabulary's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError

BAD = Path(__file__).parent / "bad"
LLAMA = "models.teacher.path=meta-llama/Llama-3.1-8B"


def test_what_is_realigned_meets_the_tokens_that_are_trained(tmp_path: Path) -> None:
    text = (BAD / "other_tokens.yaml").read_text().replace("hints.py", str(BAD / "hints.py"))
    remedy = "insert: {here: {op: realign, on: teacher_logprobs, in: {values: teacher_logprobs, MASK}}}"
    path = tmp_path / "realigned.yaml"
    path.write_text(f"{text}  - {remedy.replace('MASK', 'values_mask: hinted_mask')}\n")
    plan = compile_graph(str(path), devices=1)
    assert [step.node for step in plan.steps if step.op == "realign"] == ["here"]


def test_models_that_are_said_to_share_a_vocabulary_do() -> None:
    same = [f"models.{name}.vocabulary=merged" for name in ("policy", "teacher")]
    assert compile_graph("distill", ["prompts.files=[a.jsonl]", LLAMA, *same], devices=1).steps
    other = [same[0], "models.teacher.vocabulary=another"]
    with pytest.raises(GraphError, match="numbers otherwise"):
        compile_graph("distill", ["prompts.files=[a.jsonl]", LLAMA, *other], devices=1)


def test_files_decide_where_both_models_have_them(tmp_path: Path) -> None:
    """A vocabulary that goes on where another ends is the same; one with two tokens exchanged is not."""

    def model(name: str, vocabulary: dict[str, int], added: dict[str, int]) -> str:
        content = {"model": {"vocab": vocabulary}}
        tokens = [{"id": number, "content": text} for text, number in added.items()]
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": tokens}))
        return str(tmp_path / name)

    policy = f"models.policy.path={model('policy', {'a': 0, 'b': 1}, {'<end>': 2})}"
    for name, vocabulary, fits in (
        ("more", {"a": 0, "b": 1, "c": 3}, True),
        ("other", {"b": 0, "a": 1}, False),
    ):
        edits = [policy, f"models.teacher.path={model(name, vocabulary, {})}", "prompts.files=[a.jsonl]"]
        if fits:
            assert compile_graph("distill", edits, devices=1).steps
            continue
        with pytest.raises(GraphError, match="numbers otherwise"):
            compile_graph("distill", edits, devices=1)


def test_what_the_graph_does_not_tell_is_said_once_on_every_machine(tmp_path: Path) -> None:
    """A plan that was saved where the files are missing is the same where they are."""
    paths = [tmp_path / name for name in ("policy", "teacher")]
    edits = [*(f"models.{path.name}.path={path}" for path in paths), "prompts.files=[a.jsonl]"]
    before = compile_graph("distill", edits, devices=1)
    for path in paths:
        path.mkdir()
        (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    after = compile_graph("distill", edits, devices=1)
    assert before.notes == after.notes
    (note,) = (note for note in before.notes if "vocabulary" in note)
    assert note.startswith("`teacher` (") and "where both have a tokenizer.json" in note


def test_a_name_of_a_vocabulary_decides_no_number() -> None:
    named = [f"models.{name}.vocabulary=merged" for name in ("policy", "teacher")]
    teacher = "models.teacher.path=Qwen/Qwen3-8B"
    plain, other = (
        compile_graph("distill", ["prompts.files=[a.jsonl]", teacher, *more], 1) for more in ([], named)
    )
    assert plain.digest == other.digest


def test_a_column_that_nobody_asked_for_is_passed_over_on_other_tokens(tmp_path: Path) -> None:
    """Log-probs of hinted tokens read no routing of the tokens without the hint."""
    path = tmp_path / "routed.yaml"
    mixture = "Qwen/Qwen3-30B-A3B"
    hinted = "{op: logprobs, model: policy, in: {tokens: hinted, loss_mask: hinted_mask}}"
    path.write_text(
        "graph: routed\nextends: grpo\nedits:\n"
        f"- set: {{prompts.files: [a.jsonl], models.policy.path: {mixture}, rollout.routing: true}}\n"
        f"- add: {{hint: {{op: '{BAD / 'hints.py'}:hint'}}}}\n"
        f"- add: {{hinted_logprobs: {hinted}}}\n"
        "- add: {here: {op: realign, in: {values: hinted_logprobs, values_mask: hinted_mask}}}\n"
        "- set: {update_policy.in.ref_logprobs: here}\n"
    )
    plan = compile_graph(str(path), devices=1)
    read = {step.node: step.reads for step in plan.steps}
    assert "routing" not in read["hinted_logprobs"] and "routing" in read["update_policy"]
