"""A supervisor that compares mathematical answers in processes of their own, several at a time.

Math-Verify stops a runaway answer with SIGALRM, which works only in a main thread and only between bytecodes:
neither is given in an actor or for ``9^{9^{9}}``. So answers are judged in workers that the kernel ends when
their time is up, and that are forked anew, within milliseconds, from a process that has imported sympy:

    this process ── socket per worker ──┐
    server ── keeper ── worker          │   ["\\boxed{1/2}", "0.5", false, 5.0]  ->  "right"
           └─ keeper ── worker          │   the worker is ended                  ->  "late", by its keeper
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from rlgraph.errors import RunError
from rlgraph.nodes.reward.equality import Verdict, compare

START_SECONDS = 120.0  # the server imports sympy; a busy machine is slow at it


class VerifierError(RunError):
    """The processes that judge answers can't be had; the message says how to find out why."""


class Verifier:
    """A server and its workers, started on first use.

    Invariants:
    * while ``server`` runs there are ``parallel`` connections, one to each worker: those in ``free`` and
      those that a call of ``_ask`` has taken out; without a server there are none;
    * ``lock`` is held by whoever starts the server, asks it or finds that it has ended.
    """

    def __init__(self, parallel: int, memory: int) -> None:
        """Judge ``parallel`` answers at a time, each in at most ``memory`` bytes of address space."""
        self.parallel, self.memory = parallel, memory
        self.server: subprocess.Popen[bytes] | None = None
        self.free = SimpleQueue[socket.socket]()  # connections to workers that have nothing to do
        self.lock = threading.Lock()

    def judge(
        self, pairs: Sequence[tuple[str, str | Sequence[str]]], timeout: float, unevaluated: bool = False
    ) -> list[Verdict]:
        """Judge responses against their answers; ``late`` is one that takes too much time or memory.

        An answer is a reference, or several of which any counts.

        Raises:
            VerifierError: the server can't be started, or ended twice.
        """
        jobs = [(*pair, unevaluated, timeout) for pair in pairs]
        with self.lock:  # steps may run in threads
            for _ in range(2):
                self._start()
                try:
                    with ThreadPoolExecutor(self.parallel) as pool:
                        return list(pool.map(self._ask, jobs))
                except OSError:  # somebody else ended one of its processes
                    self.close()
        raise VerifierError("reward.math's verifier was ended twice, perhaps for want of memory on this host")

    def close(self) -> None:
        """End all processes."""
        if self.server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.communicate()
            self.server = None
        while not self.free.empty():
            self.free.get().close()

    def _ask(self, job: tuple[str, str | Sequence[str], bool, float]) -> Verdict:
        connection = self.free.get()
        try:
            connection.settimeout(job[-1] + START_SECONDS)
            connection.sendall(json.dumps(job).encode() + b"\n")
            reply = connection.recv(64)
        finally:
            self.free.put(connection)
        if not reply:
            raise ConnectionError
        verdict: Verdict = json.loads(reply)
        return verdict

    def _start(self) -> None:
        if self.server is not None:
            return
        ours = []
        theirs = []
        for _ in range(self.parallel):
            our_end, their_end = socket.socketpair()
            ours.append(our_end)
            theirs.append(their_end)
        command = [sys.executable, "-W", "ignore", "-m", "rlgraph.nodes.reward.verifier", str(self.memory)]
        numbers = [end.fileno() for end in theirs]
        # in a session of its own: a Ctrl-C that stops the run after its iteration is not a verdict
        self.server = server = subprocess.Popen(
            [*command, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=numbers,
            start_new_session=True,
        )
        for end in theirs:
            end.close()
        for end in ours:
            self.free.put(end)
        assert server.stdout is not None  # a pipe was asked for
        is_ready, _, _ = select.select([server.stdout], [], [], START_SECONDS)
        if not (is_ready and server.stdout.readline()):
            self.close()
            raise VerifierError(f"reward.math could not start its verifier; try: {' '.join(command)}")


@functools.lru_cache(maxsize=4)
def verifier(parallel: int, memory: int) -> Verifier:
    """Return this process's verifier with these limits."""
    shared = Verifier(parallel, memory)
    atexit.register(shared.close)
    return shared


def serve(memory: int, numbers: Sequence[int]) -> None:
    """Answer on each of some connections, given as file descriptors, until its other end is closed."""
    logging.disable(logging.CRITICAL)  # Math-Verify warns that it has no timeout: workers have
    compare("$\\frac{1}{2}$", "1", unevaluated=False)
    print("ready", flush=True)
    for number in numbers:
        if not os.fork():
            _keep(number, memory)
            return
    for _ in numbers:
        os.wait()


def _keep(number: int, memory: int) -> None:
    """Keep a worker on a connection, and answer for each that ends early: only a job makes one end."""
    with socket.socket(fileno=number) as connection:
        while select.select([connection], [], []):
            worker = os.fork()
            if not worker:
                _work(connection, memory)
            if os.waitpid(worker, 0)[1] == 0:
                return
            connection.sendall(b'"late"\n')


def _work(connection: socket.socket, memory: int) -> None:
    """Answer one line per pair until the connection is closed; end this process in any case."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for line in connection.makefile(encoding="utf-8", newline="\n"):
            response, answer, unevaluated, timeout = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout)
            verdict = compare(response, answer, unevaluated)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(json.dumps(verdict).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]), [*map(int, sys.argv[2:])])
