"""Tool calls in text: each format, and what is wrong with a call that can't be read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.nodes.agent.parsers import ToolCall, hermes, plain_json, qwen

ARGUMENTS = st.dictionaries(
    st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8),
    st.one_of(st.integers(), st.text(), st.booleans(), st.lists(st.integers(), max_size=3)),
    max_size=3,
)
NAMES = st.text(st.sampled_from("abc_0"), min_size=1, max_size=6)


@given(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=4), st.sampled_from(["", "I think ", "\n"]))
def test_hermes_reads_every_call_of_a_turn(calls: list[tuple[str, dict[str, object]]], words: str) -> None:
    blocks = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    whole = all("</tool_call>" not in block for block in blocks)
    text = "".join(f"{words}<tool_call>\n{block}\n</tool_call>" for block in blocks)
    assert not whole or hermes(text) == [ToolCall(name, arguments) for name, arguments in calls]


@given(
    st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(["arguments", "parameters"]),
)
def test_json_reads_one_call_or_a_list(calls: list[tuple[str, dict[str, object]]], word: str) -> None:
    whole = [{"name": name, word: given} for name, given in calls]
    expected = [ToolCall(name, arguments) for name, arguments in calls]
    assert plain_json(json.dumps(whole)) == expected
    assert plain_json(json.dumps(whole[0])) == expected[:1]
    assert plain_json(f"```json\n{json.dumps(whole, indent=2)}\n```") == expected


@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, st.text(st.sampled_from("ab \n{}'1"))))))
def test_qwen_reads_values_as_text(calls: list[tuple[str, dict[str, str]]]) -> None:
    text = ""
    for name, arguments in calls:
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        text += f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>\n"
    assert qwen(text) == [ToolCall(name, arguments) for name, arguments in calls]


@given(st.text(st.sampled_from('<>/tool_call{}"name:[]=funcipr ,1')))
def test_no_text_makes_a_parser_fail(text: str) -> None:
    for parser in (hermes, plain_json, qwen):
        for found in (parser(text), parser(f"<tool_call>{text}</tool_call>"), parser(f'{{"name": {text}}}')):
            assert all(isinstance(call.arguments, dict) for call in found)


@pytest.mark.parametrize("text", ["408", "", "{}", "[1]", "null", "see {", '{"answer": 4}', '["name"]'])
def test_json_takes_anything_else_for_an_answer(text: str) -> None:
    assert plain_json(text) == []


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", '{"name": ...'),
        ('{"name": 3}', '{"name": ...'),
        ('{"name": "f", "arguments": [1]}', "must be an object"),
        ('{"name": "f", "arguments": "x"}', "must be an object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(block: str, error: str) -> None:
    (call,) = hermes(f"<tool_call>{block}</tool_call>")
    assert error in call.error


def test_arguments_may_be_json_in_a_string() -> None:
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>') == [
        ToolCall("f", {"x": 1})
    ]


def test_a_call_that_is_not_closed_is_read_to_its_end() -> None:
    assert hermes('<tool_call>{"name": "f"}') == [ToolCall("f", {})]
    assert qwen("<tool_call><function=f>")[0].name == "f"
    assert "function" in qwen("<tool_call>f(1)</tool_call>")[0].error


@pytest.mark.parametrize("parser", [hermes, qwen, plain_json])
@pytest.mark.parametrize("thinking", ["<think>{}</think>3", "{}</think>3", "<think>{}", "[THINK]{}[/THINK]3"])
def test_a_call_inside_thinking_is_no_call(parser: object, thinking: str) -> None:
    call = {
        hermes: '<tool_call>{"name": "f"}</tool_call>',
        qwen: "<tool_call><function=f></function></tool_call>",
        plain_json: '{"name": "f", "parameters": {}}',
    }[parser]  # type: ignore[index]
    assert parser(thinking.format(call)) == []  # type: ignore[operator]
    assert len(parser(f"<think>no</think>{call}")) == 1  # type: ignore[operator]


def test_tags_in_a_text_of_the_arguments_end_no_call() -> None:
    arguments = {"x": "<tool_call></tool_call>"}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    assert hermes(text * 2) == [ToolCall("f", arguments)] * 2


# how chat templates write the calls of a message: Hermes 2 Pro and Qwen2.5, Qwen3-Coder, Llama 3
TEMPLATES = {
    hermes: """{{ content }}{% for call in calls %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}""",
    qwen: """{{ content }}{% for call in calls %}
<tool_call>
<function={{ call.name }}>
{% for name, value in call.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
    plain_json: """{"name": "{{ calls[0].name }}", "parameters": {{ calls[0].arguments | tojson }}}""",
}
CALLS = [
    {"name": "search", "arguments": {"query": 'a "quoted" word', "lines": "one\ntwo"}},
    {"name": "plot", "arguments": {"points": [1, 2.5], "style": {"dash": None}, "grid": True}},
    {"name": "now", "arguments": {}},
    {"name": "write", "arguments": {"text": "é 😀 <b>&</b>", "path": "a/b.txt"}},
    {"name": "tag", "arguments": {"text": "  indented", "empty": ""}},
]


@pytest.mark.parametrize("parser", TEMPLATES)
@pytest.mark.parametrize("first", range(len(CALLS)))
def test_calls_that_a_template_renders_are_read_back(parser: object, first: int) -> None:
    from jinja2 import Environment

    environment = Environment(trim_blocks=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    calls = [CALLS[first]] if parser is plain_json else [*CALLS[first:], *CALLS[:first]]
    text = environment.from_string(TEMPLATES[parser]).render(content="I look it up.", calls=calls)  # type: ignore[index]
    read = parser(text)  # type: ignore[operator]
    assert [call.name for call in read] == [call["name"] for call in calls]
    for found, call in zip(read, calls, strict=True):
        values = dict(call["arguments"])  # type: ignore[call-overload]
        if parser is qwen:  # which value is text, the tool's type says
            values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        assert found.arguments == values
        assert found.error == ""


def test_quoted_calls_of_the_json_format_are_text_and_those_in_tags_are_calls() -> None:
    quoted = 'Write it so:\n```json\n{"name": "f", "parameters": {}}\n```\nThen wait.'
    assert plain_json(quoted) == []
    assert len(hermes('```\n<tool_call>{"name": "f"}</tool_call>\n```')) == 1
