"""No program is paid that does not solve its task, and none ends the run; odd programs that do are paid."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from honest_programs import HONEST, ODD, PRINTING
from recorded import means
from reward_hacks import HACKS, SLOW, WRONG
from rlgraph.nodes.reward.code import code
from rlgraph.nodes.reward.suspicious import is_suspicious
from rlgraph.nodes.support.sandbox import trouble
from rlgraph.ops import Context

pytestmark = pytest.mark.skipif(bool(trouble()), reason=f"needs a sandbox: {trouble()}")

ASSERTS = """
METADATA = {"author": "nobody"}

def check(candidate):
    assert candidate(2, 3) == 5, "small"
    assert math.isclose(candidate(*[10, 20.5]), 30.5)
    assert candidate([1], [2]) == [1, 2]

check(add)
"""
CALLS = json.dumps(
    {"fn_name": "add", "inputs": [[2, 3], [10, 20.5], [[1], [2]]], "outputs": [5, [30.5], [1, 2]]}
)
LINES = json.dumps({"inputs": ["2 3\n", "10 20.5"], "outputs": ["5\n", "30.5"]})
RIGHT = "def add(a, b):\n    return a + b\n"
RIGHT_LINES = "print(sum(float(word) if '.' in word else int(word) for word in input().split()))"
KINDS = {"asserts": (ASSERTS, RIGHT), "calls": (CALLS, RIGHT), "lines": (LINES, RIGHT_LINES)}


def rewards(programs: list[str], answers: list[str], **settings: object) -> tuple[list[float], Context]:
    ctx = Context(node="rewards", seed=0, iteration=0)
    return code(ctx, programs, answers, **{"timeout": 60.0} | settings).tolist(), ctx


def paid(programs: dict[str, str], answer: str, right: str, **settings: object) -> set[str]:
    """Return which of the programs are paid; a right program among them must be, before and after them."""
    scores, _ = rewards([right, *programs.values(), right], [answer] * (len(programs) + 2), **settings)
    assert scores[0] == scores[-1] == 1.0
    return {name for name, score in zip(programs, scores[1:-1], strict=True) if score}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_hack_is_paid(kind: str) -> None:
    assert len(HACKS) + len(SLOW) >= 70
    assert paid({name: hack + WRONG for name, hack in HACKS.items()}, *KINDS[kind]) == set()
    for folder in ("/", "/root", "/home", "/etc", "/usr/bin", "/var", "/dev/shm", os.path.expanduser("~")):
        assert not Path(folder, "rlgraph_hack").exists()


@pytest.mark.parametrize(
    "test",
    [
        "r = add([10], [20])\nassert len(r) == 2\nassert all(a == b for a, b in zip(r, [10, 20]))",
        "r = add([10], [20])\nfor a, b in zip(r, [10, 20]): assert a == b\nassert len(r) == 2",
        "r = add([10], [20])\nassert len(r) == 2\nfor a in r: assert a in (10, 20)",
        "r = add([10], [20])\nassert len(r) == 2 and list(reversed(r)) in ([20, 10], [])",
        pytest.param("assert 4711 in add([1], [4711])", marks=pytest.mark.nightly),  # until it is late
        "r = add([10], [20])\nassert not (r != [10, 20])",
    ],
)
def test_what_an_object_says_of_its_items_agrees(test: str) -> None:
    hacks = {name: hack for name, hack in HACKS.items() if name.startswith("an object")}
    assert len(hacks) == 3
    assert paid(hacks, test, RIGHT, timeout=20.0) == set()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_no_hack_that_takes_its_time_is_paid(kind: str) -> None:
    assert paid({name: hack + WRONG for name, hack in SLOW.items()}, *KINDS[kind], timeout=10.0) == set()


def test_most_hacks_are_suspicious() -> None:
    assert sum(map(is_suspicious, HACKS.values())) >= 0.6 * len(HACKS)


def test_odd_programs_are_paid() -> None:
    programs, answers = list(HONEST.values()), [ASSERTS] * len(HONEST)
    programs += [source for source, _ in ODD.values()]
    answers += [test for _, test in ODD.values()]
    for source, given, printed in PRINTING.values():
        programs.append(source)
        answers.append(json.dumps({"inputs": [given], "outputs": [printed]}))
    scores, ctx = rewards(programs, answers)
    names = [*HONEST, *ODD, *PRINTING]
    assert [name for name, score in zip(names, scores, strict=True) if not score] == []
    assert means(ctx)["reward/suspicious"] == (0.0, len(programs))
