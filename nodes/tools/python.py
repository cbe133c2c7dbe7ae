"""Python in a process of its own, with the limits of reward.code; like that, no sandbox for hostile code."""

from __future__ import annotations

import os
import select
import time

from rlgraph.nodes.support.sandbox import MIB, Limits, check_network, confined

MOST = 2**16  # bytes of output that are read


def python(
    code: str, *, timeout: float = 10.0, memory_mib: int = 1024, file_mib: int = 16, network: bool = False
) -> str:
    """Run a Python program; the answer is what it prints, its traceback included.

    Args:
        code: the program; it starts anew each time, in an empty folder.

    Attributes:
        timeout: seconds that it may take, above 0; less than ``tool_timeout`` of the rollout.
        memory_mib: address space of the process, in MiB.
        file_mib: size of any file that it writes, in MiB.
        network: whether it may use the network; without, Linux must let users make namespaces (unshare).

    Example:
        tools: {python: {kind: python, timeout: 5}}
    """
    check_network("the tool python", network)
    limits = Limits(timeout, memory_mib * MIB, file_mib * MIB, network)
    with confined({"program": code}, limits) as output:
        printed, in_time = _read(output, time.monotonic() + timeout)
    text = printed.decode("utf-8", "replace").rstrip()
    return text if in_time else f"{text}\n(ended: it ran over {timeout:g} s)".lstrip()


def _read(output: int, end: float) -> tuple[bytes, bool]:
    """Return the start of a process's output, and whether it ended before ``end``."""
    printed = b""
    while len(printed) < MOST:
        if not select.select([output], [], [], max(end - time.monotonic(), 0))[0]:
            return printed, False
        part = os.read(output, MOST)
        if not part:
            break
        printed += part
    return printed[:MOST], True
