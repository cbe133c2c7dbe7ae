"""Finds out why workers do not answer: a process or host that has stopped does not report it."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlgraph.runtime.cluster.failures import LostError
from rlgraph.runtime.cluster.ray_start import on_node
from rlgraph.runtime.cluster.sweeper import children, processes_of, status
from rlgraph.runtime.messages.tasks import Place

STOPPED_CHECKS = 10  # consecutive checks in which a process is stopped, after which it counts as lost
LOOK_S = 1.0  # seconds between two checks of Ray's own processes
ASKING_S = 20  # seconds in which a host has to report the state of its workers
DAEMONS = ("gcs_server", "raylet")
STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "Z": "its process has ended",
    "": "it is gone",
}


def state(process: int) -> str:
    """Return the letter that Linux has for the state of a process on this host, "" if there is none."""
    return status(process, 0)


def attended(function: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Return what a function returns; ``check`` is called every second until then, and may raise."""
    result: Future[Any] = Future()
    # not a thread pool: Python would wait for a hanging thread of it when this process ends
    threading.Thread(target=_settle, args=(result, function), daemon=True).start()
    while True:
        try:
            return result.result(LOOK_S)
        except TimeoutError:
            check()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class ProcessWatch:
    """Checks the processes of a Ray that was started on this machine; there are none of a Ray elsewhere.

    Ray ends this process a minute after it has lost its control store, and reports workers that have ended.
    It reports neither workers that are stopped nor those that are still starting.

    Invariants:
        - ``daemons`` and ``workers`` are empty if Ray was not started on this machine.
        - ``stopped_checks`` counts the checks in a row in which some process was stopped.
    """

    def __init__(self, session: str, here: bool) -> None:
        """Watch Ray's daemons.

        Args:
            session: a text in the environment of Ray's processes.
            here: whether Ray was started on this machine.
        """
        self.session = session
        self.here = here
        self.is_starting = here
        self.stopped_checks = 0
        self.daemons = daemons() if here else {}
        self.workers: dict[int, str] = {}

    def started(self, workers: Mapping[int, str]) -> None:
        """Watch these workers from now on: the place of each by process id."""
        self.is_starting = False
        if self.here:
            self.workers = {process: f"worker {place}" for process, place in workers.items()}

    def check(self) -> None:
        """Raise a ``LostError`` if a daemon has ended, or a process has been stopped for too long."""
        watched: dict[int, str] = {}
        if self.is_starting:
            watched = dict.fromkeys(processes_of(self.session), "a worker or agent of Ray's")
        watched = watched | self.workers | self.daemons
        states = {process: state(process) for process in watched}
        self.stopped_checks = self.stopped_checks + 1 if "T" in states.values() else 0
        for process, letter in states.items():
            if letter == "T":
                is_lost = self.stopped_checks > STOPPED_CHECKS
            else:  # Ray itself reports workers that have ended
                is_lost = process in self.daemons and letter in STATES
            if is_lost:
                law = f"{watched[process]} on this machine (process {process}): {STATES[letter]}"
                raise LostError(law, law)

    def resume_daemons(self) -> None:
        """Let daemons that are stopped go on, so that they can end.

        They are not killed: Ray would end this process as well.
        """
        for process in self.daemons:
            if state(process) == "T":
                os.kill(process, signal.SIGCONT)


def daemons() -> dict[int, str]:
    """Return Ray's control store and raylet by process id, if this process has started them."""
    result: dict[int, str] = {}
    for process in children(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            program = Path(f"/proc/{process}/cmdline").read_text(errors="replace").partition("\0")[0]
            name = Path(program).name
            if name in DAEMONS:
                result[process] = f"Ray's {name}"
    return result


def unresponsive(ray: Any, workers: Mapping[Place, tuple[str, int]]) -> dict[Place, str]:
    """Return the workers that can't answer, each with the reason.

    Args:
        ray: the module, joined to their cluster.
        workers: the node of each worker by Ray's name, and its process id there.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(state)
    place_of = {on_node(ask, node).remote(process): place for place, (node, process) in workers.items()}
    answered, silent = ray.wait([*place_of], num_returns=len(place_of), timeout=ASKING_S)
    reasons = {place_of[reference]: f"its host did not answer in {ASKING_S} s" for reference in silent}
    for reference in answered:
        try:
            letter = ray.get(reference)
        except Exception:  # Ray raises errors of several kinds once the host has left the cluster
            reasons[place_of[reference]] = "its host is gone"
            continue
        if letter in STATES:
            reasons[place_of[reference]] = STATES[letter]
    return reasons
