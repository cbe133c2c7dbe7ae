"""Forms in which files hold conversations, tools and answers, normalised to the one that chat templates take.

{from: human, value}            ShareGPT            -> {role: user, content}
arguments: '{"a": 1}'           OpenAI              -> arguments: {a: 1}
function_call: {...}            OpenAI, before 2024 -> tool_calls: [...]
content: [{type: text, text}]   OpenAI              -> content: the texts one after the other
parameters: {"a": 1}            Llama 3             -> arguments: {a: 1}
{name, parameters}, flat        bare schemas        -> {type: function, function: {name, parameters}}
weight: 0, train: false         OpenAI, axolotl     -> train: false, on turns that are not learnt

What is none of these is refused with its place.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from rlgraph.nodes.support.row_field import DataError, unfit

Turns = Literal["last", "all"]
TRAIN = "train"  # false on a turn of the assistant that is not learnt; no template is given it
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
TEXT_PARTS = ("text", "input_text", "output_text")  # of OpenAI's chat completions and responses
ARGUMENTS = ("arguments", "parameters")  # OpenAI's key, and that which Llama 3 is taught to write
SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")  # OpenAI's, Anthropic's, and that of MCP
WRITTEN_CALLS = "function_calls"  # OLMo 3's calls of tools, as the text that the template writes
PROGRAM_TESTS = {"inputs", "outputs"}  # keys of the mapping that reward.code reads as JSON
FOREIGN_ROLES = SHAREGPT_ROLES.keys() - SHAREGPT_ROLES.values()  # those that no chat template knows


def has_messages(value: Any) -> bool:
    """Return whether a value is a list of messages in one of the forms, or one message."""
    if isinstance(value, dict):
        is_openai = {"role", "content"} <= value.keys()
        is_sharegpt = {"from", "value"} <= value.keys()
        return is_openai or is_sharegpt
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return not value[0].keys().isdisjoint(("role", "from", "content"))


def messages_of(place: str, path: str, value: Any) -> list[dict[str, Any]]:
    """Return messages {role, content, ...} without empty keys; their content is a text.

    Raises:
        DataError: it is not a list of messages, or one is in no form that is known.
    """
    if isinstance(value, dict) and has_messages(value):
        value = [value]
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not all(isinstance(message, dict) for message in value):
        law = f"{place}: {path!r} is neither text nor a list of messages {{role, content}}, "
        law += f"but {str(value)[:60]!r}"
        raise DataError(f"{law}; correct the row, or name another column with question:")
    messages = []
    for number, message in enumerate(value):
        messages.append(_message(place, f"{path}[{number}]", without_nulls(message)))
    return messages


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls in its mappings: files of Arrow have each key in every row."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _message(place: str, path: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form of chat templates: role, content, more fields, calls, train: false."""
    if "from" in message and "role" not in message:
        message = _of_sharegpt(place, path, message)
    role = message.get("role")
    if not isinstance(role, str):
        law = f"{place}: {path!r} is not a message {{role, content}}, but {str(message)[:60]!r}"
        raise DataError(f"{law}; correct the row, or name another column with question:")
    if role in FOREIGN_ROLES:
        law = f"{place}: {path!r} has the role {role!r}, which is {SHAREGPT_ROLES[role]!r} of a chat template"
        raise DataError(f"{law}; call it so, or write the row as ShareGPT's {{from, value}}")
    if role == "function":
        role = "tool"
    function_call = message.pop("function_call", None)
    if function_call:
        message["tool_calls"] = [{"type": "function", "function": function_call}]
    calls = [_call(place, path, call) for call in message.pop("tool_calls", None) or ()]
    may_lack_content = bool(calls) or bool(message.get(WRITTEN_CALLS))
    normalised: dict[str, Any] = {
        "role": role,
        "content": _content(place, path, message.get("content"), may_lack_content),
    }
    for key, value in message.items():
        is_known = key in ("role", "content", "weight", TRAIN)
        if not is_known and value not in ("", []):
            normalised[key] = value
    if calls:
        normalised["tool_calls"] = calls
    if not _is_learnt(place, path, role, message):
        normalised[TRAIN] = False
    return normalised


def _of_sharegpt(place: str, path: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message {from, value} as one with a role; a call of a function is a call of a tool."""
    sender = message["from"]
    if sender not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"{place}: {path!r} is from {sender!r}, which is none of {known}; correct the row")
    value = message.get("value")
    more = {key: item for key, item in message.items() if key not in ("from", "value")}
    if sender != "function_call":
        return {"role": SHAREGPT_ROLES[sender], "content": value, **more}
    functions = _parsed(place, f"{path}.value", value)
    if not isinstance(functions, list):
        functions = [functions]
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "tool_calls": calls, **more}


def _call(place: str, path: str, call: Any) -> dict[str, Any]:
    """Return a call of a tool with its arguments as a mapping, which is what chat templates take."""
    if isinstance(call, dict) and "function" not in call and "name" in call:
        call = {"type": "function", "function": call}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        law = f"{place}: {path!r} has a tool call without a function {{name, arguments}}: {str(call)[:60]!r}"
        raise DataError(f"{law}; correct the row")
    name = function["name"]
    argument_keys = [key for key in function if key != "name"]
    if len(argument_keys) > 1 or not {*argument_keys} <= {*ARGUMENTS}:
        law = f"{place}: {path!r} calls {name} with the keys {', '.join(function)}"
        raise DataError(f"{law}; a call is {{name, arguments}}: correct the row")
    arguments = function[argument_keys[0]] if argument_keys else {}
    if isinstance(arguments, str):
        is_blank = not arguments.strip()
        arguments = {} if is_blank else _parsed(place, f"{path}.tool_calls: arguments", arguments)
    if not isinstance(arguments, dict):
        law = f"{place}: {path!r} calls {name} with {str(arguments)[:60]!r}"
        raise DataError(f"{law}; arguments are a mapping, or such a mapping as JSON")
    return {**call, "function": {"name": name, "arguments": arguments}}


def _parsed(place: str, path: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise DataError(f"{place}: {path!r} is not JSON: {str(text)[:60]!r}; correct the row") from None


def _content(place: str, path: str, content: Any, may_be_absent: bool) -> str:
    """Return the content of a message as one text."""
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, list):
        law = f"{place}: {path!r} has no content that is a text, but {str(content)[:60]!r}"
        raise DataError(f"{law}; correct the row, or remove it")
    return "".join(_text_of_block(place, path, block) for block in content)


def _text_of_block(place: str, path: str, block: Any) -> str:
    """Return the text of one part of a content: a text alone, or {type, text}."""
    if isinstance(block, str):
        return block
    kind, text = block, None
    if isinstance(block, dict):
        kind, text = block.get("type", block), block.get("text")
        if block.get("type") in TEXT_PARTS and isinstance(text, str):
            return text
    law = f"{place}: {path!r} has a part of its content that is not text: {str(kind)[:60]!r}"
    raise DataError(f"{law}; models are trained on text alone: remove the row")


def _is_learnt(place: str, path: str, role: str, message: Mapping[str, Any]) -> bool:
    """Return what ``weight`` or ``train`` of a message says, true where there is neither."""
    is_assistant = role == "assistant"
    is_learnt = True
    for key in ("weight", TRAIN):
        if key not in message:
            continue
        value = message[key]
        if value not in (0, 1):
            law = f"{place}: {path!r} has the {key} {value!r}; a turn is learnt or not"
            raise DataError(f"{law}: give 0 or 1")
        if value and not is_assistant:
            law = f"{place}: {path!r} has {key}: {value!r} on a message of {role!r}"
            raise DataError(f"{law}; only turns of the assistant are learnt: take it out")
        if not value:
            is_learnt = False
    # other messages are not learnt anyway, so their flag says nothing
    return is_learnt or not is_assistant


def refuse_encoded(place: str, path: str, text: str) -> None:
    """Refuse a text that holds messages as JSON, which would be read as words.

    Raises:
        DataError: it does.
    """
    names_messages = "role" in text or "from" in text
    if not text.lstrip().startswith("[") or not names_messages:
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if has_messages(value):
        law = f"{place}: {path!r} is a text that holds messages as JSON"
        raise DataError(f"{law}; write the file with a list in its place (json.loads of the column)")


def tools_of(place: str, path: str, value: Any) -> list[Any]:
    """Return the tools of a row: names, or schemas, which may stand in a text as JSON.

    Raises:
        DataError: it is neither.
    """
    if isinstance(value, str):
        value = _parsed(place, path, value) if value.strip() else []
    tools = without_nulls(value) or []
    if isinstance(tools, dict):
        tools = list(tools)  # verl has a mapping from their names to what each is made with
    if not isinstance(tools, list):
        raise DataError(f"{place}: {path!r} is not a list of tools, but {str(value)[:60]!r}; correct the row")
    names_or_schemas: list[Any] = []
    for tool in tools:
        if isinstance(tool, str) and tool.lstrip().startswith("{"):
            tool = _parsed(place, path, tool)
        is_name = isinstance(tool, str)
        names_or_schemas.append(tool if is_name else _schema(place, path, tool))
    return names_or_schemas


def _schema(place: str, path: str, tool: Any) -> dict[str, Any]:
    """Return the schema of a tool as chat templates take it: {type: function, function: {name, ...}}.

    Raises:
        DataError: it has no name.
    """
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        law = f"{place}: {path!r} has a tool that is neither a name nor a schema: {str(tool)[:60]!r}"
        raise DataError(f"{law}; write {{type: function, function: {{name, description, parameters}}}}")
    schema: dict[str, Any] = tool
    if function is not tool:
        return schema
    flat = {key: value for key, value in schema.items() if key not in ("type", *SCHEMA_KEYS)}
    parameters_key = next((key for key in SCHEMA_KEYS if key in schema), None)
    if parameters_key:
        flat["parameters"] = schema[parameters_key]
    return {"type": "function", "function": flat}


def _refuse_unpaired(place: str, path: str, inputs: Any, outputs: Any) -> None:
    """Refuse tests of a program of which some have no input or output, and a list of none.

    Raises:
        DataError: they are such.
    """
    are_lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not are_lists or len(inputs) != len(outputs):
        law = f"{place}: {path!r} has tests of a program whose inputs and outputs are not lists of one length"
        raise DataError(f"{law}; correct the row, or remove it")
    if not inputs:
        raise DataError(f"{place}: {path!r} has no test of a program; add some, or remove the row")


def answer_text(place: str, path: str, answer: Any) -> str:
    """Return an answer as text: a number as it reads back, the tests of a program as JSON.

    Raises:
        DataError: it is empty, or has no clear text, as a list of alternatives.
    """
    if answer is None:
        raise DataError(f"{place}: {path!r} is empty; fill it in, or remove the row")
    if isinstance(answer, str):
        return answer
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    if is_number:
        remedy = unfit(answer, "text")
        if remedy:
            raise DataError(f"{place}: {path!r} is the number {answer}; {remedy}")
        return str(answer)
    if isinstance(answer, dict) and answer.keys() >= PROGRAM_TESTS:
        _refuse_unpaired(place, path, answer["inputs"], answer["outputs"])
        return json.dumps(answer, ensure_ascii=False)
    raise _not_text(place, path, answer)


def _not_text(place: str, path: str, answer: Any) -> DataError:
    """Return the error of an answer that is a mapping, a list, or a truth value."""
    if isinstance(answer, dict):
        law = f"{place}: {path!r} is not text, but a mapping of {', '.join(map(str, answer))}"
        field = next(iter(answer), "FIELD")
        remedy = f"name the field in it that is the answer, as answer: {path}.{field}; or set answer: null "
        remedy += f"and columns: {{answers: {{from: {path}.FIELD, type: json}}}} for a list of right ones"
        return DataError(f"{law}; {remedy}")
    law = f"{place}: {path!r} is not text, but {str(answer)[:60]!r}"
    is_list = isinstance(answer, list) and bool(answer)
    if is_list and isinstance(answer[0], dict):
        remedy = f"set answer: null and columns: {{NAME: {{from: {path}, type: json}}}} for a reward that "
        remedy += "reads NAME, or write tests of programs as {inputs: [...], outputs: [...]}"
        return DataError(f"{law}; {remedy}")
    remedy = f"set answer: null and columns: {{answers: {{from: {path}, type: json}}}}, of which reward.f1, "
    remedy += "reward.exact and reward.math take the best"
    return DataError(f"{law}; {remedy}")
