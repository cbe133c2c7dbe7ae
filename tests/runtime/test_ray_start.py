"""Ray is started again where it gives up on a busy machine, and at once where another thing is wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from rlgraph.runtime.cluster.ray_start import STARTS, start_patiently

# as Ray 2.60 words it (ray/_private/node.py)
TOO_SHORT = "The current node timed out during startup. This could happen because some of the raylet failed"
# Ray's first wait for its own process finds nothing, on a clock by which half a minute has passed
SLOW = """
import time, types
from ray._private import node, services

found, tries = services.get_node, []
def get_node(*args):
    if tries:
        return found(*args)
    node.time.monotonic = lambda: time.monotonic() + 31
    tries.append("one")
    raise RuntimeError("no node yet")

node.time, services.get_node = types.SimpleNamespace(**vars(time)), get_node
from rlgraph.runtime.cluster.ray_start import join
ray = join(num_cpus=1, include_dashboard=False)
print(tries, ray.get(ray.remote(lambda: "done").remote()))
"""


def starting(*errors: Exception) -> tuple[Callable[[], None], list[Exception]]:
    """Return what fails with each error in turn and then starts, and the errors that are left."""
    left = [*errors]

    def start() -> None:
        if left:
            raise left.pop(0)

    return start, left


def test_a_start_that_took_too_long_is_tried_again() -> None:
    start, left = starting(*[Exception(TOO_SHORT)] * (STARTS - 1))
    start_patiently(start)
    assert left == []


def test_what_a_try_has_started_is_ended_before_the_next() -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        assert all(process.wait(10) == -signal.SIGKILL for process in processes)
        processes.append(subprocess.Popen(["sleep", "600"]))
        if len(processes) < STARTS:
            raise Exception(TOO_SHORT)

    other = subprocess.Popen(["sleep", "600"])
    try:
        start_patiently(start)
        assert len(processes) == STARTS
        assert other.poll() is None and processes[-1].poll() is None
    finally:
        for process in (other, *processes):
            process.kill()
            process.wait()


def test_the_last_try_says_what_ray_says() -> None:
    start, left = starting(*[Exception(TOO_SHORT)] * STARTS)
    with pytest.raises(Exception, match="timed out during startup"):
        start_patiently(start)
    assert left == []


def test_another_error_ends_it_at_once() -> None:
    start, left = starting(*[ValueError("num_cpus must be positive")] * 2)
    with pytest.raises(ValueError, match="num_cpus"):
        start_patiently(start)
    assert len(left) == 1


@pytest.mark.nightly
def test_ray_itself_starts_on_the_second_try() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "['one'] done", done.stdout + done.stderr
