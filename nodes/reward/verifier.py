r"""A supervisor that runs Math-Verify in a child process.

Math-Verify stops a runaway answer with SIGALRM, which works only in a main thread and only between bytecodes:
neither is given in an actor or for ``9^{9^{9}}``. So answers are judged in a child, which is killed and
replaced when it runs late.

    parent  ["\\boxed{1/2}", "0.5"]       ->  child
            "right", "wrong", "unparsed"  <-           (unparsed: there is no answer in the response)
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["right", "wrong", "unparsed", "late"]
START_SECONDS = 120.0  # the child imports sympy; a busy machine is slow at it


class VerifierError(Exception):
    """The child that judges answers can't be started; the message says how to find out why."""


class Verifier:
    """A child process that compares answers, started on first use and again after a timeout."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def judge(self, pairs: Sequence[tuple[str, str]], timeout: float) -> list[Verdict]:
        """Judge each response against its answer; ``late`` means that it took over ``timeout`` seconds."""
        with self.lock:  # steps may run in threads; the child answers one at a time
            return [self._judge_one(response, answer, timeout) for response, answer in pairs]

    def close(self) -> None:
        """Kill the child."""
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None

    def _judge_one(self, response: str, answer: str, timeout: float) -> Verdict:
        if self.child is not None and self.child.poll() is not None:
            self.close()
        child = self.child = self.child or _start()
        child.stdin.write(json.dumps([response, answer]) + "\n")
        child.stdin.flush()
        line = child.stdout.readline() if _readable(child, timeout) else ""
        if not line:  # late; or it died, of memory say
            self.close()
            return "late"
        verdict: Verdict = json.loads(line)
        return verdict


@functools.lru_cache(maxsize=1)
def verifier() -> Verifier:
    """Return this process's verifier."""
    shared = Verifier()
    atexit.register(shared.close)
    return shared


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "rlgraph.nodes.reward.verifier"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    if not (_readable(child, START_SECONDS) and child.stdout.readline()):
        child.kill()
        child.communicate()
        raise VerifierError(f"reward.math could not start its verifier; try: {' '.join(command)} < /dev/null")
    return child


def _readable(child: subprocess.Popen[str], timeout: float) -> bool:
    return bool(select.select([child.stdout], [], [], timeout)[0])


def compare(response: str, answer: str) -> Verdict:
    """Compare a response's answer with the reference. May take forever."""
    from math_verify import parse, verify

    parsed = parse(response, parsing_timeout=None)
    if not parsed:
        return "unparsed"
    equal = verify(parse(f"\\boxed{{{answer}}}", parsing_timeout=None), parsed, timeout_seconds=None)
    return "right" if equal else "wrong"


def serve() -> None:
    """Answer one line per pair until the input ends."""
    logging.disable(logging.CRITICAL)  # Math-Verify warns that it has no timeout: the parent has
    compare("1", "1")
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(compare(*json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
