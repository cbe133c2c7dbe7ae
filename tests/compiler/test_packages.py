"""Imports go one way: between packages as docs/architecture.md says, and between files without a circle."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlgraph", "nodes", "runtime")
STUBS = (
    ROOT / "runtime/engines/sglang/cpu"
)  # stands in for packages that SGLang imports, and is no part of ours
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if STUBS not in path.parents and path.read_text().strip()
]
PAGE = ROOT / "docs/architecture.md"
OPEN, CLOSE = "```text\n", "```\n\n</details>"  # what stands around the list of arrows in it
# which any file may import
EVERYWHERE = {f"rlgraph/{name}.py" for name in ("errors", "units", "variables", "version")}


def module_of(path: Path) -> str:
    """Return the name under which a file is imported: ``rlgraph.nodes.loss`` of nodes/loss/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "rlgraph" else ("rlgraph", *parts))


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """Yield every module of the project that a file imports, inside functions and for types alone too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            names = names if names[-1] in MODULES else names[:-1]
            names = [name for name in names if name in MODULES and name != node.module] or names[-1:]
        yield from (name for name in names if name in MODULES)


def room_of(path: Path) -> str:
    """Return a file's folder; a file of rlgraph/ or runtime/ itself is a room of its own."""
    room = path if path.parent.name in FOLDERS else path.parent
    return str(room.relative_to(ROOT))


def arrows() -> Iterator[tuple[Path, Path]]:
    return ((path, MODULES[name]) for path in FILES for name in imported(path) if MODULES[name] != path)


def test_no_file_imports_one_that_imports_it() -> None:
    assert list(nx.simple_cycles(nx.DiGraph(arrows()))) == []


def test_every_folder_is_in_the_wheel() -> None:
    """The wheel, whose own tests are nightly ones, has the packages that pyproject.toml lists."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module_of(path.parent / "__init__.py") for path in FILES}
    missing = sorted(folders - {*listed})
    assert not missing, f"the packages of pyproject.toml lack {missing}"


def test_folders_import_what_the_page_of_the_architecture_says(request: pytest.FixtureRequest) -> None:
    """The page lists, for each folder, all folders that it imports: no arrow more, and none fewer."""
    real: dict[str, set[str]] = {room_of(path): set() for path in FILES}
    for source, target in arrows():
        real[room_of(source)] |= {room_of(target)} - {room_of(source), *EVERYWHERE}
    assert nx.is_directed_acyclic_graph(nx.DiGraph(real))
    lines = [f"{room}: {', '.join(sorted(targets))}\n" for room, targets in sorted(real.items()) if targets]
    before, after = PAGE.read_text().split(OPEN)
    _, after = after.split(CLOSE)
    if request.config.getoption("--bless"):
        PAGE.write_text(before + OPEN + "".join(lines) + CLOSE + after)
    meant = "a folder imports another than the page says; --bless writes the list, if each new arrow is meant"
    assert PAGE.read_text() == before + OPEN + "".join(lines) + CLOSE + after, meant


def is_type(node: ast.stmt) -> bool:
    """Whether a statement gives a type a name: ``Share = Annotated[float, Field(ge=0, lt=1)]``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and re.fullmatch("_?[A-Z]+[a-z]\\w*", node.targets[0].id) is not None
    )


def test_a_class_name_means_one_thing() -> None:
    named: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(tree := ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, set()).add(str(path))
        for node in filter(is_type, tree.body):
            named.setdefault(node.targets[0].id, set()).add(str(path))  # type: ignore[attr-defined]
    assert {name: sorted(paths) for name, paths in named.items() if len(paths) > 1} == {}
    assert len(named) > 300


def test_the_walks_name_functions_that_are_there() -> None:
    walks = PAGE.read_text().partition("## Three walks")[2].partition("\n## ")[0]
    for walk in walks.split("\n\n**")[1:]:
        named = re.findall(r"`([\w.]+)` \(([\w/]+\.py)\)", walk)
        assert 4 <= len({name for name, _ in named}) <= 8
        for name, file in named:
            scope: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
            for part in name.split("."):
                here = {
                    node.name: node for node in scope if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                }
                assert part in here, f"{file} has no {name}"
                scope = here[part].body
