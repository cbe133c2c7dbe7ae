"""The resolved sets of requirements/ fit pyproject.toml, SGLang's tests and the container, without a network.

`make lock-check` resolves them again.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

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
    for text in (*project["dependencies"], *extras["run"], *extras["sglang"], *extras["gpu"]):
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


LOCKS = (
    "build.txt",
    "dev.txt",
    "sglang-cpu.txt",
    "../runtime/pretrained/packages.txt",
    "newest.txt",
    "agents.txt",
)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def locked(name: str) -> dict[str, list[str]]:
    """Each package of a set with hashes, by its name, version and marker; and its hashes."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    packages = [block for block in re.split(r"(?m)^(?=\S)", text) if block[:1] not in ("", "#")]
    heads = [block.partition(" \\\n") for block in packages]
    return {head: rest.replace("\\", " ").split() for head, _, rest in heads}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_that_tests_install_has_its_hash_but_for_torchs_builds(name: str) -> None:
    packages = locked(name)
    assert packages
    for package, hashes in packages.items():
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), package
        assert Requirement(package).url is None
        assert not re.match(r"torch(vision)?$|triton$|cuda-|nvidia-(?!ml-py)", Requirement(package).name)
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    assert "://" not in text and "file:" not in text and "index" not in text


def test_the_set_of_tests_is_a_solution_of_the_project() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = map(Requirement, (*PROJECT["project"]["dependencies"], *extras["run"], *extras["dev"]))
    have = [Requirement(package) for package in locked("dev.txt")]
    (torch,) = pins(ROOT / "requirements/torch.txt").items()
    for requirement in wanted:
        versions = [one.specifier for one in have if canonicalize_name(one.name) == requirement.name.lower()]
        if requirement.name == torch[0]:
            assert requirement.specifier.contains(torch[1])
            continue
        assert versions, requirement
        for exact in versions:
            assert requirement.specifier.contains(str(exact).removeprefix("==")), requirement


def test_the_set_of_sglangs_tests_is_what_is_listed_but_for_builds() -> None:
    listed = pins(ROOT / "runtime/engines/sglang/cpu/requirements.txt")
    have = {
        canonicalize_name(r.name): str(r.specifier)[2:] for r in map(Requirement, locked("sglang-cpu.txt"))
    }
    assert have == {name: version for name, version in listed.items() if name not in OF_CPU}


def test_make_installs_nothing_without_a_hash_but_torch() -> None:
    sources = [line.split("$(PIP_INSTALL)")[1] for line in MAKEFILE.splitlines() if "$(PIP_INSTALL)" in line]
    assert [source.strip() for source in sources] == [
        "--no-deps --require-hashes -r requirements",
        "--no-deps --no-build-isolation -e .",
        "-r requirements/torch.txt",
        "--no-deps -r $(SGLANG)/requirements.txt",
        "-r requirements/newest-torch.txt",
    ]
    assert MAKEFILE.count("pip install") + MAKEFILE.count("pip download") == 3  # two are of `make cuda`
    assert re.search(r"^MERMAID_SHA512 := [0-9a-f]{128}$", MAKEFILE, re.MULTILINE)
    assert "echo '$(MERMAID_SHA512)  mermaid-$(MERMAID).tgz' | sha512sum --check" in MAKEFILE


def test_pip_refuses_a_package_with_another_hash(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "own-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
        wheel.writestr("own-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    (tmp_path / "lock.txt").write_text(f"own==1.0 --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "-r", "lock.txt"]
    command += ["--no-index", "--find-links", ".", "--target", "to", "--disable-pip-version-check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "requirements/sbom.py"), str(tmp_path / "sbom.json")]
    subprocess.run(command, check=True, capture_output=True)
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "rlgraph-compiler"
    names = {one["name"].lower(): one for one in bill["components"]}
    assert len(names) == len(bill["components"]) and "rlgraph-compiler" not in names
    for text in PROJECT["project"]["dependencies"]:
        name = Requirement(text).name
        assert names[name]["purl"] == f"pkg:pypi/{name}@{metadata.version(name)}"


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
    linked = {path.resolve().name for path in (ROOT / "rlgraph").iterdir() if path.is_symlink()}
    folders = {"rlgraph", *linked}
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


def test_the_gpu_extra_brings_all_that_gpus_need() -> None:
    """A machine with GPUs needs torch, Ray, SGLang, and memory that comes back to its addresses."""
    names = {requirement.name for requirement in wanted()}
    assert {"torch", "transformers", "ray", "sglang", "torch-memory-saver"} <= names
    assert PROJECT["project"]["optional-dependencies"]["gpu"][0] == "rlgraph-compiler[run,sglang]"


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed")
@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_an_extra_resolves(extra: str) -> None:
    """The newest releases fit together, as wheels for Linux; nothing is installed."""
    resolve = runpy.run_path(str(ROOT / "requirements/resolve.py"))
    try:
        text = resolve["compiled"](resolve["wheels_for"](extra, "3.12"))
    except resolve["OfflineError"]:
        pytest.skip("no package registry can be reached")
    names = {line.partition("==")[0] for line in text.splitlines()}
    assert {canonicalize_name(Requirement(one).name) for one in PROJECT["project"]["dependencies"]} <= names
    if extra == "gpu":
        assert {"sglang", "torch-memory-saver", "ray", "torch"} <= names


@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed")
def test_a_check_without_a_registry_says_so(tmp_path: Path) -> None:
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:1", "UV_CACHE_DIR": str(tmp_path), "UV_HTTP_RETRIES": "0"}
    command = [sys.executable, str(ROOT / "requirements/resolve.py"), "--check"]
    environment = {**os.environ, **nowhere, "ALL_PROXY": nowhere["HTTPS_PROXY"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "not checked, no package registry can be reached" in done.stderr
