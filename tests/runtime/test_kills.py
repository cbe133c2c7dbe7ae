"""A run that is killed at any of its writes goes on to the same weights and metrics; nothing half is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from chaos import ERRORS, chaos, errors_apart
from kills import CUT, go_on, in_folder, train
from ran import metrics, same_weights
from ranks import LIMIT, imported

from rlgraph.runtime.export import export

PARTS = 8  # of the kills, so that two workers share them
HOW = {False: "killed", True: "without power"}
Count = Callable[..., None]
HALF = re.compile(r"writing|dropped")


@pytest.fixture(autouse=True)
def _data(in_demo: None) -> None:
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(10, 20)]
    Path("ten.jsonl").write_text("\n".join(rows) + "\n")


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """``count(what, n=1)``: add to what is printed behind the tests."""
    return lambda what, n=1: record_property("counted", {what: n})


def ended(root: str, at: int | None, work: Callable[[], object], power: bool | str = False) -> str:
    """Do work in a process of its own that is killed at one of its events; return what it said.

    ``power``: with a power cut; or the file that holds the disk, of which a copy has what a cut leaves.
    """
    process = imported().Process(
        target=in_folder, args=(os.getcwd(), dict(os.environ), root, at, power, work)
    )
    process.start()
    process.join(LIMIT)
    said = Path("said").read_text(errors="replace")
    assert process.exitcode == (0 if at is None else -9), said
    return said


def events(said: str) -> int:
    return int(said.rpartition("events ")[2])


def assert_same(run: str, whole: str) -> None:
    assert metrics(run) == metrics(whole)
    assert same_weights(run, whole)
    assert sorted(os.listdir(f"{run}/checkpoints")) == sorted(os.listdir(f"{whole}/checkpoints"))
    left = [str(path) for path in Path(run).rglob("*") if HALF.search(path.name)]
    assert not left, left


def kills(total: int, part: int | None) -> list[int]:
    """Return the events to end at: every PARTS-th at night, a few by day."""
    return [*range(1 + part, total + 1, PARTS)] if part is not None else [total // 7, total // 2, total]


NIGHT = [pytest.param(part, marks=pytest.mark.nightly) for part in range(PARTS)]


@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("part", [None, *NIGHT])
def test_a_run_killed_at_any_write_goes_on_to_the_same(part: int | None, power: bool, count: Count) -> None:
    total = events(ended("whole", None, partial(train, "whole")))
    for at in kills(total, part):
        ended("a", at, partial(train, "a"), power)
        ended("a", None, partial(go_on, "a"))
        assert_same("a", "whole")
        count(f"driver {HOW[power]} at a write of its run: resumed, equal to the bit")
        shutil.rmtree("a")


@contextmanager
def disk(image: str) -> Iterator[None]:
    """Mount a file system from a file at the folder ``disk``; it writes by itself only every ten minutes."""
    lazily = "loop,data=writeback,noauto_da_alloc,commit=600"
    Path("disk").mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", lazily, image, "disk"], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "disk"], check=True)


@pytest.fixture
def empty() -> str:
    """The name of a file with an empty ext4 in it, where this user can mount one."""
    try:
        with open("empty", "wb") as file:
            file.truncate(128 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "empty"], check=True, capture_output=True)
        with disk("empty"):
            return "empty"
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system in a file can be mounted: {error}")


@pytest.mark.parametrize("part", [pytest.param(None, marks=pytest.mark.nightly), *NIGHT[::4]])
def test_a_disk_that_loses_power_at_any_write_has_a_run_that_goes_on(
    part: int | None, empty: str, count: Count
) -> None:
    total = events(ended("whole", None, partial(train, "whole")))
    image = str(Path("image").resolve())
    for at in kills(total, part):
        shutil.copyfile(empty, image)
        with disk(image):
            ended("disk/a", at, partial(train, "disk/a"), image)
        with disk(f"{image}{CUT}"):
            said = ended("disk/a", None, partial(go_on, "disk/a"))
            assert at < total or "resumed after iteration 3" in said, "the last checkpoint is on the disk"
            assert_same("disk/a", "whole")
        count("disk in a file without power at a write of a run: resumed, equal to the bit")


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
@pytest.mark.parametrize("part", NIGHT)
def test_a_resume_killed_at_any_write_goes_on_to_the_same(
    part: int | None, power: bool, count: Count
) -> None:
    ended("whole", None, partial(train, "whole"))
    ended("begun", None, partial(train, "begun", steps=2))
    shutil.copytree("begun", "a")
    total = events(ended("a", None, partial(train, "a", resume=True)))
    for at in kills(total, part):
        shutil.rmtree("a")
        shutil.copytree("begun", "a")
        ended("a", at, partial(train, "a", resume=True), power)
        ended("a", None, partial(train, "a", resume=True))
        assert_same("a", "whole")
        count(f"driver {HOW[power]} at a write of its resume: resumed, equal to the bit")


@pytest.mark.nightly
def test_an_export_killed_at_any_write_leaves_a_whole_model_or_none(count: Count) -> None:
    ended("whole", None, partial(train, "whole"))
    total = events(ended("out", None, partial(export, Path("whole"), Path("out/model"))))
    assert total > 5
    for at in range(1, total + 1):
        shutil.rmtree("out")
        ended("out", at, partial(export, Path("whole"), Path("out/model")))
        if not Path("out/model").exists():
            ended("out", None, partial(export, Path("whole"), Path("out/model")))
        Path("out/models").mkdir()
        Path("out/model").rename("out/models/policy")
        assert same_weights("out", "whole")
        assert not HALF.search(str(os.listdir("out")))
        count("driver killed at a write of its export: made anew, equal to the bit")


def test_what_killed_runs_learn_may_differ_by_chance_and_no_more() -> None:
    undisturbed = [2.4, 2.5, 2.6, 2.5]
    assert errors_apart(undisturbed, [2.6, 2.4, 2.5]) < errors_apart(undisturbed, [2.6, 2.7, 2.5]) < ERRORS
    assert errors_apart(undisturbed, [2.1, 2.0, 2.2]) > ERRORS


@pytest.mark.nightly
def test_processes_killed_at_random_moments_lose_and_leave_nothing(tmp_path: Path, count: Count) -> None:
    counts = chaos(tmp_path, kills=12, seed=3)
    assert not counts.trouble
    assert counts.kills.total() > 6, "moments may have passed, but not most of them"
    assert counts.equal == counts.chains == 3
    assert not counts.leaked
    for (moment, process), kills in counts.kills.items():
        count(f"{process} killed at {moment}: resumed, equal to the bit, nothing left", kills)
