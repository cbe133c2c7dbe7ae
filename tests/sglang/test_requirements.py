"""SGLang's own metadata and modules against what rlgraph installs beside it and imports from it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12")


def pins(python: str) -> dict[str, str]:
    """A resolved set: names and versions."""
    path = ROOT / f"requirements/sglang-py{python.replace('.', '')}.txt"
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def required(python: str) -> Iterator[Requirement]:
    """What SGLang requires on Linux x86-64."""
    there = {"python_version": python, "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    for text in requires("sglang") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(there):
            yield requirement


def imported() -> set[tuple[str, str]]:
    """Modules of SGLang and names in them that rlgraph imports."""
    return {
        (node.module, alias.name)
        for path in (ROOT / "runtime").rglob("*.py")
        if path.parent.name not in ("cpu", "vllm")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
        for alias in node.names
    }


@pytest.mark.parametrize("python", PYTHONS)
def test_the_resolved_set_has_what_sglang_pins(python: str) -> None:
    have = pins(python)
    assert have["sglang"] == version("sglang")
    checked = [*required(python)]
    assert len(checked) > 50
    for requirement in checked:
        assert requirement.specifier.contains(have[canonicalize_name(requirement.name)], True), requirement


@pytest.mark.slow
def test_every_name_that_is_imported_from_sglang_is_there() -> None:
    lines = [f"from {module} import {name}" for module, name in sorted(imported())]
    assert lines
    # in a process of its own: what these modules bring along crashes at the end of one that has trained
    done = subprocess.run([sys.executable, "-c", "\n".join([*lines, "import os; os._exit(0)"])], check=False)
    assert done.returncode == 0


def test_these_tests_run_with_versions_of_the_resolved_set() -> None:
    have = pins("3.11")
    for name in ("sglang", "transformers", "tokenizers", "numpy", "ray", "peft", "torch_memory_saver"):
        assert version(name) == have[canonicalize_name(name)]
