"""Finds out why workers do not answer: a process or a host that has stopped says nothing by itself."""

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

STOPPED = 10  # looks at which one is stopped, in a row, until it counts as lost
LOOK_S = 1.0  # seconds between two looks at Ray's own processes
ASKING_S = 20  # seconds in which a host has to say how its workers are
DAEMONS = ("gcs_server", "raylet")
STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "Z": "its process has ended",
    "": "it is gone",
}


def state(process: int) -> str:
    """Return the letter that Linux has for the state of a process of this host, "" if there is none."""
    return status(process, 0)


def attended(function: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Return what a function returns; while it takes its time, ``check`` may raise."""
    taken: Future[Any] = Future()
    # no pool: at the end of this process Python would wait for a thread of it that hangs
    threading.Thread(target=_settle, args=(taken, function), daemon=True).start()
    while True:
        try:
            return taken.result(LOOK_S)
        except TimeoutError:
            check()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class ProcessWatch:
    """Looks at the processes of a Ray that was started on this machine; of another there are none to look at.

    Ray itself ends this process a minute after it has lost its control store. It tells of workers that have
    ended, but not of those that are stopped, nor of any that start.
    """

    def __init__(self, session: str, here: bool) -> None:
        """Begin; ``here``: Ray was started on this machine, with this session in its environment."""
        self.session, self.here, self.starting, self.stops = session, here, here, 0
        self.daemons = daemons() if here else {}
        self.workers: dict[int, str] = {}

    def started(self, workers: Mapping[int, str]) -> None:
        """Look from now on at these workers, by process, each with its place."""
        self.starting = False
        self.workers = {process: f"worker {place}" for process, place in workers.items() if self.here}

    def check(self) -> None:
        """Check that they run; ``LostError`` where one does not."""
        begun = processes_of(self.session) if self.starting else []
        watched = dict.fromkeys(begun, "a worker or agent of Ray's") | self.workers | self.daemons
        states = {process: state(process) for process in watched}
        self.stops = self.stops + 1 if "T" in states.values() else 0
        for process, letter in states.items():
            gone = process in self.daemons and letter in STATES and letter != "T"
            if gone or (letter == "T" and self.stops > STOPPED):
                law = f"{watched[process]} on this machine (process {process}): {STATES[letter]}"
                raise LostError(law, law)

    def go_on(self) -> None:
        """Let Ray's processes that are stopped go on, so that they can end: were they killed, Ray would end
        this process as well."""
        for process in (one for one in self.daemons if state(one) == "T"):
            os.kill(process, signal.SIGCONT)


def daemons() -> dict[int, str]:
    """Return Ray's control store and raylet by process, where this process has started them."""
    found = {}
    for process in children(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            program = Path(f"/proc/{process}/cmdline").read_text(errors="replace").partition("\0")[0]
            found[process] = Path(program).name
    return {process: f"Ray's {name}" for process, name in found.items() if name in DAEMONS}


def unresponsive(ray: Any, workers: Mapping[Place, tuple[str, int]]) -> dict[Place, str]:
    """Return, of workers by node and process, those that can't answer, each with the reason.

    Args:
        ray: the module, joined to their cluster.
        workers: the node of each worker as Ray names it, and its process there.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(state)
    asked = {on_node(ask, node).remote(process): place for place, (node, process) in workers.items()}
    ready, late = ray.wait([*asked], num_returns=len(asked), timeout=ASKING_S)
    found = {asked[reference]: f"its host did not answer in {ASKING_S} s" for reference in late}
    for reference in ready:
        try:
            found[asked[reference]] = STATES.get(ray.get(reference), "")
        except Exception:  # of Ray: the host has left the cluster
            found[asked[reference]] = "its host is gone"
    return {place: why for place, why in found.items() if why}
