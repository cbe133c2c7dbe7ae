"""A judge of programs and their tests, outside of their processes and their sandboxes.

inputs and outputs   parent ── calls, inputs ──> sandbox: program; the parent compares
Python asserts       sandbox: test ── calls ──> sandbox: program; the test's interpreter gives the verdict
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from rlgraph.nodes.sandboxed.wire import Broken, RemoteProgram
from rlgraph.nodes.support.sandbox import MIB, Limits, NoSandboxError, confined

TOLERANCE = 1e-6  # of a number that is expected with a decimal point


class Judgement(NamedTuple):
    """The outcome of a program and its test."""

    passed: bool | None  # None: it ran out of time
    malformed: bool = False  # whether its process sent something that is not a reply
    fault: str = ""  # why it could not be judged, where that is not its own fault


def judge(source: str, answer: str, limits: Limits) -> Judgement:
    """Return the verdict on a program, and of what is not its own fault what is wrong.

    Raises:
        NoSandboxError: a sandbox did not start.
    """
    try:
        cases = in_out(answer)
        if cases is None:
            return _by_asserts(source, answer, limits)
        return _by_cases(source, cases, limits)
    except NoSandboxError:
        raise
    except Exception as error:  # one response ends no run
        return Judgement(False, fault=f"{type(error).__name__}: {error}")


def in_out(answer: str) -> dict[str, Any] | None:
    """Return the test's inputs and outputs; None where it is Python.

    Example:
        >>> in_out('{"inputs": ["1 2"], "outputs": ["3"]}')
        {'inputs': ['1 2'], 'outputs': ['3']}
        >>> in_out("assert add(1, 2) == 3")
    """
    try:
        cases = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if isinstance(cases, dict) and {"inputs", "outputs"} <= cases.keys():
        return cases
    return None


def _by_asserts(source: str, test: str, limits: Limits) -> Judgement:
    with (
        confined("serve", {"program": source}, limits) as program,
        confined("check", {"test": test}, limits, peer=program) as tester,
    ):
        verdict = json.loads(tester.read(MIB) or '{"passed": false}')
        passed = verdict.pop("passed")
        if not passed:
            passed = None if program.is_late() else False
    return Judgement(passed, **verdict)


def _by_cases(source: str, cases: dict[str, Any], limits: Limits) -> Judgement:
    name = cases.get("fn_name")
    inputs, outputs = cases["inputs"], cases["outputs"]
    with confined("serve" if name else "run", {"program": source}, limits) as sandbox:
        if not inputs:
            return Judgement(False)
        stream: Any = sandbox.socket.makefile("rwb")
        program = RemoteProgram(stream, stream, str, _text)
        try:
            for case_input, expected in zip(inputs, outputs, strict=True):
                if name:
                    is_right = returns_expected(program, name, case_input, expected)
                else:
                    is_right = prints(program, case_input, expected)
                if not is_right:
                    return Judgement(False)
        except Broken as broken:
            return Judgement(None if sandbox.is_late() else False, broken.malformed)
        return Judgement(True)


def returns_expected(program: RemoteProgram, name: str, case_input: Any, expected: Any) -> bool:
    """Return whether a function of a program gives the JSON value that is expected of its arguments."""
    if isinstance(case_input, str):  # as LiveCodeBench has them: one JSON value per line
        case_input = [json.loads(line) for line in case_input.splitlines()]
        expected = json.loads(expected)
    try:
        value = json.loads(program.ask("solve", name, json.dumps(case_input)))
    except Broken:
        raise
    except Exception:  # the program's, or of what is no JSON
        return False
    return bool(value == expected or [value] == expected)


def prints(program: RemoteProgram, case_input: Any, expected: Any) -> bool:
    """Return whether a program prints what is expected of its standard input."""
    wanted, lines = _lines(expected), _lines(case_input)
    try:
        return same_output(program.ask("run", lines), wanted)
    except Broken:
        raise
    except Exception:  # it ended with an error
        return False


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have the same words in each line, but for empty last lines.

    A number that is expected with a decimal point may be off by ``TOLERANCE``, relative or not.

    Example:
        >>> same_output("1 \\n0.3333333", "1\\n0.33333330000001\\n")
        True
        >>> same_output("1000000", "1000001")
        False
    """
    lines = printed.rstrip().splitlines()
    expected_lines = expected.rstrip().splitlines()
    if len(lines) != len(expected_lines):
        return False
    return all(map(_same_line, lines, expected_lines))


def _same_line(printed: str, expected: str) -> bool:
    words = printed.split()
    expected_words = expected.split()
    if len(words) != len(expected_words):
        return False
    return all(map(_same_word, words, expected_words))


def _same_word(printed: str, expected: str) -> bool:
    if expected.lower().lstrip("+-") == "nan":  # no value equals it, as in Python: it would pay any wrong sum
        return False
    if printed == expected or "." not in expected:
        return printed == expected
    try:
        return math.isclose(float(printed), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def _text(message: Any) -> str:
    """Return what a program answered; nothing but text, so that it makes this process build nothing else."""
    return message if isinstance(message, str) else ""


def _lines(text: str | Iterable[str]) -> str:
    """Return standard input or output as text; APPS has some as a list of lines."""
    return text if isinstance(text, str) else "\n".join(text)
