"""The shipped tools: a calculator that runs no Python, a search, Python within limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from simpleeval import InvalidExpression

from rlgraph.nodes.support import sandbox
from rlgraph.nodes.support.data_file import DataError
from rlgraph.nodes.support.sandbox import NoSandboxError, trouble
from rlgraph.nodes.tools.calculator import calculator
from rlgraph.nodes.tools.python import python
from rlgraph.nodes.tools.search import search

ERRORS = (InvalidExpression, ArithmeticError, ValueError, SyntaxError, KeyError, TypeError, AttributeError)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*84", "3108"),
        (" 2 + 3 * (4 - 1) ", "11"),
        ("12/4", "3"),
        ("1/3", "0.333333333333"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("sqrt(2)", "1.41421356237"),
        ("min(3, max(1, 2))", "2"),
        ("round(2.567, 2)", "2.57"),
        ("1e300*1e10", "inf"),
    ],
)
def test_the_calculator_computes(expression: str, result: str) -> None:
    assert calculator(expression) == result


REFUSED = """\
1/0
7*
x
lambda: 1
1 < 2
(-8)**0.5
[1]*9
(1).__class__
__import__('os')
open('x')
9**9**9
9**999*9**999
(2**4000)*(2**4000)
'a'*9999
'a'
b'a'%1
'%02500000000d'%1
f'{1:>1500000000}'
f'{1}'
1j
True
None
...
1 if 1 else 2
1 and 2
1,2
1 << 3
not 1
~1
round(1, -10**9)
round(1, 10**9)
round(7, 2.5)
max(1, 2, key=abs)
max(*(1, 2))
min()
sqrt
pi(1)
round(round)
sqrt(10**4000)
2**1000 * 2**1000 * 2**1000 * 2**1000 * 2**1000""".splitlines()


@pytest.mark.parametrize("expression", [*REFUSED, "", "1+" * 400 + "1", "-" * 499 + "1", "(" * 250 + "1"])
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ERRORS):
        calculator(expression)


ATTACKS = [
    "f'{1:>1500000000}'",
    "'%02500000000d'%1",
    "f'{\"a\":>999999999}'*9",
    "round(1, -10**8)",
    "9**9**9",
]


def test_an_attack_is_refused_before_it_is_computed() -> None:
    """A process that may take 300 MB more than it has computes none of them: each would take more."""
    program = f"""if True:
        import resource, sys
        from rlgraph.nodes.tools.calculator import calculator
        assert calculator("1+1") == "2"
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 300 * 2**20,) * 2)
        for attack in {ATTACKS!r}:
            try:
                calculator(attack)
            except ValueError as error:
                print(type(error).__name__)"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (said.stdout.split(), said.stderr) == (["ValueError"] * len(ATTACKS), "")


def test_search_gives_the_nearest_first(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [
        "The cat sat on the mat.",
        "Dogs bark at cats.",
        "A cat, a CAT, and one more cat.",
        "Nothing here.",
    ]
    corpus.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    assert search("cat", corpus=str(corpus), top=2) == f"[1] {rows[2]}\n[2] {rows[0]}"
    assert search("bark cats", corpus=str(corpus), top=9) == f"[1] {rows[1]}"
    assert search("zebra", corpus=str(corpus)) == "nothing was found"
    corpus.write_text(json.dumps({"body": "Zebras."}))
    assert search("zebras", corpus=str(corpus), column="body") == "[1] Zebras."
    with pytest.raises(DataError, match="'text'"):
        search("zebras", corpus=str(corpus))


def test_python_answers_with_what_is_printed() -> None:
    source = "print(6 * 7)\nimport sys\nprint('aside', file=sys.stderr)\n1 / 0"
    said = python(source, allow_unsandboxed=True, timeout=60.0)
    assert said.startswith("42\naside\n")
    assert said.endswith("ZeroDivisionError: division by zero")
    assert "program.py" in said and str(Path(__file__).parent.parent) not in said


@pytest.mark.slow
def test_python_is_held_to_its_limits() -> None:
    late = python("print('so far', flush=True)\nwhile True: pass", allow_unsandboxed=True, timeout=3.0)
    assert late == "so far\n(ended: it ran over 3 s)"
    assert "MemoryError" in python("x = ' ' * 2**40", allow_unsandboxed=True, timeout=60.0)
    assert len(python("while True: print('x' * 999)", allow_unsandboxed=True, timeout=60.0)) <= 2**16


@pytest.mark.skipif(bool(trouble()), reason=f"needs a sandbox: {trouble()}")
def test_python_finds_no_data_and_no_network(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("42")
    said = python(f"print(open({str(tmp_path / 'answers.jsonl')!r}).read())", timeout=60.0)
    assert said.endswith("No such file or directory: " + repr(str(tmp_path / "answers.jsonl")))
    said = python("import socket\nsocket.create_connection(('127.0.0.1', 9))", timeout=60.0)
    assert "unreachable" in said


def test_python_asks_before_it_runs_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "trouble", lambda: "none here")
    with pytest.raises(NoSandboxError, match=r"the tool python: .* none here; .* allow_unsandboxed: true"):
        python("print(1)")
