"""The tools of one conversation: they check, run and time the policy's calls, and answer as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from rlgraph.errors import RunError, nearest
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.template import TemplatePieces
from rlgraph.nodes.support.data_file import changed
from rlgraph.nodes.support.user_call import UserExitError, error_text, guarded
from rlgraph.nodes.support.user_call import call as call_user
from rlgraph.ops.column_types import PathMarker, holds
from rlgraph.ops.declare import Hook
from rlgraph.ops.signature import signature
from rlgraph.ops.tools import Tool, arguments, check_before_run


@dataclass(frozen=True)
class OfferedTool:
    """A tool as the graph names it: its function or class, and the arguments that the graph gives it."""

    hook: Tool
    record: type[BaseModel]  # validates the policy's arguments

    @staticmethod
    def of(tools: Mapping[str, Tool]) -> dict[str, OfferedTool]:
        """Return the tools of a node by name."""
        return {name: OfferedTool(hook, arguments(name, hook.body)) for name, hook in tools.items()}

    def bound_arguments(self, row: int) -> dict[str, Any]:
        """Return the values of the tool's columns at a row, and its attributes."""
        return row_of(self.hook, row, self.record.model_fields)


def row_of(hook: Hook, row: int, filled: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a hook beside ``filled``: its columns' values at a row, and its attributes.

    A value is a text, a number, a list of numbers, or None where no node writes the column.
    """
    values = {}
    for name in hook.parameters:
        if name not in filled:
            values[name] = value_at(hook.columns.get(name), row)
    return values | hook.attributes


def value_at(column: Any, row: int) -> Any:
    """Return the value of a column at a row as plain values of Python; None where there is no column."""
    if column is None:
        return None
    value = column[row]
    return value if isinstance(column, list) else value.tolist()


def check_tools(tools: Mapping[str, Tool], tokenizer: Any, options: Mapping[str, Any] | None) -> None:
    """Check that a run with these tools can go on behind their first answer.

    Raises:
        TemplateError: the chat template can't.
        DataError: a file that a tool reads is not there, or has a row that the tool can't read.
    """
    if tools:
        TemplatePieces(tokenizer, options).between([("tool", "any")], [[]], -1)
    for name, tool in tools.items():
        declared = signature(name, tool.body, Tool)
        for attribute, field in declared.attributes.model_fields.items():
            names_files = holds(PathMarker, field.annotation, *field.metadata)
            if not names_files:
                continue
            files = tool.attributes[attribute] or []
            if isinstance(files, str):
                files = [files]
            for file in files:
                changed(file)
        check_before_run(tool)


class Toolbox:
    """Runs the calls of one conversation at a row of the node's columns, each within ``timeout`` seconds.

    Invariants:
    * a class among the tools has at most one instance, made at the first call of it, in ``instances``;
    * ``errors`` counts the calls that were answered with an error, and ``broken`` has the reasons of those
      of them which were not refused.
    """

    def __init__(
        self, offers: Mapping[str, OfferedTool], row: int, threads: Executor, timeout: float
    ) -> None:
        self.offers = offers
        self.row = row
        self.threads = threads
        self.timeout = timeout
        self.instances: dict[str, asyncio.Task[Any]] = {}  # instances of classes, by name
        self.errors = 0
        self.broken: list[str] = []  # why calls failed that the policy may not be to blame for

    async def run(self, call: ToolCall) -> str:
        """Return the answer to a call, or the reason why the call fails."""
        try:
            return _text(await asyncio.wait_for(self._run(call), self.timeout))
        except TimeoutError:
            reason = f"{call.name} took over {self.timeout:g} s"
            self.broken.append(reason)
        except Refusal as refusal:
            reason = str(refusal)
        except UserExitError as error:  # it exited, say, which ends the call and nothing else
            reason = str(error)
            self.broken.append(_failed_call(call, reason))
        except RunError:
            raise  # the run is not set up as the graph says, which is not the policy's fault
        except Exception as error:  # the policy reads any other error of a tool
            reason = error_text(error)
            self.broken.append(_failed_call(call, reason))
        self.errors += 1
        return f"error: {reason}"

    async def reward(self) -> float:
        """Return the sum of the rewards that the called tools give the conversation."""
        rewards = []
        for tool in await self._ready_instances():
            if hasattr(tool, "reward"):
                rewards.append(await self._do(tool.reward))
        return float(sum(rewards))

    async def release(self) -> None:
        """Free the resources that the tools hold."""
        for tool in await self._ready_instances():
            if hasattr(tool, "release"):
                await self._do(tool.release)
        for task in self.instances.values():
            task.cancel()  # cancels an instance that is late and still being made

    async def _ready_instances(self) -> list[Any]:
        """Return the instances that could be made."""
        ready = []
        for task in self.instances.values():
            is_done = task.done() and not task.cancelled()
            if is_done and task.exception() is None:
                ready.append(await task)
        return ready

    async def _run(self, call: ToolCall) -> Any:
        if call.error:
            raise Refusal(call.error)
        if call.name not in self.offers:
            hint = nearest(call.name, self.offers) or "there are " + ", ".join(self.offers)
            raise Refusal(f"there is no tool {call.name!r}; {hint}")
        offer = self.offers[call.name]
        arguments = _checked(offer.record, call.arguments)
        is_class = isinstance(offer.hook.body, type)
        if not is_class:
            return await self._do(offer.hook.body, **arguments, **offer.bound_arguments(self.row))
        if call.name not in self.instances:
            self.instances[call.name] = asyncio.ensure_future(self._create(offer))
        # a call that is late is cancelled, and the instance goes on being made for the next one
        instance = await asyncio.shield(self.instances[call.name])
        return await self._do(instance.execute, **arguments)

    async def _create(self, offer: OfferedTool) -> Any:
        tool = guarded(offer.hook.body, **offer.bound_arguments(self.row))
        if hasattr(tool, "create"):
            await self._do(tool.create)
        return tool

    async def _do(self, function: Callable[..., Any], **arguments: Any) -> Any:
        return await call_user(function, self.threads, **arguments)


def _failed_call(call: ToolCall, reason: str) -> str:
    return f"{call.name}({json.dumps(call.arguments, default=str)}): {reason}"


class Refusal(Exception):
    """A call that is refused before any tool sees it."""


def _checked(record: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked = _validated(record, arguments)
    except ValidationError as error:
        wrong = []
        for details in error.errors(include_url=False):
            path = ".".join(map(str, details["loc"]))
            wrong.append(f"{path}: {details['msg']}")
        known = ", ".join(record.model_fields) or "none"
        raise Refusal(f"{'; '.join(wrong)}; the arguments are: {known}") from error
    return {name: getattr(checked, name) for name in record.model_fields}


def _validated(record: type[BaseModel], arguments: Mapping[str, Any]) -> BaseModel:
    """Return the arguments by their types; a text that its parameter does not take is read as JSON.

    Formats that write each value as text (Qwen3-Coder's) pass lists, mappings and null so.

    Raises:
        ValidationError: the arguments are of other types.
    """
    try:
        return record.model_validate(dict(arguments))
    except ValidationError as error:
        decoded = {}
        for details in error.errors(include_url=False):
            name = str(details["loc"][0]) if details["loc"] else ""
            if isinstance(arguments.get(name), str):
                decoded[name] = _decoded(arguments[name])
        if not decoded:
            raise
        return record.model_validate({**arguments, **decoded})


def _decoded(text: str) -> Any:
    """Return what a text says as JSON, or as the None that templates print; the text where it is neither."""
    if text.strip() == "None":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(answer: Any) -> str:
    """Return an answer as text: itself, or as JSON what JSON can say.

    Raises:
        TypeError: it is of a type whose text says nothing, as a generator's.
    """
    if isinstance(answer, str):
        return answer
    plain = to_jsonable_python(answer, fallback=_plain, inf_nan_mode="constants")
    return json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy or torch as numbers of Python.

    Raises:
        TypeError: it is neither.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a tool gave {type(value).__name__}; return a text, or what JSON can say")
