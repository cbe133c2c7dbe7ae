"""Calls of functions that a user brings: scorers and tools, which may do whatever a program may do.

What such a call can end with, and what becomes of it:

    raises an Exception                          that exception
    sys.exit(), asyncio.CancelledError,
    StopIteration, TimeoutError of its own       ``UserExitError``: to asyncio they mean something else
    returns an awaitable                         what that gives
    does not return in time                      its thread goes on, and holds no process up at its end;
                                                 in the main thread ``interrupted_after`` ends it

Ctrl-C of the user's stays Ctrl-C. A function whose file uses signals has to run in the main thread:
``needs_main_thread`` says which.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlgraph.nodes.support.lazy import asyncio

# what takes SIGALRM, or a main thread, for granted: modules, and packages whose scorers use them
SIGNALLING = ("signal", "math_verify", "verl", "timeout_decorator")


class UserExitError(Exception):
    """A user's function ended by something that is not an ordinary error; the message says by what."""


class _InterruptError(BaseException):
    """Raised inside a function that is late; no ``except Exception`` of the function's takes it."""


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt what runs in this block, in the main thread, once it is late.

    It gets SIGUSR2, and not SIGALRM, which functions use for limits of their own. What is inside a call of C
    that heeds no signals is interrupted when that call returns. In another thread nothing is interrupted.

    Raises:
        TimeoutError: it was late.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    open_ = True

    def interrupt(*_: object) -> None:
        if open_:  # and not after the block, when the timer was quicker than its end
            raise _InterruptError

    previous_handler = signal.signal(signal.SIGUSR2, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    timer.daemon = True
    try:
        timer.start()
        yield
    except _InterruptError:
        raise TimeoutError from None
    finally:
        open_ = False
        timer.cancel()
        timer.join()  # so that no signal comes once the handler is gone
        signal.signal(signal.SIGUSR2, previous_handler)


class DaemonThreads(Executor):
    """As a ``ThreadPoolExecutor``, but no thread that is late is waited for when the process ends.

    Invariants:
    * ``_idle`` counts the threads that wait for a job, less the jobs that were queued for them;
    * a thread is started for a job only where none is idle, up to ``_most`` of them.
    """

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


def guarded(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Return what a function that is not async returns.

    Raises:
        UserExitError: it ended by something that is not an ordinary error. Any other error is its own.
    """
    try:
        return function(**arguments)
    except _InterruptError:
        raise
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            raise
        raise UserExitError("KeyboardInterrupt") from None
    except (StopIteration, StopAsyncIteration, TimeoutError) as error:
        raise UserExitError(error_text(error)) from error
    except Exception:
        raise
    except BaseException as error:
        raise UserExitError(error_text(error)) from error


async def awaited(awaitable: Any) -> Any:
    """Return what an awaitable of a user's gives; errors as of ``guarded``."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is late, or the run ends
        raise UserExitError(error_text(error)) from error
    except (SystemExit, GeneratorExit, StopAsyncIteration, TimeoutError) as error:
        raise UserExitError(error_text(error)) from error


async def call(
    function: Callable[..., Any], threads: Executor | None, limit: float | None = None, /, **arguments: Any
) -> Any:
    """Return what a function gives, async or not, its result awaited where it can be.

    Args:
        function: the user's.
        threads: where one that is not async runs; None: in this thread, which it holds up.
        limit: seconds after which it is interrupted in this thread; None: never.
        arguments: what it is called with.

    Raises:
        TimeoutError: it was interrupted.
        UserExitError: it ended by something that is not an ordinary error. Any other error is its own.
    """
    if inspect.iscoroutinefunction(function):
        return await awaited(function(**arguments))
    if threads is None:
        with contextlib.nullcontext() if limit is None else interrupted_after(limit):
            result = guarded(function, **arguments)
    else:
        running = asyncio.get_running_loop()
        result = await running.run_in_executor(threads, functools.partial(guarded, function, **arguments))
    # what a partial, a decorator or an object hides is a coroutine function all the same
    if inspect.isawaitable(result):
        return await awaited(result)
    return result


@functools.lru_cache(maxsize=64)
def needs_main_thread(file: str) -> bool:
    """Return whether a file of Python imports what works in a main thread alone, at any place in it.

    Files and packages beside it that it imports count as well, and what these import.

    Example:
        >>> needs_main_thread("nowhere.py")
        False
    """
    unread = [Path(file)]
    visited = set[Path]()
    while unread:
        path = unread.pop()
        if path in visited:
            continue
        visited.add(path)
        for module in _imported(path):
            module_names = module.split(".")
            if module_names[0] in SIGNALLING:
                return True
            for folder in {Path(file).parent, path.parent}:
                package = folder.joinpath(*module_names)
                for candidate in (package.with_suffix(".py"), package / "__init__.py"):
                    if candidate.is_file():
                        unread.append(candidate)
    return False


def _imported(path: Path) -> set[str]:
    """Return the modules that a file imports, at any place in it; relative ones without their dots."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # a name that is imported from a package may be a module of it
            prefix = ""
            if node.module:
                modules.add(node.module)
                prefix = f"{node.module}."
            modules |= {f"{prefix}{alias.name}" for alias in node.names}
    return modules


def error_text(error: BaseException) -> str:
    """Return an error in words: its name and what it says, of a group of errors what those in it say.

    Example:
        >>> error_text(KeyError("x")), error_text(ExceptionGroup("2 failed", [ValueError(), OSError("full")]))
        ("KeyError: 'x'", '2 failed: ValueError; OSError: full')
    """
    if isinstance(error, BaseExceptionGroup):
        return f"{error.message}: {'; '.join(map(error_text, error.exceptions))}"
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # an error of the user's own, whose text fails in its turn
        return name
    return f"{name}: {text}" if text else name
