"""Calls of tools and what tools give, as users bring them: written down before the code was looked at."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rlgraph.nodes.agent.parsers import ToolCall, hermes, plain_json, qwen
from rlgraph.nodes.agent.toolbox import OfferedTool, Toolbox
from rlgraph.nodes.reward.functions import verl
from rlgraph.ops import Context
from rlgraph.ops.tools import Tool

F = {"name": "f", "arguments": {"a": 1}}
CALLED = [ToolCall("f", {"a": 1})]


def tagged(call: Any) -> str:
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


# 6. A parser reads calls alone, and nothing as a call that is none

HERMES: dict[str, tuple[str, list[ToolCall] | str]] = {
    "tags within a text that is passed": (
        tagged({"name": "f", "arguments": {"a": "<tool_call>x</tool_call>"}}),
        [ToolCall("f", {"a": "<tool_call>x</tool_call>"})],
    ),
    "a tag that is not closed": (f"<tool_call>\n{json.dumps(F)}", CALLED),
    "thinking that does not end": (f"<think>maybe {tagged(F)}", []),
    "thinking that the template began": (f"I could {tagged({'name': 'g'})}</think>{tagged(F)}", CALLED),
    "thinking before and behind": (
        f"<think>a</think>{tagged(F)}<think>{tagged({'name': 'g'})}</think>so",
        CALLED,
    ),
    "a mark of thinking in the answer": (f"{tagged(F)} writes <think> first", CALLED),
    "two calls in one tag": (tagged(f"{json.dumps(F)}\n{json.dumps(F)}"), "not JSON"),
    "a list in one tag": (tagged([F, F]), 'must be {"name"'),
    "Python's quotes": (tagged("{'name': 'f', 'arguments': {'a': 1}}"), "not JSON"),
    "Llama's key": (tagged({"name": "f", "parameters": {"a": 1}}), CALLED),
    "the wrapper of OpenAI's": (tagged({"type": "function", "function": F}), 'must be {"name"'),
    "a tag that closes nothing": ("x</tool_call>", []),
}


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def function(inside: str, name: str = "f") -> str:
    return f"<function={name}>\n{inside}</function>\n"


def qwens(inside: str) -> str:
    return f"<tool_call>\n{inside}</tool_call>"


QWEN: dict[str, tuple[str, list[ToolCall] | str]] = {
    "values on the line of their tag": (
        "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>",
        [ToolCall("f", {"a": "x"})],
    ),
    "without the outer tag, which Qwen3-Coder forgets": (
        function(parameter("a", "x")),
        [ToolCall("f", {"a": "x"})],
    ),
    "a closing tag that was forgotten": (
        qwens(function("<parameter=a>\nx\n" + parameter("b", "y"))),
        [ToolCall("f", {"a": "x", "b": "y"})],
    ),
    "indented code": (
        qwens(function(parameter("a", "  if x:\n    y"))),
        [ToolCall("f", {"a": "  if x:\n    y"})],
    ),
    "a value with the function's closing tag": (
        qwens(function(parameter("a", "see </function> here"))),
        [ToolCall("f", {"a": "see </function> here"})],
    ),
    "a value with the outer closing tag": (
        qwens(function(parameter("a", "see </tool_call> here") + parameter("b", "y"))),
        [ToolCall("f", {"a": "see </tool_call> here", "b": "y"})],
    ),
    "a value with a parameter's tag": (
        qwens(function(parameter("a", "see <parameter=b> here"))),
        [ToolCall("f", {"a": "see <parameter=b> here"})],
    ),
    "two functions in one tag": (
        qwens(function(parameter("a", "x")) + function("", "g")),
        [ToolCall("f", {"a": "x"}), ToolCall("g")],
    ),
    "an empty value": (qwens(function(parameter("a", ""))), [ToolCall("f", {"a": ""})]),
    "a response that was cut": ("<tool_call>\n<function=f>\n<parameter=a>\nx", "is not closed"),
    "JSON for parameters, as Functionary's": (
        '<function=f>{"a": 1}</function>',
        "must hold <parameter=NAME>",
    ),
    "JSON in the tag": (tagged(F), "must hold <function=NAME>"),
    "a call in thinking": (f"<think>{qwens(function(''))}</think>no", []),
    "prose": ("a <function> of x", []),
}
JSON: dict[str, tuple[str, list[ToolCall] | str]] = {
    "Llama's, with a type": ('{"type": "function", "name": "f", "parameters": {"a": 1}}', CALLED),
    "behind thinking": (f"<think>hm</think>\n{json.dumps(F)}", CALLED),
    "a list of calls": (json.dumps([F, F]), CALLED * 2),
    "an answer with a name": ('{"name": "Alice", "age": 3}', []),
    "an answer of names": ('[{"name": "Alice"}, {"name": "Bob"}]', []),
    "an answer with a name and parameters of its own": ('{"name": "f", "parameters": {}, "why": "x"}', []),
    "a list of a call and a number": (f"[{json.dumps(F)}, 3]", []),
    "a call and words": (f"{json.dumps(F)} is what I would say", []),
    "arguments that are none": ('{"name": "f", "arguments": "x"}', "must be an object"),
}
PARSED = [
    (parser, situation, *case)
    for parser, cases in ((hermes, HERMES), (qwen, QWEN), (plain_json, JSON))
    for situation, case in cases.items()
]


@pytest.mark.parametrize(
    ("parser", "situation", "text", "right"),
    PARSED,
    ids=[f"{case[0].__name__}: {case[1]}" for case in PARSED],
)
def test_calls_in_what_models_write(
    parser: Callable[[str], list[ToolCall]], situation: str, text: str, right: list[ToolCall] | str
) -> None:
    calls = parser(text)
    if isinstance(right, str):
        assert calls and right in calls[0].error
    else:
        assert calls == right


# 4 and 7. What a tool gives or raises


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Hit:
    title: str
    score: float = 0.5


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def answered(body: Callable[[], Any]) -> str:
    """Return the answer to a call of a tool that runs some code."""

    def tool() -> Any:
        """A tool."""
        return body()

    async def run() -> str:
        with ThreadPoolExecutor(1) as threads:
            box = Toolbox(OfferedTool.of({"t": Tool(tool, {}, {})}), 0, threads, 20.0)
            return await box.run(ToolCall("t"))

    return asyncio.run(run())


async def numbers() -> Any:
    yield 1


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: "é", "é"),
    "nothing": (lambda: None, "null"),
    "a truth value": (lambda: True, "true"),
    "a mapping": (lambda: {"a": [None, "é"]}, '{"a": [null, "é"]}'),
    "numbers for keys": (lambda: {1: 2}, '{"1": 2}'),
    "a set": (lambda: {1}, "[1]"),
    "bytes that are text": (lambda: b"x", '"x"'),
    "a member of an enumeration": (lambda: Colour.RED, '"red"'),
    "a record": (lambda: [Hit("x")], '[{"title": "x", "score": 0.5}]'),
    "a time": (lambda: datetime.datetime(2024, 1, 2), '"2024-01-02T00:00:00"'),
    "a decimal": (lambda: decimal.Decimal("1.50"), '"1.50"'),
    "a number of NumPy": (lambda: numpy.int64(3), "3"),
    "an array": (lambda: {"x": numpy.array([1, 2])}, '{"x": [1, 2]}'),
    "a tensor": (lambda: torch.tensor([0.5]), "[0.5]"),
    "a generator": (lambda: (n for n in (1, 2)), "[1, 2]"),
    "a path": (lambda: Path("a/b"), '"a/b"'),
    "an asynchronous generator": (numbers, "error: TypeError: a tool gave async_generator"),
    "an object": (object, "error: TypeError: a tool gave object"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_a_tool_gives_is_text_or_json(kind: str) -> None:
    body, right = GIVEN[kind]
    answer = answered(body)
    assert answer.startswith(right) if right.startswith("error") else answer == right


def test_a_list_within_itself_is_an_error() -> None:
    def body() -> Any:
        items: list[Any] = []
        items.append(items)
        return items

    assert answered(body).startswith("error: ValueError: Circular reference")


def raising(error: BaseException) -> Callable[[], Any]:
    def body() -> Any:
        raise error

    return body


async def in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
        raise ValueError("full")


RAISED: dict[str, tuple[Callable[[], Any], str]] = {
    "an error without words": (raising(AssertionError()), "error: AssertionError"),
    "an error whose text fails": (raising(MuteError()), "error: MuteError"),
    "a group of errors": (
        raising(ExceptionGroup("2 failed", [ValueError("x"), OSError("y")])),
        "error: 2 failed: ValueError: x; OSError: y",
    ),
    "a cancelled task in a group": (
        raising(BaseExceptionGroup("gone", [asyncio.CancelledError()])),
        "error: gone: CancelledError",
    ),
    "a task group of its own": (
        in_a_group,
        "error: unhandled errors in a TaskGroup: ValueError: full",
    ),
    "the end of an iterator": (lambda: next(iter(())), "error: StopIteration"),
    "the end of a generator": (raising(GeneratorExit()), "error: GeneratorExit"),
    "too deep a recursion": (raising(RecursionError("deep")), "error: RecursionError: deep"),
    "a loop of its own": (lambda: asyncio.run(asyncio.sleep(0, "ok")), "ok"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_what_a_tool_raises_is_read_by_the_policy(kind: str) -> None:
    body, right = RAISED[kind]
    assert answered(body) == right


@pytest.mark.parametrize(
    "body",
    [
        "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "raise ExceptionGroup('g', [ValueError('x')])",
        "return [1, 2][5]",
        "return next(x for x in () if x)",
        "raise BaseExceptionGroup('g', [SystemExit(3)])",
    ],
)
def test_what_a_scorer_raises_is_counted(body: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth):\n    {body}\n"
    )
    ctx = Context(node="rewards", seed=0, iteration=0)
    options = {"function": f"{tmp_path}/s.py:compute_score", "timeout": 20.0, "on_error": "zero"}
    rewards, failed = verl(ctx, ["a"], ["1"], None, None, **options)
    assert (rewards.tolist(), failed.tolist()) == ([0.0], [True])
