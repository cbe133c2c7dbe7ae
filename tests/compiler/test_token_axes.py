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
            assert compile_graph("distill", edits, devices=1).notes == ()
            continue
        with pytest.raises(GraphError, match="numbers otherwise"):
            compile_graph("distill", edits, devices=1)


def test_what_nothing_tells_is_said_once() -> None:
    plan = compile_graph("distill", ["prompts.files=[a.jsonl]", "models.teacher.path=my/own"], devices=1)
    (note,) = (note for note in plan.notes if "vocabulary" in note)
    assert "`teacher` (my/own) reads tokens that `policy`" in note
