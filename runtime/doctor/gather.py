"""Runs probes, each in a process of its own with a time limit, and collects the facts that they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlgraph.runtime.doctor.probes import ProbeCall, ProbeFacts


def gather(asked: Sequence[ProbeCall], timeout: float) -> dict[str, list[ProbeFacts]]:
    """Run probes beside one another.

    Args:
        asked: each probe with its argument; one may be asked several times.
        timeout: seconds that all of them together may take.

    Returns:
        For each probe its facts, one per time that it was asked, in order. Facts of a probe that gave none
        are ``{"failed": reason, "argument": ...}``.
    """
    ends = time.monotonic() + timeout
    started = [(name, argument, start(name, argument)) for name, argument in asked]
    facts: dict[str, list[ProbeFacts]] = {}
    for name, argument, process in started:
        found = answer(process, max(ends - time.monotonic(), 0.1), timeout)
        facts.setdefault(name, []).append(found | ({"argument": argument} if "failed" in found else {}))
    return facts


def start(name: str, argument: str | None) -> subprocess.Popen[str]:
    """Start the process of a probe."""
    command = [sys.executable, "-m", "rlgraph.runtime.doctor.probes", name, *([argument] if argument else [])]
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "stdin": subprocess.DEVNULL,
    }
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


def answer(process: subprocess.Popen[str], left: float, timeout: float) -> ProbeFacts:
    """Return the facts that a probe's process prints last, or why there are none.

    Args:
        process: of the probe.
        left: seconds to wait for it.
        timeout: what the user allowed in all, for the message.
    """
    try:
        printed, said = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a disk can't be killed
            process.communicate(timeout=1)
        return {"failed": f"no answer within {timeout:g} s"}
    if process.returncode:
        return {"failed": (said.strip() or f"ended with exit code {process.returncode}").splitlines()[-1]}
    found: ProbeFacts = json.loads(printed.splitlines()[-1])
    return found
