"""What a further op, loss or pass takes: each is named in as few files as docs/contributing.md says.

Kinds of steps, layouts and domains are in test_steps.py, serving engines in test_engines.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.passes import PASSES

ROOT = Path(__file__).parents[2]
WRITTEN = [  # by hand; what is generated from declarations is left out, and so are graphs and their pages
    path
    for folder in ("rlgraph", "nodes", "runtime")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".js") and "vendor" not in path.parts
]


def named(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in WRITTEN if re.search(pattern, path.read_text("utf-8"))}


@pytest.mark.parametrize(
    ("op", "function", "file"),
    [
        ("filter.widest", "widest", "nodes/select/filter.py"),
        ("advantage.opo", "opo", "nodes/advantage/group.py"),
        ("reward.f1", "f1", "nodes/reward/text.py"),
    ],
)
def test_an_op_is_its_file_and_a_line_of_the_catalog(op: str, function: str, file: str) -> None:
    """The third file, docs/reference.md, is generated."""
    assert named(rf"[\"'`:.]{re.escape(op)}\b|\bdef {function}\(|:{function}\"") == {
        file,
        "nodes/__init__.py",
    }


def test_a_loss_is_its_file_and_a_line_of_the_catalog() -> None:
    """The third file, docs/reference.md, is generated; importers name it where another project has it."""
    naming = {file for file in named(r"\bsapo\b") if not file.startswith("rlgraph/importing/")}
    assert naming == {"nodes/loss/policy.py", "nodes/__init__.py"}


ASKED = {"infer": ("rlgraph/passes/stream.py",)}  # of what rows nodes are, before it changes the graph


@pytest.mark.parametrize("function", [function.__name__ for function in PASSES])
def test_a_pass_is_its_file_and_a_line_of_the_table(function: str) -> None:
    (module,) = {f.__module__ for f in PASSES if f.__name__ == function}
    imports = named(rf"\bfrom {re.escape(module)} import .*\b{function}\b")
    assert imports == {"rlgraph/passes/__init__.py", *ASKED.get(function, ())}


def test_laws_alone_find_what_is_wrong_behind_binding() -> None:
    """Passes and the search for warnings check laws; they make no problem themselves."""
    making = named(r"\b(Problem|fail|refusal|warning)\(")
    assert [file for file in making if file.startswith(("rlgraph/passes/", "rlgraph/warnings/"))] == []
    assert len([file for file in making if file.startswith("rlgraph/laws/")]) >= 9


@pytest.mark.slow
def test_every_law_is_checked() -> None:
    """A function from a view to problems is listed, or called by another law."""
    texts = {path: path.read_text() for path in sorted((ROOT / "rlgraph/laws").glob("*.py"))}
    laws = re.findall(r"^def (\w+)\(view: \w+View\) -> Iterator\[Problem\]:", "".join(texts.values()), re.M)
    others = "".join(path.read_text() for path in WRITTEN if path.suffix == ".py")
    assert [law for law in laws if len(re.findall(rf"\b{law}\b", others)) < 2] == []
    assert len(laws) > 80
