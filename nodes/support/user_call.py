"""Calls of functions that a user brings: scorers and tools, which may do whatever a program may do.

What such a call can end with, and what becomes of it:

    raises an Exception                          that exception
    sys.exit(), asyncio.CancelledError,
    StopIteration, TimeoutError of its own       ``UserExitError``: to asyncio they mean something else
    returns an awaitable                         what that gives
    does not return in time                      its thread goes on, and holds no process up at its end

Ctrl-C of the user's stays Ctrl-C. A function whose file uses signals has to run in the main thread:
``needs_main_thread`` says which.
"""

from __future__ import annotations

import ast
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlgraph.nodes.support.lazy import asyncio

# what takes SIGALRM, or a main thread, for granted: modules, and packages whose scorers use them
SIGNALLING = ("signal", "math_verify", "verl", "timeout_decorator")


class UserExitError(Exception):
    """A user's function ended by something that is no ordinary error; the message says by what."""


class DaemonThreads(Executor):
    """As a ``ThreadPoolExecutor``, but no thread that is late is waited for when the process ends."""

    def __init__(self, threads: int) -> None:
        self._jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._most, self._threads = threads, list[threading.Thread]()
        self._idle = threading.Semaphore(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, functools.partial(fn, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that have nothing to do; what runs goes on to its end. ``wait`` is not obeyed."""
        while cancel_futures and not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            self._idle.release()


def guarded(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a function that is not async returns.

    Raises:
        UserExitError: it ended by what is no ordinary error. Any other error is its own.
    """
    try:
        return function(**arguments)
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            raise
        raise UserExitError("KeyboardInterrupt") from None
    except (StopIteration, StopAsyncIteration, TimeoutError) as error:
        raise UserExitError(_named(error)) from error
    except Exception:
        raise
    except BaseException as error:
        raise UserExitError(_named(error)) from error


async def awaited(awaitable: Any) -> Any:
    """Return what an awaitable of a user's gives; errors as of ``guarded``."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is late, or the run ends
        raise UserExitError(_named(error)) from error
    except (SystemExit, GeneratorExit, StopAsyncIteration, TimeoutError) as error:
        raise UserExitError(_named(error)) from error


async def call(function: Callable[..., Any], threads: Executor | None, **arguments: Any) -> Any:
    """Return what a function gives, async or not, its result awaited where it can be.

    Args:
        function: the user's.
        threads: where one that is not async runs; None: in this thread, which it holds up.
        arguments: what it is called with.

    Raises:
        UserExitError: it ended by what is no ordinary error. Any other error is its own.
    """
    if inspect.iscoroutinefunction(function):
        return await awaited(function(**arguments))
    if threads is None:
        result = guarded(function, **arguments)
    else:
        running = asyncio.get_running_loop()
        result = await running.run_in_executor(threads, functools.partial(guarded, function, **arguments))
    # what a partial, a decorator or an object hides is a coroutine function all the same
    return await awaited(result) if inspect.isawaitable(result) else result


@functools.lru_cache(maxsize=64)
def needs_main_thread(file: str) -> bool:
    """Return whether a file of Python imports what works in a main thread alone, at any place in it.

    Example:
        >>> needs_main_thread("nowhere.py")
        False
    """
    try:
        tree = ast.parse(Path(file).read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        if any(module.split(".")[0] in SIGNALLING for module in modules):
            return True
    return False


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
