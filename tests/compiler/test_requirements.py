"""The resolved sets of requirements/ fit pyproject.toml, SGLang's tests and the container, without a network.

`make lock-check` resolves them again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = {"3.11": ROOT / "requirements/sglang-py311.txt", "3.12": ROOT / "requirements/sglang-py312.txt"}
OF_CPU = {"torch", "torchvision", "triton"}  # builds for the CPU, which lag behind
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINES = DOCKERFILE.replace("\\\n", " ").splitlines()


def pins(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def wanted() -> Iterator[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["run"], *extras["sglang"]):
        if not text.startswith(project["name"]):
            yield Requirement(text)


@pytest.mark.parametrize("python", FILES)
def test_a_set_has_what_the_project_requires(python: str) -> None:
    have = pins(FILES[python])
    for requirement in wanted():
        assert requirement.specifier.contains(have[canonicalize_name(requirement.name)]), requirement


def test_the_sets_agree_on_what_decides_numbers() -> None:
    first, second = map(pins, FILES.values())
    for name in ("torch", "triton", "transformers", "sglang", "flashinfer-python", "ray", "nvidia-nccl-cu13"):
        assert first[name] == second[name]


def test_sglang_is_tested_with_the_versions_of_the_set() -> None:
    cpu, have = pins(ROOT / "runtime/engines/sglang/cpu/requirements.txt"), pins(FILES["3.11"])
    assert {name for name in cpu.keys() & have.keys() if cpu[name] != have[name]} == OF_CPU
    run = PROJECT["project"]["optional-dependencies"]["run"]
    assert {canonicalize_name(Requirement(text).name) for text in run} <= cpu.keys()


def copied() -> list[str]:
    """What the container takes from the project."""
    sources = (words[:-1] for line in LINES if (words := line.split())[:1] == ["COPY"])
    return [source for words in sources for source in words[1:]]


def test_the_container_is_built_of_the_set_of_its_python() -> None:
    (python,) = set(re.findall(r"python(3\.\d+)\b", DOCKERFILE))
    assert FILES[python].relative_to(ROOT).as_posix() in copied()
    installs = re.findall(r"pip install ([^&\n]*)", "\n".join(LINES))
    named = [[word for word in line.split() if not word.startswith("-")] for line in installs]
    assert named == [["/tmp/requirements.txt"], ["."]]  # nothing that the set does not pin
    assert all("--no-deps" in line for line in installs)


def test_the_container_is_built_on_a_pinned_image() -> None:
    (image,) = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    major = pins(FILES["3.12"])["cuda-toolkit"].split(".")[:2]
    assert image.startswith(f"nvidia/cuda:{'.'.join(major)}.") and "latest" not in image


def test_the_container_has_every_folder_of_the_wheel() -> None:
    folders = {folder.split("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    files = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert folders | {file for file in files if "/" not in file} <= set(copied())
    assert all((ROOT / source).exists() for source in copied())
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied():
        assert any(Path(source).match(pattern) for pattern in allowed), source


def test_the_container_file_is_clean() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def checked(tmp_path: Path, uv: str) -> subprocess.CompletedProcess[str]:
    """The check, with a program in uv's place."""
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "__init__.py").touch()
    (tmp_path / "uv" / "__main__.py").write_text(f"import sys\n{uv}\n")
    command = [sys.executable, str(ROOT / "requirements/resolve.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)


# what uv prints with a file as constraints: the file, without its two lines of heading
PINS = "file = sys.argv[sys.argv.index('--constraints') + 1]; lines = open(file).readlines()[2:]"


def test_a_file_that_resolves_to_itself_is_right(tmp_path: Path) -> None:
    done = checked(tmp_path, f"{PINS}; print(''.join(lines), end='')")
    assert (done.returncode, done.stdout) == (0, "requirements: ok\n")


def test_a_file_that_lacks_a_package_is_wrong(tmp_path: Path) -> None:
    done = checked(tmp_path, f"{PINS}; print(''.join(lines) + 'new==1.0')")
    assert done.returncode == 1
    assert "sglang-py311.txt differs from what it resolves to: new==1.0" in done.stdout


def test_a_file_that_is_no_solution_is_wrong(tmp_path: Path) -> None:
    done = checked(tmp_path, "sys.exit('No solution found: sglang needs torch==2.15')")
    assert done.returncode == 1
    assert "sglang needs torch==2.15" in done.stdout and "make lock" in done.stdout


@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed")
def test_a_check_without_a_registry_says_so(tmp_path: Path) -> None:
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:1", "UV_CACHE_DIR": str(tmp_path), "UV_HTTP_RETRIES": "0"}
    command = [sys.executable, str(ROOT / "requirements/resolve.py"), "--check"]
    environment = {**os.environ, **nowhere, "ALL_PROXY": nowhere["HTTPS_PROXY"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "not checked, no package registry can be reached" in done.stderr
