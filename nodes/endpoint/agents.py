"""Runs an agent that nobody rewrote: a function of a file, or a command line, with an address and a key.

    def solve(task, base_url, api_key):            my_agent.py, sync or async
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...
        return 1.0                                 a reward, a mapping with ``reward``, or nothing

A command line finds the same in its environment: TASK (JSON), OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. The last line that it prints is its result, where that is JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlgraph.errors import RunError, shortened
from rlgraph.nodes.support.row_field import as_number
from rlgraph.nodes.support.user_call import awaited, error_text, guarded

PARAMETERS = ("task", "base_url", "api_key")
MOST_OUTPUT = 2**16  # bytes of a command's output that are kept, from its end
ENDING = 5.0  # seconds between a command's SIGTERM and its SIGKILL


class AgentError(Exception):
    """An agent's episode has failed; the text says how."""


@dataclass(frozen=True)
class AgentResult:
    """The reward and the other numbers that an agent gives back.

    Attributes:
        reward: of the episode; None: it gives none.
        metrics: other numbers of the mapping that it returned.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def result_of(value: Any) -> AgentResult:
    """Return an agent's result: a number, a mapping of numbers with ``reward``, or None.

    Raises:
        AgentError: it is something else, or no finite number.

    Example:
        >>> result_of({"reward": 1, "steps": 3}).metrics, result_of(None).reward
        ({'steps': 3.0}, None)
    """
    if value is None:
        return AgentResult()
    if isinstance(value, Mapping):
        numbers = {str(name): _number(item, str(name)) for name, item in value.items() if item is not None}
        reward = numbers.pop("reward", None)
        return AgentResult(reward, numbers)
    return AgentResult(_number(value, "reward"))


def _number(value: Any, name: str) -> float:
    value = as_number(value)
    if not isinstance(value, bool | int | float):
        text = shortened(repr(value), 80)
        raise AgentError(
            f"its {name} is {type(value).__name__}, {text}; return a number or a mapping of numbers"
        )
    if not math.isfinite(value):
        raise AgentError(f"its {name} is {value}; return a finite number")
    return float(value)


def check_function(function: Callable[..., Any], target: str) -> None:
    """Check that a function can be called as an agent.

    Raises:
        RunError: it takes other arguments than a task, an address and a key.
    """
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except (TypeError, ValueError) as error:
        law = f"the agent {target} can't be called with {', '.join(PARAMETERS)}: {error}"
        raise RunError(f"{law}\n  write it as def solve(task, base_url, api_key)") from error


@dataclass(frozen=True)
class FunctionAgent:
    """A function that is called with a task, an address and a key; it runs in a thread of its own.

    One that is async gets an event loop of its own there. One that is late goes on in its thread, but its key
    is worth nothing any more.
    """

    function: Callable[..., Any]

    async def run(self, task: Mapping[str, Any], base_url: str, key: str, timeout: float) -> Any:
        """Return what the function returns.

        Raises:
            TimeoutError: it is late.
            AgentError: it raised something.
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[Any] = loop.create_future()
        thread_loop: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

        def settle(value: Any, error: BaseException | None) -> None:
            if finished.done():
                return
            if error is None:
                finished.set_result(value)
            else:
                finished.set_exception(AgentError(error_text(error)))

        async def lead() -> Any:
            task_of_thread = asyncio.current_task()
            assert task_of_thread is not None
            thread_loop.append((asyncio.get_running_loop(), task_of_thread))
            return await awaited(self.function(dict(task), base_url, key))

        def work() -> None:
            value, error = None, None
            try:
                if inspect.iscoroutinefunction(self.function):
                    value = asyncio.run(lead())
                else:  # outside of any loop: some agents run one of their own
                    value = guarded(partial(self.function, dict(task), base_url, key))
                    if inspect.isawaitable(value):
                        value = asyncio.run(awaited(value))
            except BaseException as problem:
                error = problem
            with suppress(RuntimeError):  # the loop may be closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, daemon=True, name="agent").start()
        try:
            return await asyncio.wait_for(finished, timeout)
        finally:
            for inner_loop, inner_task in thread_loop:
                with suppress(RuntimeError):
                    inner_loop.call_soon_threadsafe(inner_task.cancel)


@dataclass(frozen=True)
class CommandAgent:
    """A command line that finds the task, the address and the key in its environment."""

    command: str

    async def run(self, task: Mapping[str, Any], base_url: str, key: str, timeout: float) -> Any:
        """Return the result that the command prints as its last line, where that is JSON.

        The command has a process group of its own, all of which ends with the episode.

        Raises:
            TimeoutError: it is late.
            AgentError: its exit status is not 0.
        """
        environment = {
            **os.environ,
            "TASK": json.dumps(task, ensure_ascii=False),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        process = await asyncio.create_subprocess_shell(
            self.command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = await asyncio.wait_for(_end_of_output(process), timeout)
            status = await process.wait()
        finally:
            await _end(process)
        if status != 0:
            raise AgentError(f"the command ended with status {status}: {shortened(output[-2000:], 600)}")
        return _printed_result(output)


async def _end_of_output(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(2**14):
        kept = (kept + chunk)[-MOST_OUTPUT:]
    return kept.decode("utf-8", "replace")


def _printed_result(output: str) -> Any:
    """Return the last line of an output as JSON; None where it is none.

    Example:
        >>> _printed_result("working...\\n0.5\\n"), _printed_result("done")
        (0.5, None)
    """
    lines = output.strip().splitlines()
    if not lines:
        return None
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float | dict) else None


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), ENDING)
