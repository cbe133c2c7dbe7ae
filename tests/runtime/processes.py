"""A cluster whose workers are processes that are forked with all imports done, where Ray takes ten seconds.

It keeps the contract of ``runtime/cluster/interface.py``. What is Ray's own (joining, placement, rooms for
columns, doing a task again) is tested on Ray.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import imported

from rlgraph.ir.plan import Plan
from rlgraph.runtime.cluster.cluster import perform, threads_each
from rlgraph.runtime.cluster.liveness import STATES, state
from rlgraph.runtime.cluster.sweeper import Sweeper
from rlgraph.runtime.columns.shared_memory import new_session, segments_of
from rlgraph.runtime.messages.tasks import Place, Task
from rlgraph.runtime.worker.worker import Worker
from rlgraph.variables import referred, with_values

# Threads that ask for an object's dictionary at the same time, as pickle does for a plan's records, may get
# two of the same memory from CPython 3.11; whichever is freed first takes it from the other.
PICKLING = threading.Lock()


class RemoteError(Exception):
    """What a call raised in its worker: ``cause``, with the traceback as text."""

    def __init__(self, cause: Exception, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class RemoteProcess:
    """A process that carries out calls in the order in which they are made."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """Start it; ``make`` is called there, and returns the object that has the methods."""
        context = imported()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()
        self.line = ThreadPoolExecutor(1)

    def call(self, method: str, args: Sequence[Any], returns: int) -> list[Future[Any]]:
        results: list[Future[Any]] = [Future() for _ in range(returns)]
        self.line.submit(self._carry_out, method, args, results)
        return results

    def _carry_out(self, method: str, args: Sequence[Any], results: Sequence[Future[Any]]) -> None:
        try:
            values = [arg.result() if isinstance(arg, Future) else arg for arg in args]
            answer = self._ask(method, values)
            answers = [answer] if len(results) == 1 else [*answer]
            assert len(answers) == len(results), f"{method} returned {len(answers)} values"
        except Exception as error:
            for result in results:
                result.set_exception(error)
            return
        for result, value in zip(results, answers, strict=True):
            result.set_result(value)

    def _ask(self, method: str, values: Sequence[Any]) -> Any:
        from ray.exceptions import RayActorError

        try:
            with PICKLING:
                request = pickle.dumps((method, values))
            self.connection.send_bytes(request)
            answer, error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RayActorError(error_msg="its process has ended") from error
        if error:
            raise RemoteError(*error)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.shutdown(cancel_futures=True)
        self.connection.close()


def serve(connection: Connection, make: Callable[[], Any], environment: dict[str, str]) -> None:
    """Carry out calls until the other end is closed."""
    os.environ.clear()
    os.environ.update(environment)
    target = make()
    while True:
        try:
            method, values = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer, failed = getattr(target, method)(*values), None
        except Exception as error:
            answer, failed = None, (error, traceback.format_exc())
        connection.send_bytes(pickle.dumps((answer, failed)))


class Beside:
    """Tasks that need no engine."""

    perform = staticmethod(perform)


class ProcessCluster:
    """A process per device, and one per device for tasks beside it."""

    inline = False
    shares = True
    notes = ()

    def __init__(
        self,
        pools: Mapping[str, int],
        gpus: bool,
        address: str | None,
        logs: Path,
        timeout: float,
        together: Mapping[str, int] | None = None,
        whole: Collection[str] = (),
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        """As ``RayCluster``, on the CPUs of this machine, in this environment."""
        assert not runtime_env and not whole
        assert not gpus and address is None
        self.places = [(pool, device) for pool, devices in pools.items() for device in range(devices)]
        self.logs, self.session = str(logs.resolve()), new_session()
        self.sweeper = Sweeper(self.session, segments_of(self.session), "")
        options = {"device": "cpu", "session": self.session}
        threads = threads_each(len(self.places))
        self.workers = {
            place: RemoteProcess(partial(Worker, threads, f"{self.logs}/worker-{n}.log", **options))
            for n, place in enumerate(self.places)
        }
        self.others: dict[Place, RemoteProcess] = {}

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        return self.workers[place].call(method, args, returns)

    def call_off_device(
        self, plan: Plan, place: Place, tasks: Sequence[Task], *parts: Any, returns: int
    ) -> list[Any]:
        if place not in self.others:
            self.others[place] = RemoteProcess(Beside)
        values = referred(plan)
        plan = with_values(plan, values)
        return self.others[place].call("perform", (plan, values, place, self.logs, tasks, *parts), returns)

    def put(self, value: Any) -> Any:
        result: Future[Any] = Future()
        result.set_result(value)
        return result

    def get(self, references: Sequence[Any]) -> list[Any]:
        return [reference.result() for reference in references]

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done, _ = wait(references, timeout, FIRST_COMPLETED)
        return [one for one in references if one in done], [one for one in references if one not in done]

    def unresponsive(self) -> dict[Place, str]:
        letters = {place: state(worker.process.pid or 0) for place, worker in self.workers.items()}
        return {place: STATES[letter] for place, letter in letters.items() if letter in STATES}

    def close(self) -> None:
        every = (*self.workers.values(), *self.others.values())
        for process in every:  # all of them first: one may wait for what another returns
            process.process.kill()
        for process in every:
            process.end()
        self.sweeper.close()
