"""A reward for a program that passes a test, run in a process of its own (``nodes/support/sandbox.py``)."""

from __future__ import annotations

import os
import re
import secrets
import select
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from pydantic import Field, PositiveFloat

from rlgraph.nodes.reward.per_sample import record_late
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.sandbox import MIB, Limits, check_network, confined
from rlgraph.ops import Context, float32, op, samples, text


@op(beside=True)
def code(
    ctx: Context,
    responses: text[samples],
    answer: text[samples],
    *,
    timeout: PositiveFloat = 10.0,
    memory_mib: Annotated[int, Field(ge=64)] = 1024,
    file_mib: Annotated[int, Field(ge=1)] = 16,
    network: bool = False,
    parallel: Annotated[int, Field(ge=1)] = 4,
) -> float32[samples]:
    """1.0 where the response's Python passes the test in ``answer``, else 0.0 (arXiv 2107.03374).

    The program is the last fenced block of the response, or all of it where there is none. ``answer`` is
    Python that runs behind it, with its names, and raises where it is wrong. Each runs in a process of its
    own, in an empty folder, with no environment, under limits of time, address space, file size and open
    files, and without network; then its process group is killed. This is no sandbox: it can read what the
    run's user can read, write where that user can write, start processes that leave its group, and look for
    the secret by which it is judged. Run hostile code in a container or on another machine (reward.remote).
    Records ``reward/mean`` and ``reward/late``, the fraction that ran out of time; the first is logged.

    Attributes:
        timeout: seconds that a program and its test may take together, above 0.
        memory_mib: address space of the process, in MiB, at least 64; libraries such as NumPy want 1024.
        file_mib: size of any file that it writes, in MiB, at least 1.
        network: whether it may use the network; without, Linux must let users make namespaces (unshare).
        parallel: programs at a time, at least 1.

    Example:
        rewards: {op: reward.code, timeout: 10}
    """
    check_network("reward.code", network)
    limits = Limits(timeout, memory_mib * MIB, file_mib * MIB, network)
    with ThreadPoolExecutor(parallel) as pool:
        verdicts = list(pool.map(lambda r, a: passes(program(r), a, limits), responses, answer))
    scores = [float(verdict is True) for verdict in verdicts]
    ctx.record("reward/mean", scores)
    record_late(ctx, [verdict is None for verdict in verdicts], responses)
    return torch.tensor(scores, dtype=torch.float32)


def program(response: str) -> str:
    r"""Return the program in a response.

    Example:
        >>> program("So:\n```python\nx = 1\n```\nDone.")
        'x = 1\n'
    """
    blocks = re.findall(r"```[^\n`]*\n(.*?)```", response, re.DOTALL)
    return blocks[-1] if blocks else response


def passes(source: str, test: str, limits: Limits) -> bool | None:
    """Return whether a program and then its test run to their end; None if they run out of time."""
    token = secrets.token_hex(16)
    with confined({"program": source, "test": test, "token": token}, limits) as verdict:
        in_time = bool(select.select([verdict], [], [], limits.timeout)[0])
        output = os.read(verdict, len(token)) if in_time else b""
    return output == token.encode() if in_time else None
