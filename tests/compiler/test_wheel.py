"""A wheel, built from what is tracked and installed elsewhere, is the whole compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
STUBS = ROOT / "runtime/engines/sglang/cpu"  # stands in for packages that SGLang imports
PLACES = "import rlgraph, rlgraph.nodes, rlgraph.runtime, rlgraph.graphs as g; print(rlgraph.__file__, "
PLACES += "rlgraph.nodes.__file__, rlgraph.runtime.__file__, g.__file__, sep='\\n')"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files in it."""
    folder = tmp_path_factory.mktemp("wheel")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(build, cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "target"
    install = [*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return target


def python(installed: Path, cwd: Path, *args: str) -> str:
    """Runs with the wheel's files, and of this environment only the dependencies: -S runs no .pth file."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *packages])}
    done = subprocess.run([sys.executable, "-S", *args], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    places = python(installed, tmp_path, "-c", PLACES).split()
    assert len(places) == 4 and all(place.startswith(f"{installed}/rlgraph/") for place in places)


def test_every_module_is_in_the_wheel(installed: Path) -> None:
    for folder, package in {
        "rlgraph": "",
        "nodes": "nodes",
        "runtime": "runtime",
        "graphs": "graphs",
    }.items():
        for path in (ROOT / folder).rglob("*"):
            if STUBS not in path.parents and path.suffix in (".py", ".yaml", ".typed"):
                target = installed / "rlgraph" / package / path.relative_to(ROOT / folder)
                assert target.is_file(), f"{path} is in no package that pyproject.toml lists"


def test_the_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "demo: ok" in python(installed, tmp_path, "-m", "rlgraph", "check", "demo")
    assert "demo_sft" in python(installed, tmp_path, "-m", "rlgraph", "graphs")
