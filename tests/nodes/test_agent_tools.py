"""Tools: schemas from signatures, checks of what the policy gives, the shipped ones, limits on calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers.utils import get_json_schema

from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.toolbox import OfferedTool, Toolbox, check_tools
from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.tools.search import search
from rlgraph.ops import prompts, text
from rlgraph.ops.op_error import OpError
from rlgraph.ops.signature import signature
from rlgraph.ops.tools import Tool, tool_schema
from rlgraph.runtime.demo_tools import make_tokenizer


def look(query: str, top: int = 3, how: Literal["a", "b"] = "a", weights: list[float] = ()) -> str:  # type: ignore[assignment]
    """Look something up.

    Args:
        query: what to look for,
            in words.
        top: how many.
        how: in which way.
        weights: of the words.
    """
    return f"{query}/{top + 1}/{how}/{sum(weights)}"


class Guess:
    """Guess a number."""

    open: int = 0

    def __init__(self, answer: text[prompts], *, near: int = 0) -> None:
        self.answer, self.near, self.tries = int(answer), near, 0  # type: ignore[call-overload]

    async def create(self) -> None:
        Guess.open += 1

    def execute(self, number: int) -> str:
        """Say whether a number is too high.

        Args:
            number: the guess.
        """
        self.tries += 1
        return "right" if abs(number - self.answer) <= self.near else "wrong"

    def reward(self) -> float:
        return 1.0 / self.tries

    def release(self) -> None:
        Guess.open -= 1


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def blocks(seconds: float) -> str:
    """Wait, and let nobody else go on."""
    time.sleep(seconds)
    return "done"


def fails(kind: str) -> str:
    """Fail."""
    raise KeyError(kind)


def tool(body: Callable[..., Any], columns: Mapping[str, Any] | None = None, **attributes: Any) -> Tool:
    return Tool(body, attributes, columns or {})


def run(
    tools: dict[str, Tool], *calls: ToolCall, row: int = 0, timeout: float = 60.0
) -> tuple[list[str], float]:
    """Answers to calls made at the same time, and the reward."""

    async def all_of_them() -> tuple[list[str], float]:
        with ThreadPoolExecutor(64) as threads:
            box = Toolbox(OfferedTool.of(tools), row, threads, timeout)
            answers = await asyncio.gather(*map(box.run, calls))
            reward = await box.reward()
            await box.release()
            return list(answers), reward

    return asyncio.run(all_of_them())


def test_the_schema_is_the_one_that_transformers_would_make() -> None:
    def plain(query: str, top: int, exact: bool, words: list[str]) -> str:
        """Look something up.

        Args:
            query: what to look for.
            top: how many.
            exact: whether.
            words: which.
        """

    expected = get_json_schema(plain)["function"]
    expected.pop("return", None)
    made = tool_schema("plain", plain)["function"]
    assert json.dumps(made) == json.dumps(expected)  # in the same order: templates print it


def test_what_a_schema_says_of_defaults_and_choices() -> None:
    parameters = tool_schema("look", look)["function"]["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["query"] == {
        "type": "string",
        "description": "what to look for, in words.",
    }
    assert parameters["properties"]["how"]["enum"] == ["a", "b"]
    assert "additionalProperties" not in parameters


def test_a_class_names_columns_and_attributes_in_its_constructor() -> None:
    op = signature("Guess", Guess, Tool)
    assert [(port.name, str(port.type)) for port in op.inputs] == [("answer", "text[prompts]")]
    assert [*op.attributes.model_fields] == ["near"]
    schema = tool_schema("guess", Guess)["function"]
    assert schema["description"] == "Say whether a number is too high."
    assert schema["parameters"]["properties"] == {"number": {"type": "integer", "description": "the guess."}}


def test_a_function_mixes_what_the_policy_the_data_and_the_graph_give() -> None:
    def check(guess: int, answer: text[prompts], *, near: int = 0) -> str:
        """Check."""
        return f"{guess} {answer} {near}"

    op = signature("check", check, Tool)
    assert [port.name for port in op.inputs] == ["answer"]
    assert [*op.attributes.model_fields] == ["near"]
    assert [*tool_schema("check", check)["function"]["parameters"]["properties"]] == ["guess"]
    answers, _ = run(
        {"check": tool(check, {"answer": ["7", "8"]}, near=2)}, ToolCall("check", {"guess": 5}), row=1
    )
    assert answers == ["5 8 2"]


def test_columns_are_given_as_numbers_and_none_where_nobody_writes_them() -> None:
    def tell(a: int, size: int, more: int) -> str:
        return f"{a} {size!r} {more!r}"

    offer = OfferedTool(
        Tool(tell, {}, {"size": torch.tensor([4, 5])}), OfferedTool.of({"t": tool(blocks)})["t"].record
    )
    assert offer.bound_arguments(1) == {"a": None, "size": 5, "more": None}


@pytest.mark.parametrize(
    ("body", "law"),
    [
        (lambda x: x, "needs a name and an annotation"),
        (type("Empty", (), {}), "has no method `execute`"),
    ],
)
def test_a_tool_that_no_schema_can_be_made_of(body: Any, law: str) -> None:
    with pytest.raises(OpError, match=law):
        signature("t", body, Tool)


def test_a_parameter_of_a_type_that_json_does_not_know() -> None:
    def bad(x: torch.Tensor) -> str: ...

    with pytest.raises(OpError, match="op bad: "):
        signature("bad", bad, Tool)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"query": "x"}, "x/4/a/0"),
        ({"query": "x", "top": "5", "weights": ["1", 2]}, "x/6/a/3.0"),  # a parser of text gives text
        ({"query": 12}, "12/4/a/0"),
        ({}, "error: query: Field required; the arguments are: query, top, how, weights"),
        ({"query": "x", "how": "c"}, "error: how: Input should be 'a' or 'b'"),
        ({"query": "x", "topp": 1}, "error: topp: Extra inputs are not permitted"),
        ({"query": "x", "top": "many"}, "error: top: Input should be a valid integer"),
    ],
)
def test_what_the_policy_gives_is_checked(given: dict[str, Any], answer: str) -> None:
    (found,), _ = run({"look": tool(look)}, ToolCall("look", given))
    assert found.startswith(answer)


def test_errors_are_answers() -> None:
    tools = {"fails": tool(fails), "look": tool(look), "slow": tool(slow), "blocks": tool(blocks)}
    calls = [
        ToolCall("fails", {"kind": "x"}),
        ToolCall("lok", {"query": "x"}),
        ToolCall("", error="the call is not JSON"),
    ]
    answers, _ = run(tools, *calls)
    assert answers == [
        "error: KeyError: 'x'",
        "error: there is no tool 'lok'; did you mean `look`?",
        "error: the call is not JSON",
    ]
    assert run(tools, ToolCall("slow", {"seconds": 3600}), timeout=0.2)[0] == ["error: slow took over 0.2 s"]


def test_an_error_of_the_run_ends_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        run({"search": tool(search, corpus=str(tmp_path / "none.jsonl"))}, ToolCall("search", {"query": "x"}))


def test_what_a_run_lacks_is_found_before_it(tmp_path: Path) -> None:
    tokenizer, corpus = make_tokenizer(), tmp_path / "corpus.jsonl"
    tools = {"search": tool(search, corpus=str(corpus), column="text", top=1), "look": tool(look)}
    with pytest.raises(DataError, match="no such file"):
        check_tools(tools, tokenizer, None)
    for words, said in (
        ("", "corpus.jsonl: no rows"),
        ('{"text": "a"}\n{"text": 5}\n', "corpus.jsonl:2: 'text' is not text"),
        ('{"text": "a"}\n{"words": "b"}\n', "corpus.jsonl:2: has no column 'text'"),
    ):
        corpus.write_text(words)
        with pytest.raises(DataError, match=said):
            check_tools(tools, tokenizer, None)
    corpus.write_text('{"text": "a"}\n')
    check_tools(tools, tokenizer, None)
    tokenizer.chat_template = None
    check_tools({}, tokenizer, None)
    with pytest.raises(TemplateError, match="no chat template"):
        check_tools(tools, tokenizer, None)


@pytest.mark.parametrize("body", [slow, blocks])
def test_calls_run_at_the_same_time(body: Callable[..., Any]) -> None:
    start = time.monotonic()
    answers, _ = run({"wait": tool(body)}, *[ToolCall("wait", {"seconds": 0.5})] * 40)
    assert answers == ["done"] * 40
    assert time.monotonic() - start < 40 * 0.5 / 2


def test_one_instance_serves_a_conversation_and_is_released() -> None:
    guess = tool(Guess, {"answer": ["4", "7"]}, near=1)
    calls = [ToolCall("guess", {"number": number}) for number in (1, 6, "7")]
    answers, reward = run({"guess": guess, "look": tool(look)}, *calls, row=1)
    assert answers == ["wrong", "right", "right"]
    assert reward == pytest.approx(1 / 3)
    assert Guess.open == 0
    assert run({"guess": guess}) == ([], 0.0)  # never called, never made
