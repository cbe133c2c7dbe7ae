"""Declares a tool: a function or a class, whose signature says who gives which argument.

    def check(guess: int, answer: text[prompts], *, near: int = 0) -> str:
              └ the policy  └ the data: a column    └ the graph: an attribute

A class does the same in two places: its constructor names columns and attributes, its ``execute`` what the
policy gives. One instance serves one sample:

    __init__, create()      before its first call; ``create`` may be async
    execute(...)            a call, sync or async: what it returns is the answer, as text
    reward()                a number, when the conversation has ended
    release()               frees what ``create`` took, after errors too
"""

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError

from rlgraph.ops.column_types import is_column
from rlgraph.ops.declare import Hook
from rlgraph.ops.docstring import Docstring, read_docstring
from rlgraph.ops.op_error import OpError
from rlgraph.ops.signature import type_hints

FIRST = ("type", "items", "enum", "properties", "description")  # order of a schema's first keys
CHECK = "checked_before_run"  # the attribute of a tool's function with what ``before_run`` names
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Tool(Hook):
    """A tool that a policy may call: ``{kind: calculator}``, or ``{kind: my_tools.py:name}``."""

    word, writes = "tool", False

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """Return the policy's arguments; of a class none, as they stand in the signature of ``execute``."""
        fields = arguments(name, body).model_fields
        return () if isinstance(body, type) else fields


ToolBody = TypeVar("ToolBody", bound=Callable[..., Any])


def before_run(check: Callable[..., None]) -> Callable[[ToolBody], ToolBody]:
    """Have a tool's attributes checked before a run starts, by a function that takes them by name.

    It raises an error where a run could not go on: a tool that reads files reads them whole.
    """

    def checked(body: ToolBody) -> ToolBody:
        setattr(body, CHECK, check)
        return body

    return checked


def check_before_run(tool: Tool) -> None:
    """Check a tool as its author asked for by ``before_run``.

    Raises:
        Exception: any that the author's function raises.
    """
    check = getattr(tool.body, CHECK, None)
    if check is not None:
        check(**tool.attributes)


class ShownTool(Tool):
    """A tool whose schema is shown to the policy, and which is not called there."""

    reads = False


def arguments(name: str, body: Callable[..., Any]) -> type[BaseModel]:
    """Return a record of the policy's arguments; a text that holds a number is taken for one where due.

    Raises:
        OpError: a parameter has no annotation, or one that JSON does not know; or a class has no ``execute``.
    """
    call = _called(name, body)
    hints = type_hints(name, call)
    descriptions = _docstring(body, call).arguments
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(call).parameters.values():
        is_attribute = call is body and parameter.kind is parameter.KEYWORD_ONLY
        is_self = call is not body and parameter.name == "self"
        hint = hints.get(parameter.name)
        if is_attribute or is_self or is_column(hint):
            continue  # the policy does not give it
        if parameter.name not in hints or parameter.kind not in NAMED:
            raise OpError(f"op {name}: parameter {parameter.name} needs a name and an annotation")
        description = Field(description=descriptions.get(parameter.name))
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (Annotated[hint, description], default)
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    try:
        record: type[BaseModel] = create_model(name, __config__=config, **fields)
        record.model_json_schema()
    except PydanticUserError as error:
        raise OpError(f"op {name}: {str(error).splitlines()[0]}") from error
    return record


def tool_schema(name: str, body: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool as an OpenAI function, which chat templates take.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first.
        ...     '''
        >>> tool_schema("add", add)["function"]["parameters"]["properties"]["a"]
        {'type': 'integer', 'description': 'the first.'}
    """
    doc = _docstring(body, _called(name, body))
    schema = _untitled(arguments(name, body).model_json_schema())
    parameters = {}
    for key in ("type", "properties", "required", "$defs"):
        if key in schema:
            parameters[key] = schema[key]
    about = " ".join(f"{doc.summary} {doc.body}".split())
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _called(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that the policy calls."""
    if not isinstance(body, type):
        return body
    call: Callable[..., Any] | None = getattr(body, "execute", None)
    if call is None:
        raise OpError(f"op {name}: the class {body.__name__} has no method `execute`")
    return call


def _docstring(body: Callable[..., Any], call: Callable[..., Any]) -> Docstring:
    """Return the docstring of the called function, or of its class."""
    documented = call if call.__doc__ else body
    return read_docstring(inspect.getdoc(documented) or "")


def _untitled(schema: Any) -> Any:
    """Return the keys in the usual order, without pydantic's titles, which repeat the names."""
    if isinstance(schema, list):
        return [*map(_untitled, schema)]
    if not isinstance(schema, dict):
        return schema
    untitled = {}
    first_keys = [key for key in FIRST if key in schema]
    for key in dict.fromkeys((*first_keys, *schema)):
        # a mapping under such a key is the schema of a parameter that is called so
        is_parameter = isinstance(schema[key], dict)
        if is_parameter or key not in ("title", "additionalProperties"):
            untitled[key] = _untitled(schema[key])
    return untitled
