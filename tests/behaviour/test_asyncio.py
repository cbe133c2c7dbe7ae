"""What asyncio of Python 3.11 makes of what a user's function may do, and user_call.py guards against."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.nightly


async def exits() -> None:
    raise SystemExit("enough")


async def cancels() -> None:
    raise asyncio.CancelledError


async def rest() -> str:
    await asyncio.sleep(0.05)
    return "done"


def test_an_exit_in_a_task_ends_the_loop_whoever_awaits_the_task() -> None:
    caught = list[str]()

    async def main() -> None:
        tasks = [asyncio.create_task(exits()), asyncio.create_task(rest())]
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            caught.append("results")
        except SystemExit:
            caught.append("an exit")
        except asyncio.CancelledError:
            caught.append("a cancellation")  # the runner's, as it cleans up
            raise

    with pytest.raises(SystemExit, match="enough"):
        asyncio.run(main())
    assert caught == ["a cancellation"]


def test_a_cancellation_that_a_function_raises_is_no_cancellation_of_who_awaits_it() -> None:
    async def main() -> tuple[Any, int]:
        task = asyncio.current_task()
        assert task
        try:
            await cancels()
        except asyncio.CancelledError:
            return await asyncio.gather(cancels(), rest(), return_exceptions=True), task.cancelling()
        raise AssertionError

    (first, second), cancelling = asyncio.run(main())
    assert isinstance(first, asyncio.CancelledError) and second == "done"
    assert cancelling == 0, "the task's own count tells the two apart"


def test_one_cancelled_task_of_a_gather_raises_an_error_that_no_except_exception_takes() -> None:
    async def main() -> None:
        await asyncio.gather(cancels(), rest())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert not issubclass(asyncio.CancelledError, Exception)


@pytest.mark.filterwarnings("ignore")  # what asyncio says of the callback that fails
def test_a_stop_iteration_of_a_thread_is_never_delivered() -> None:
    def stops() -> None:
        raise StopIteration

    async def main(threads: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        await asyncio.wait_for(loop.run_in_executor(threads, stops), 1.0)

    with ThreadPoolExecutor(1) as threads, pytest.raises((TimeoutError, TypeError, RuntimeError)) as raised:
        asyncio.run(main(threads))
    assert raised.type is TimeoutError, "it is waited for without end"


def test_a_functions_own_timeout_is_taken_for_that_of_who_waits_for_it() -> None:
    async def late() -> None:
        raise TimeoutError("the judge's own")

    async def main() -> str:
        try:
            await asyncio.wait_for(late(), 60)
        except TimeoutError:
            return "late"
        return "in time"

    assert asyncio.run(main()) == "late"


HELD = """
import asyncio, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
threads = ThreadPoolExecutor(1) if sys.argv[1] == "own" else None
async def main():
    running = asyncio.get_running_loop().run_in_executor(threads, time.sleep, 5)
    try:
        await asyncio.wait_for(running, 0.1)
    except TimeoutError:
        print("late", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("threads", ["own", "default"])
def test_a_thread_that_is_late_holds_up_the_end_of_the_process(threads: str) -> None:
    since = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HELD, threads], capture_output=True, text=True, check=True)
    assert done.stdout == "late\n" and time.monotonic() - since > 4.5
