"""No code that comes with a model is run unless its graph says so: each call that could passes that on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = ("from_pretrained", "from_config")
# `trusted` is what tokenizer_files' functions are given, by model_files, which says `self.trusted`
ASKED = ("False", "trusted", *(f"{files}.trusted" for files in ("self", "files", "self.files", "how.files")))
PLAIN = ("GenerationConfig",)  # classes that read values alone


def calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in ("rlgraph", "nodes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if node.func.attr in CALLS and ast.unparse(node.func.value) not in PLAIN:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_no_call_runs_code_that_comes_with_a_model() -> None:
    found = dict(calls())
    assert len(found) > 5
    for place, call in found.items():
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("trust_remote_code") in ASKED, place


def test_nothing_in_the_project_trusts_such_code_or_opens_its_memory() -> None:
    words = ("trust_remote_code=True", "trust_remote_code: true", "weights_only=False", "allow_pickle=True")
    words += ("PR_SET_PTRACER",)  # which would let other processes read this one's memory
    for folder in ("rlgraph", "nodes", "runtime", "graphs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                text = path.read_text()
                assert not [word for word in words if word in text], path
