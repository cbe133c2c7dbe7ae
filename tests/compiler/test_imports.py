"""The import floor: compiling loads nothing heavy, and imports run one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlgraph.frontend.shipped import shipped_graphs

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "sglang", "transformers", "datasets", "pandas", "pyarrow", "numpy")
COMMANDS = ["check", "plan", "show"]


@pytest.mark.slow
def test_compiling_loads_nothing_heavy(tmp_path: Path) -> None:
    calls = [[command, name] for name in shipped_graphs() for command in COMMANDS]
    calls += [["nodes", "--format", form] for form in ("markdown", "jsonschema")]
    calls += [["check", "demo", "--format", "json"], ["nodes", "ppo_clip"]]
    calls += [["show", "demo", "--column", "tokens"], ["diff", "demo", "demo", "--format", "yaml"]]
    calls += [["show", str(ROOT / "tests" / "compiler" / "rewired" / "rewired.yaml")]]
    saved = str(tmp_path / "plan.json")
    calls += [["plan", "demo", "-o", saved], ["plan", saved], ["plan", "demo", "--against", saved]]
    calls += [["plan", "--schema"]]
    calls += [["plan", "grpo", "--cluster", "h100-8"]]
    script = f"""
import sys
from rlgraph.cli.main import main
for args in {[*calls, ["nodes"], ["nodes", "rollout"], ["graphs"]]!r}:
    try:
        main(args)
    except SystemExit as done:
        assert not done.code, args
heavy = set({HEAVY!r}) & set(sys.modules)
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith("rlgraph.runtime")]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_check_loads_little() -> None:
    """Whatever else it loaded, every answer would wait for (benchmarks/check_startup.py says how long)."""
    script = """
import sys
from rlgraph.cli.main import main
try:
    main(["check", "grpo"])
except SystemExit as done:
    assert not done.code
files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
installed = {name.partition(".")[0] for name, file in files.items() if "-packages" in file}
own = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("rlgraph.")}
predicting = {"rlgraph.planning.predict", "rlgraph.costs.pricing"} & {*sys.modules}
print(*sorted(installed), *sorted(own), *sorted(predicting))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    needed = {
        "annotated_types",
        "click",
        "pydantic",
        "pydantic_core",
        "typing_extensions",
        "yaml",
    }
    assert needed <= loaded
    assert not {
        name for name in loaded - needed if not name.startswith(("rlgraph.", "_", "typing_inspection"))
    }
    assert not loaded & {f"rlgraph.{name}" for name in ("api", "reference", "reports", "runtime", "view")}
    assert not loaded & {"rlgraph.planning.predict", "rlgraph.costs.pricing"}, "of plans for a cluster"


@pytest.mark.parametrize("command", ["check", "plan"])
def test_no_plugins_are_looked_for(command: str) -> None:
    """The variable by which pydantic is told is as before when the command is over."""
    script = f"""
import os
from importlib import metadata
metadata.entry_points = lambda **options: 1 / 0
from rlgraph.cli.main import main
before = dict(os.environ)
try:
    main([{command!r}, "demo"])
except SystemExit as done:
    assert not done.code
assert dict(os.environ) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """Modules imported when a module is loaded: not in functions, not for the type checker alone."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            yield module
            separator = "" if module.endswith(".") else "."
            yield from (f"{module}{separator}{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from imported(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(
                [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
            )


def everywhere(tree: ast.Module) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {name for body in (tree.body, *(f.body for f in functions)) for name in imported(body)}


def modules(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))


def test_imports_are_relative_in_the_sandbox_alone() -> None:
    """There the package has another name: its files run by their path, without rlgraph."""
    for path in [*modules("rlgraph"), *modules("nodes"), *modules("runtime")]:
        names = everywhere(ast.parse((ROOT / path).read_text()))
        relative = {name for name in names if name.startswith(".")}
        if path.startswith("nodes/sandboxed/"):
            assert not within(names, "rlgraph") and not {name for name in relative if name.startswith("..")}
        else:
            assert not relative, path


def within(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(f"{package}.")}


@pytest.mark.parametrize("path", modules("rlgraph"))
def test_the_compiler_imports_neither_nodes_nor_runtime(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    top = set(imported(tree.body))
    outward = within(top, "rlgraph.runtime") | within(top, "rlgraph.graphs")
    if path not in ("rlgraph/ops/registry.py", "rlgraph/frontend/infer.py"):
        outward |= within(top, "rlgraph.nodes")
    # the catalog's dicts hold names only
    assert not outward - {"rlgraph.nodes", "rlgraph.nodes.OPS", "rlgraph.nodes.LOSSES", "rlgraph.nodes.HOOKS"}
    assert not {name for heavy in HEAVY for name in within(top, heavy)}
    if path not in ("rlgraph/cli/plan.py", "rlgraph/cli/run.py", "rlgraph/cli/demo.py", "rlgraph/api.py"):
        assert not within(everywhere(tree), "rlgraph.runtime")


@pytest.mark.parametrize("path", modules("nodes"))
def test_nodes_import_no_runtime(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert not within(everywhere(tree), "rlgraph.runtime")
    assert not {name for heavy in HEAVY for name in within(set(imported(tree.body)), heavy)}
