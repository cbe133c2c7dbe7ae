"""Files of a run directory that are damaged, cut short, in use or not writable; signals that end a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from ran import assert_gone, begun, holders, metrics, rlgraph, same_weights, wait_for

from rlgraph.errors import RunError, StoppedError
from rlgraph.files import SUMS, discard, read_json, replace, write
from rlgraph.ir.best_checkpoints import BestCheckpoints
from rlgraph.runtime.export import export
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.rundir import RunDir

pytestmark = pytest.mark.slow

ONE = str(Path(__file__).parent / "ones.yaml")
SCHEDULE = "schedule={iterations: 3, save_every: 1, keep: 2}"


def train(run_dir: str, *settings: str, resume: bool = False, steps: int | None = None) -> None:
    run_graph(ONE, (SCHEDULE, *settings), 1, steps=steps, run_dir=Path(run_dir), resume=resume, inline=True)


@pytest.fixture
def run(in_demo: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """``run("a")`` makes a run of two of its three iterations; ``whole`` has all of them."""
    made = Path(os.environ["RLGRAPH_TEST_FILES"]).parent / "run_dir"
    if not made.exists():
        train(str(made / "whole"))
        train(str(made / "two"), steps=2)
    Path("whole").symlink_to(made / "whole")
    return lambda name: shutil.copytree(made / "two", name)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "one bit": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "not text": lambda path: path.write_bytes(b"\xff\xfe\0"),
}
SHARD = "policy/shard-00000-of-00001.safetensors"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", [SHARD, "policy/state.json", "state.json", SUMS])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    run: Callable[[str], None], file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("a")
    folder = RunDir(Path("a")).checkpoints()[-1]
    DAMAGE[damage](folder / file)
    with pytest.raises(RunError, match=r"step-000002"):
        export(Path("a"), Path("out"))
    assert not Path("out").exists()
    if (file, damage) not in [(SHARD, "one bit"), ("policy/state.json", "cut"), (SUMS, "missing")]:
        return  # what a resume does of it is slower, and the same
    train("a", resume=True)
    said = capsys.readouterr().out
    assert f"note: the checkpoint step-000002 is damaged: {'' if file == SUMS else file}" in said
    assert "resumed after iteration 1" in said
    assert metrics("a") == metrics("whole")
    assert same_weights("a", "whole")
    assert sorted(os.listdir("a/checkpoints")) == ["step-000002", "step-000002.damaged", "step-000003"]


def test_of_two_checkpoints_of_one_iteration_the_damaged_one_is_put_aside(
    run: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run("a")
    shutil.copytree("a/checkpoints/step-000002", "a/checkpoints/restart-000002")
    flip(Path("a/checkpoints/step-000002") / SHARD)
    train("a", resume=True)
    assert "resumed after iteration 2" in capsys.readouterr().out
    assert same_weights("a", "whole")
    assert "step-000002.damaged" in os.listdir("a/checkpoints")


def test_where_every_checkpoint_is_damaged_all_are_named(
    run: Callable[[str], None],
) -> None:
    run("a")
    for folder in RunDir(Path("a")).checkpoints():
        flip(folder / SHARD)
    before = metrics("a")
    with pytest.raises(RunError) as raised:
        train("a", resume=True)
    law = f"the checkpoint step-000002 is damaged: {SHARD}\nthe checkpoint step-000001 is damaged: {SHARD}\n"
    assert str(raised.value) == law + "  bring one back from a copy, or start anew in another --run-dir"
    assert metrics("a") == before


def test_a_folder_that_is_no_checkpoint_is_none(run: Callable[[str], None]) -> None:
    run("a")
    shutil.copytree("a/checkpoints/step-000002", "a/checkpoints/step-000002-copy")
    shutil.copytree("a/checkpoints/step-000002", "a/checkpoints/step-000009.dropped")
    assert [path.name for path in RunDir(Path("a")).checkpoints()] == ["step-000001", "step-000002"]


HOLDS = """
import sys, time
from pathlib import Path
from rlgraph.runtime.rundir.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_run_directory_has_one_process_and_a_dead_one_holds_nothing(run: Callable[[str], None]) -> None:
    run("a")
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, "a"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        before = Path("a/metrics.jsonl").read_bytes()
        with pytest.raises(RunError, match=rf"^a is in use: process {holder.pid} of .* runs it\n  wait"):
            train("a", resume=True)
        assert Path("a/metrics.jsonl").read_bytes() == before
    finally:
        holder.kill()
        holder.communicate()
    with Path("a/lock").open() as file:
        assert f"process {holder.pid}" in file.read()
    train("a", resume=True)
    assert same_weights("a", "whole")


def test_what_a_run_left_that_had_no_plan_yet_is_no_run_and_begins_there(in_demo: None) -> None:
    with RunDir.fresh(Path("a"), "ones"):
        Path("a/graph.yaml").write_text("graph: ones")
        Path("a/plan.json.writing").write_text('{"half')
    with pytest.raises(RunError, match=r"no run to resume.*\n  leave out --resume to start one there"):
        train("a", resume=True)
    with RunDir.fresh(Path("a"), "ones"):
        pass
    Path("a/thesis.tex").touch()
    with pytest.raises(RunError, match=r"a holds files already\n  name another --run-dir"):
        RunDir.fresh(Path("a"), "ones")


@pytest.mark.parametrize(
    "end",
    ['{"step": 3, "rew', "\0\0\0\0", "[1]\n", "\udcff\n", '{"step": "x"}\n', "null\n"],
    ids=["half", "zeros", "list", "not text", "no number", "null"],
)
def test_lines_that_are_none_are_dropped_at_a_resume(run: Callable[[str], None], end: str) -> None:
    run("a")
    with RunDir.existing(Path("a")) as folder:
        path, whole = Path("a/metrics.jsonl"), Path("a/metrics.jsonl").read_bytes()
        path.write_bytes(whole + end.encode(errors="surrogateescape"))
        folder.restore(folder.checkpoints()[-1], keep=2, best=BestCheckpoints(None))
        assert path.read_bytes() == whole
        path.write_bytes(whole.removesuffix(b"\n"))  # the next line would be glued to it
        folder.restore(folder.checkpoints()[-1], keep=2, best=BestCheckpoints(None))
        assert path.read_bytes() == whole


def test_a_damaged_plan_is_named_and_a_damaged_record_stays_aside(run: Callable[[str], None]) -> None:
    run("a")
    for file in ("environment.json", "plan.json"):
        DAMAGE["cut"](Path("a", file))
        if file == "environment.json":
            train("a", resume=True, steps=3)
    assert same_weights("a", "whole")
    assert read_json(Path("a/environment.json"))["before"] == []
    assert Path("a/environment.json.damaged").exists()
    with pytest.raises(RunError, match=r"a/plan.json can't be read: .*\n  bring it back from a copy"):
        train("a", resume=True)


def test_a_place_that_takes_no_files_is_told(in_demo: None) -> None:
    Path("file").touch()
    with pytest.raises(
        RunError,
        match=r"^file/a can't be used: not a directory\n  a file is in the place of a folder: name another",
    ):
        train("file/a")


MOUNTS = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
can_mount = subprocess.run([*MOUNTS, "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not can_mount, reason="no mounts of one's own here: user namespaces are not allowed")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "size=4m",
            r"^a: a checkpoint takes 7\.\d+ MB, and 4\.\d+ MB are free\n  make room, or name another",
        ),
        ("size=16m", r"the disk takes no more \(no space left on device"),
        ("ro", r"^a: the disk is read-only \(.*: a/lock\); make it writable, or name another --run-dir$"),
    ],
)
def test_a_disk_of_its_own_that_is_full_or_read_only(in_demo: None, options: str, said: str) -> None:
    Path("a").mkdir()
    settings = "schedule='{iterations: 20, save_every: 1, keep: 20}' --inline --run-dir a"
    run = f"mount -t tmpfs -o {options} tmpfs a && {sys.executable} -m rlgraph run {ONE} {settings}"
    done = subprocess.run([*MOUNTS, run], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(said, done.stderr, re.MULTILINE), done.stderr


def test_a_checkpoint_that_does_not_fit_is_told_at_the_start(tmp_path: Path) -> None:
    with RunDir.fresh(tmp_path / "a", "ones") as folder:
        folder.check_room(2**20)
        with pytest.raises(
            RunError, match=r"a: a checkpoint takes 1,152,922 TB, and .* are free\n  make room, or"
        ):
            folder.check_room(2**60)


GONE = """
from rlgraph.ops import Context, float32, op, samples, text


@op()
def gone(ctx: Context, responses: text[samples]) -> float32[samples]:
    import shutil

    import torch

    shutil.rmtree("a")
    return torch.ones(len(responses))
"""


def test_a_run_directory_that_is_removed_meanwhile_is_told(in_demo: None) -> None:
    Path("gone.py").write_text(GONE)
    with pytest.raises(RunError, match=r"a/\S+: no such file or directory\n  the run directory is gone"):
        train("a", "nodes.rewards={op: gone.py:gone}")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_a_signal_ends_a_run_with_a_checkpoint(in_demo: None, number: signal.Signals) -> None:
    settings = ("schedule={iterations: 100000}", "--inline", "--run-dir", "a")
    with begun(ONE, *settings) as process:
        wait_for(lambda: Path("a/metrics.jsonl").is_file() and len(metrics("a")) > 2)
        process.send_signal(number)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == os.EX_TEMPFAIL == 75, said
    done = RunDir(Path("a")).saved()
    law = f"stopped after iteration {done} ({number.name})"
    assert said.endswith(f"{law}\n  continue with: rlgraph resume a\n")
    assert metrics("a")[-1]["step"] == done > 1
    for run_dir in ("a", "b"):
        train(run_dir, settings[0], resume=run_dir == "a", steps=done + 2)
    assert metrics("a") == metrics("b")
    assert same_weights("a", "b")


@pytest.mark.nightly
def test_a_time_limit_ends_a_run_with_a_checkpoint(in_demo: None) -> None:
    settings = ("schedule={iterations: 100000}", "--inline", "--run-dir", "a")
    with begun(ONE, *settings, "--time-limit", "20s") as process:
        said, _ = process.communicate(timeout=200)
    assert process.returncode == os.EX_TEMPFAIL, said
    done = RunDir(Path("a")).saved()
    law = f"stopped after iteration {done} (the time limit)"
    assert said.endswith(f"{law}\n  continue with: rlgraph resume a\n")
    assert metrics("a")[-1]["step"] == done
    assert "the time limit: stopping after what has begun" in said


def test_a_time_limit_that_is_none_is_refused(in_demo: None) -> None:
    for text in ("4", "0s", "h"):
        said = rlgraph("run", ONE, "--inline", "--time-limit", text, expect=2)
        assert f"`{text}` is not a duration: write 3h50m, 90m or 45s" in said


def test_a_time_limit_before_the_first_iteration_leaves_a_run_to_resume(in_demo: None) -> None:
    with pytest.raises(StoppedError, match=r"^stopped after iteration 0 \(the time limit\)"):
        run_graph(ONE, (SCHEDULE,), 1, run_dir=Path("a"), inline=True, time_limit=1e-6)
    train("a", resume=True)
    train("b")
    assert metrics("a") == metrics("b")
    assert same_weights("a", "b")


@pytest.mark.nightly
def test_a_signal_while_workers_start_ends_the_run_with_advice(in_demo: None) -> None:
    token = uuid.uuid4().hex
    with begun(ONE, "--devices", "1", "--run-dir", "a", RLGRAPH_TEST_TOKEN=token) as process:
        wait_for(lambda: any("raylet" in name for name in holders(token).values()))
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 1, said
    advice = "there is no checkpoint yet: continue with: rlgraph resume a"
    assert f"stopped at once\n  {advice}\n" in said
    assert_gone(token)


def test_a_second_signal_ends_it_at_once(in_demo: None) -> None:
    slow = "import time; open('begun', 'w').close(); time.sleep(600); shutil.rmtree"
    Path("slow.py").write_text(GONE.replace("shutil.rmtree", slow))
    settings = ("nodes.rewards={op: slow.py:gone}", "--inline", "--run-dir", "a")
    with begun(ONE, *settings) as process:
        wait_for(Path("begun").exists)
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None, "the iteration has begun"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 1, said
    advice = "there is no checkpoint yet: continue with: rlgraph resume a"
    assert said.endswith(f"stopped at once\n  {advice}\n")


def test_files_and_folders_are_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "[1]")
    assert read_json(tmp_path / "a.json") == [1]
    for text in ("old", "new"):
        (tmp_path / "aside").mkdir()
        (tmp_path / "aside" / text).touch()
        replace(tmp_path / "folder", tmp_path / "aside")
    assert os.listdir(tmp_path / "folder") == ["new"]
    discard(tmp_path / "folder")
    discard(tmp_path / "folder")  # it is gone
    assert os.listdir(tmp_path) == ["a.json"]
    (tmp_path / "a.json").write_text(json.dumps([1])[:-1])
    with pytest.raises(RunError, match=r"a.json can't be read"):
        read_json(tmp_path / "a.json")
