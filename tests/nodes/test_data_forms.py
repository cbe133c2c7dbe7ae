"""Forms of rows that users bring: each is normalised, or refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_tokenizer import CHATML, tokenizer_of
from rlgraph.nodes.data.pairs import load_pairs
from rlgraph.nodes.reward.math import math
from rlgraph.nodes.reward.text import exact, f1
from rlgraph.nodes.support.conversation import Asked, ReadingOptions, asked
from rlgraph.nodes.support.dataset import load_examples, load_prompts
from rlgraph.nodes.support.row_field import DataError
from rlgraph.ops import Context

USER, YES, NO = (
    {"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "a"), ("assistant", "b"))
)


def read(row: dict[str, Any], **reading: Any) -> Asked:
    return asked("rows.jsonl:3", row, ReadingOptions(**reading))


def talk(messages: Any, **reading: Any) -> list[dict[str, Any]]:
    return [*read({"m": messages}, **{"question": "m", "answer": None, **reading}).turns]


CALL = {"name": "f", "arguments": {"a": 1}}
FORMS = {
    "ShareGPT": ([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}], [USER, YES]),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, YES],
        [USER, YES],
    ),
    "nulls of Arrow": ([{**USER, "name": None}, {**YES, "tool_calls": None}], [USER, YES]),
    "ShareGPT's call": (
        [{"from": "human", "value": "hi"}, {"from": "function_call", "value": json.dumps(CALL)}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}],
    ),
    "function_call": (
        [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        ],
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_normalised(form: str) -> None:
    messages, right = FORMS[form]
    assert talk(messages) == right


REFUSED = {
    "an image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, YES], "'image_url'"),
    "a sender that nobody knows": ([{"from": "alice", "value": "hi"}], "is from 'alice'"),
    "half ShareGPT": ([USER, {"role": "gpt", "content": "a"}], "has the role 'gpt'"),
    "messages in a text": (json.dumps([USER, YES]), "a text that holds messages as JSON"),
    "arguments that are no JSON": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}],
        "is not JSON",
    ),
    "arguments that are a list": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        "arguments are a mapping",
    ),
    "no content": ([USER, {"role": "assistant", "content": None}], "no content that is a text"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_half_a_form_is_refused(form: str) -> None:
    messages, law = REFUSED[form]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: ") as caught:
        talk(messages)
    assert law in str(caught.value)


def test_a_question_beside_whole_conversations_is_there_once() -> None:
    row = read({"prompt": "hi", "chosen": [USER, YES]}, question="prompt", answer="chosen")
    assert (row.turns, row.first_turn) == ([USER, YES], 1)
    system = {"role": "system", "content": "s"}
    row = read({"prompt": "hi", "chosen": [system, USER, YES]}, question="prompt", answer="chosen")
    assert (row.turns, row.first_turn) == ([system, USER, YES], 2)
    with pytest.raises(DataError, match="'chosen' begins with a question of its own"):
        read({"prompt": "ho", "chosen": [USER, YES]}, question="prompt", answer="chosen")


def test_a_prompt_does_not_hold_its_answer() -> None:
    with pytest.raises(DataError, match="'m' ends with the assistant's turn, and 'answer' holds the answer"):
        read({"m": [USER, YES], "answer": "a"}, question="m")
    options = {"continue_final_message": True}
    row = read({"m": [USER, YES], "answer": "a"}, question="m", template_options=options)
    assert row.question == [USER, YES]
    with pytest.raises(DataError, match="needs a question that ends with the assistant's turn"):
        read({"m": [USER], "answer": "a"}, question="m", template_options=options)


@pytest.mark.parametrize("answer", [["Paris", "City of Light"], True, [1, 2], []])
def test_an_answer_without_a_clear_text_is_refused(answer: Any) -> None:
    with pytest.raises(
        DataError, match=r"rows\.jsonl:3: 'gold' is not text.*columns: \{answers: \{from: gold"
    ):
        read({"question": "q", "gold": answer}, answer="gold")


@pytest.mark.parametrize("gold", [{"value": "Paris", "aliases": ["Paris"]}, {"inputs": ["1"]}, {}])
def test_an_answer_that_is_a_mapping_is_refused(gold: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:3: 'gold' is not text, but a mapping.*answer: gold\."):
        read({"question": "q", "gold": gold}, answer="gold")
    assert read({"question": "q", "gold": {"value": "Paris"}}, answer="gold.value").answer == "Paris"


def test_a_list_of_mappings_is_refused_as_an_answer() -> None:
    with pytest.raises(
        DataError, match=r"rows\.jsonl:3: 'tests' is not text.*columns: \{NAME: \{from: tests"
    ):
        read({"question": "q", "tests": [{"input": "1", "output": "2"}]}, answer="tests")


def test_the_tests_of_a_program_are_an_answer_as_json() -> None:
    tests = {"inputs": ["1"], "outputs": ["é"], "fn_name": "f"}
    assert json.loads(read({"question": "q", "gold": tests}, answer="gold").answer) == tests


def test_numbers_are_written_as_they_read_back() -> None:
    for number, text in ((3, "3"), (0.1, "0.1"), (2**70, str(2**70))):
        assert read({"question": "q", "answer": number}).answer == text


def test_the_best_of_several_answers_counts() -> None:
    ctx = Context(node="rewards", seed=0, iteration=0, position=0)
    gold = [["Paris", "City of Light"], ["4"], ["Rome"]]
    responses = ["city of light", "4", "Oslo"]
    assert f1(ctx, responses, [""] * 3, gold).tolist() == [1.0, 1.0, 0.0]
    assert torch.equal(exact(ctx, responses, None, gold), torch.tensor([0.0, 1.0, 0.0]))
    boxed = [r"\boxed{0.5}", r"\boxed{3}", "none"]
    right = [["7", r"\frac{1}{2}"], [4, 3.0], ["none of these", "1"]]
    assert math(ctx, boxed, None, right).tolist() == [1.0, 1.0, 0.0]
    assert math(ctx, boxed, ["1/2", "4", "none"]).tolist() == [1.0, 0.0, 0.0]
    for wrong in ([], [{"a": 1}], [None]):
        with pytest.raises(DataError, match="is not a list of texts"):
            exact(ctx, ["a"], None, [wrong])


def test_questions_are_known_by_the_whole_conversation() -> None:
    def words(first: str) -> str:
        go_on = {"role": "user", "content": "Go on."}
        return read({"m": [{**USER, "content": first}, YES, go_on], "answer": "x"}, question="m").words

    assert words("one") != words("two")


def test_pairs_that_are_equal_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"chosen": [USER, YES], "rejected": [USER, NO]}, {"chosen": [USER, YES], "rejected": [USER, YES]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_pairs(tokenizer_of(CHATML), files=[str(file)], question=None)
    assert (len(data), data.equal) == (1, 1)
    file.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: chosen equals rejected"):
        load_pairs(tokenizer_of(CHATML), files=[str(file)], question=None)


NOTHING = {
    "ends with the user": ({"m": [USER, YES, USER]}, {"question": "m", "answer": None}),
    "a text alone": ({"m": "hi"}, {"question": "m", "answer": None}),
    "an empty answer": ({"question": "hi", "answer": ""}, {}),
    "a null": ({"question": "hi", "answer": None}, {}),
    "white space": ({"m": [USER, {"role": "assistant", "content": " "}]}, {"question": "m", "answer": None}),
}


@pytest.mark.parametrize("case", NOTHING)
def test_examples_have_something_to_imitate(tmp_path: Path, case: str) -> None:

    row, reading = NOTHING[case]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: "):
        load_examples(tokenizer_of(CHATML), files=[str(file)], **reading)


def test_a_rows_own_tools_are_read_as_schemas_in_each_form() -> None:
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
    for given in (schemas, json.dumps(schemas), [json.dumps(schema) for schema in schemas]):
        row = read({"question": "q", "answer": "a", "tools": given}, row_tools="tools")
        assert row.options == {"tools": schemas}


def test_a_field_within_a_column_is_an_answer() -> None:
    row = {"prompt": [USER], "reward_model": {"ground_truth": "72", "style": "rule"}}
    assert read(row, question="prompt", answer="reward_model.ground_truth").answer == "72"
    with pytest.raises(DataError, match=r"'reward_model' is not text.*as answer: reward_model\.ground_truth"):
        read(row, question="prompt", answer="reward_model")


def test_a_turn_that_is_begun_is_rendered_open(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    begun = [USER, {"role": "assistant", "content": "<think>\n"}]
    file.write_text(json.dumps({"m": begun, "answer": "a"}) + "\n")
    tokenizer = tokenizer_of(CHATML)
    options = {"continue_final_message": True}
    data = load_prompts(tokenizer, files=[str(file)], question="m", suffix="!", template_options=options)
    (ids,) = data.column("ids", [0])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi!<|im_end|>\n<|im_start|>assistant\n<think>\n"
