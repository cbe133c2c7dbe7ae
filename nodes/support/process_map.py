"""A function of many items, computed by several processes, with its results in order.

this process   items ── pickle ──> python -m rlgraph.nodes.support.process_map ──> results, in order

Such a process is not a copy of this one, which may have threads and devices, and imports no module of the
user's, as one of multiprocessing would. It ends when its input does, and so outlives nobody.
"""

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from rlgraph.errors import RunError

WorkItem = TypeVar("WorkItem")
WorkResult = TypeVar("WorkResult")
ALONE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ChildProcess = subprocess.Popen[bytes]


def process_map(
    function: Callable[[WorkItem], WorkResult], items: Iterable[WorkItem], processes: int
) -> Iterator[WorkResult]:
    """Yield a function's result for each item; at most twice as many items as processes are ahead.

    Function, items and results are pickled.

    Raises:
        RunError: a process was ended from outside, as for its memory.
        Exception: what the function raised, for the first item for which it did.
    """
    free: SimpleQueue[ChildProcess] = SimpleQueue()

    def ask(item: WorkItem) -> WorkResult:
        process = free.get()
        try:
            result: WorkResult = _answer(process, item)
            return result
        finally:
            free.put(process)

    with ThreadPoolExecutor(processes) as threads, ExitStack() as ends:
        waiting: deque[Future[WorkResult]] = deque()
        ends.callback(lambda: [future.cancel() for future in waiting])
        started = [_started() for _ in range(processes)]  # they import side by side, before one is written to
        for process in started:
            ends.callback(_end, process)  # a thread that waits for it then goes on
        for process in started:
            _send(process, function)
            free.put(process)
        for item in items:
            waiting.append(threads.submit(ask, item))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _started() -> ChildProcess:
    command, pipe = [sys.executable, "-m", "rlgraph.nodes.support.process_map"], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **ALONE})


def _end(process: ChildProcess) -> None:
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(BrokenPipeError):
            pipe.close()


def _send(process: ChildProcess, value: Any) -> None:
    assert process.stdin
    with suppress(BrokenPipeError):  # the answer will be missing
        pickle.dump(value, process.stdin)
        process.stdin.flush()


def _answer(process: ChildProcess, item: Any) -> Any:
    assert process.stdout
    _send(process, item)
    try:
        result, error = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        law = f"a process that prepares data ended with {process.wait()}"
        raise RunError(f"{law}; see what it wrote, and whether the host has memory left") from None
    if error:
        raise error
    return result


def _picklable(error: Exception) -> Exception:
    """Return an error as it is if it survives pickling, and else one of its name and words."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Answer one pickled item after the other, by the function that comes first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks is interrupted, and ends this process
    answers = os.fdopen(os.dup(1), "wb")
    gc.set_threshold(1_000_000, 10, 10)  # rows are not garbage, and each collection goes through them
    os.dup2(2, 1)  # what a function prints is not an answer
    with suppress(EOFError, BrokenPipeError):
        function = pickle.load(sys.stdin.buffer)
        while True:
            item = pickle.load(sys.stdin.buffer)
            try:
                answer = pickle.dumps((function(item), None))
            except Exception as error:
                answer = pickle.dumps((None, _picklable(error)))
            answers.write(answer)
            answers.flush()


if __name__ == "__main__":
    main()
