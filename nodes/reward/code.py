"""A reward for a program that passes a test, run in a sandbox (``nodes/support/sandbox.py``)."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from pydantic import Field, PositiveFloat

from rlgraph.nodes.reward.judging import judge
from rlgraph.nodes.reward.per_sample import record_late, record_some, shown
from rlgraph.nodes.reward.suspicious import is_suspicious
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.sandbox import MIB, Limits, check_sandbox
from rlgraph.nodes.support.thinking import outside_thinking
from rlgraph.ops import SPREAD, Context, float32, op, samples, text

BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
PYTHON = ("", "python", "python3", "py")


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
    allow_unsandboxed: bool = False,
    parallel: Annotated[int, Field(ge=1)] = 4,
) -> float32[samples]:
    """1.0 where the response's Python passes the test in ``answer``, else 0.0 (arXiv 2107.03374).

    The program is the last fenced block after the response's thinking that has no label or a label of Python,
    or everything after the thinking if there is no such block. Names of the standard library that the
    published harnesses import for a program, such as ``List``, ``heapq`` and ``math``, are available
    (``nodes/sandboxed/harness.py``). An expected ``nan`` equals nothing. The program runs in a sandbox
    without network, environment or files of the run (``nodes/support/sandbox.py`` lists the guarantees), and
    is judged from outside. There are two kinds of tests.

    JSON ``{"inputs": [...], "outputs": [...]}``, as in APPS, TACO and LiveCodeBench: each input is the
    standard input of a new process, which must end without an error and print the output. Lines are compared
    word by word, ignoring empty lines at the end, and a number whose expected form has a decimal point may
    differ by 1e-6. With ``fn_name``, each input is the list of arguments (or text: one JSON value per line)
    of a call of that function, or method of the class ``Solution``; its value as JSON must equal the output,
    or the output's only element. No program passes a test without inputs. The outputs never enter the
    sandbox.

    Anything else is Python that raises if the program is wrong (HumanEval, MBPP). It runs in an interpreter
    in its own sandbox, where names that it uses without defining them refer to the program's. What a call
    returns arrives as plain data: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset
    and dict, of exactly these types (a namedtuple is a tuple). Any other object stays in the program's
    process, which answers for its calls, attributes, items, iteration, length, truth and text; it equals only
    itself, has no order and no arithmetic, and has as many items as its length says. A range, generator or
    view of a dict is passed as a list. A list, dict or set passed as an argument takes on the changes that
    the call makes to it. Constants are read once, before the test begins. An exception arrives as the
    built-in exception that it extends. A module of the standard library that the test forgot to import is
    Python's own. A test can't pass its own functions, compare the program's objects by value, or await. No
    program passes a test that never calls it, such as one that defines ``check`` and does not call it. A test
    of a function with the name of a built-in uses no other built-in function.

    A program can still guess, or recognise the inputs of the test and return answers that it remembers. It
    can pass by returning nothing if a test loops over what it returns without checking the length (``all(a ==
    b for a, b in zip(f(x), [1, 2]))``). It can pass with any answer if a test passes it the expected value
    (``shape.equals(6)``), uses more of its functions than the tested one (``encode`` to test ``decode``), or
    computes the expected value from a list after passing that list.

    Records ``reward/mean``; ``reward/late``, the fraction that ran out of time, the first of which is logged;
    and ``reward/suspicious``, the fraction that used what a solution does not need, such as frames, processes
    or signals (``nodes/reward/suspicious.py``), or whose process broke the protocol of its calls. Being
    suspicious changes no reward; if the fraction rises, read the samples. ``reward/unjudged`` is the fraction
    that could not be judged, usually because of an error in the test; the first of them is logged.

    Attributes:
        timeout: seconds that a program and its test may take together, above 0.
        memory_mib: address space per process and memory of all its processes together, in MiB, at least 64;
            libraries such as NumPy need 1024.
        file_mib: the most that it may write in total, and the most of one input, in MiB, at least 1; both are
            kept in memory.
        network: whether it may use the network, including this host's loopback; everything else stays closed.
        allow_unsandboxed: whether to go on if Linux provides no sandbox; programs then run with resource
            limits only: they can read and write what the run's user can, including its API keys, and reach
            the network.
        parallel: concurrent programs, at least 1.

    Example:
        rewards: {op: reward.code, timeout: 10}
    """
    check_sandbox("reward.code", allow_unsandboxed)
    limits = Limits(timeout, memory_mib * MIB, file_mib * MIB, network)
    programs = [program(response) for response in responses]
    with ThreadPoolExecutor(parallel) as pool:
        verdicts = list(pool.map(lambda source, test: judge(source, test, limits), programs, answer))
    scores = [float(verdict.passed is True) for verdict in verdicts]
    suspicious = []
    for verdict, source in zip(verdicts, programs, strict=True):
        suspicious.append(verdict.malformed or is_suspicious(source))
    ctx.record("reward/", scores, kind=SPREAD)
    ctx.record("reward/suspicious", suspicious, kind="share")
    faults = [verdict.fault for verdict in verdicts]
    law = "could not be judged and get no reward"
    record_some(
        ctx,
        "reward/unjudged",
        [*map(bool, faults)],
        law,
        lambda row: f"{shown(faults[row])}; its test: {shown(answer[row])}",
    )
    record_late(ctx, [verdict.passed is None for verdict in verdicts], responses)
    return torch.tensor(scores, dtype=torch.float32)


def program(response: str) -> str:
    r"""Return the program in a response: the last block behind its thinking that may be Python.

    A block that is labelled as another language is none, and neither is one that is not closed.

    Example:
        >>> program("So:\n```python\nx = 1\n```\nIt prints:\n```text\n1\n```")
        'x = 1\n'
    """
    answer = outside_thinking(response)
    blocks = [source for label, source in BLOCK.findall(answer) if label.strip().lower() in PYTHON]
    return str(blocks[-1]) if blocks else answer
