"""No command shows a traceback where it can't write: in words it says which place, and what to do.

Tests may run as a user who may write anywhere, so the places are those that no user can write to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.runtime.run import run_graph

ONE = str(Path(__file__).parent / "ones.yaml")
PLACES = ("/proc/nope/out.json", "/proc/out.json", "file/out.json", "folder")
FULL = "/dev/full"  # a device that takes no byte
MEGATRON = ("--hf-checkpoint", "m", "--prompt-data", "d.jsonl")
# command -> the words before the place; a command that has an option for a place is here
WRITERS = {
    "run": ("run", ONE, "--inline", "--steps", "0", "--run-dir"),
    "sweep": ("sweep", ONE, "seed=[0,1]", "--inline", "--steps", "1", "--folder"),
    "eval": ("eval", "run", "--inline", "--run-dir"),
    "plan": ("plan", "demo", "-o"),
    "view": ("view", "demo", "-o"),
    "report": ("report", "run", "--cluster", "h100-8", "--calibrate"),
    "export": ("export", "run", "--to"),
    "replay": ("replay", "run", "--step", "1", "--from", "rewards", "--export"),
    "nodes": ("nodes", "-o"),
    "graphs": ("graphs", "-o"),
    "import verl": ("import", "verl", "-o"),
    "import trl": ("import", "trl", "trl.yaml", "--trainer", "grpo", "-o"),
    "import openrlhf": ("import", "openrlhf", "--pretrain", "m", "--prompt_data", "d.jsonl", "-o"),
    "import slime": ("import", "slime", *MEGATRON, "-o"),
    "import miles": ("import", "miles", *MEGATRON, "-o"),
    "import prime-rl": ("import", "prime-rl", "@", "rl.toml", "-o"),
    "import nemo-rl": ("import", "nemo-rl", "-o"),
    "import areal": ("import", "areal", "-o"),
}
TAKES_A_FOLDER = {"run", "sweep", "eval", "export", "replay"}  # an empty one will do
# options that name what is read, or where a later command writes
READS = {
    *("check --calibration", "plan --calibration", "view --calibration", "run --calibration"),
    *("resume --calibration", "eval --calibration", "plan --against", "doctor --run-dir"),
    "demo --offline",
}


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_with_a_run(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
        patch.chdir(tmp_path_factory.mktemp("writing"))
        Path("folder").mkdir()
        Path("file").touch()
        Path("rl.toml").write_text("max_steps = 2\n[orchestrator]\nbatch_size = 4\n")
        Path("trl.yaml").write_text("model_name_or_path: m\ndataset_name: d\n")
        settings = ("schedule.record_every=1", "schedule.iterations=2")
        run_graph(ONE, settings, 1, run_dir=Path("run"), inline=True)
        yield


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command of the command line, by the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_every_command_that_writes_is_tried() -> None:
    writing = set()
    for name, command in commands(main):
        for parameter in command.params:
            is_place = isinstance(parameter.type, click.Path | click.File)
            is_written = isinstance(parameter, click.Option) and f"{name} {parameter.opts[-1]}" not in READS
            if is_place and is_written:
                writing.add(name)
    assert writing == {*WRITERS}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", WRITERS)
def test_a_place_that_can_not_be_written_is_named(command: str, place: str) -> None:
    if place == "folder" and command in TAKES_A_FOLDER:
        pytest.skip("an empty folder will do")
    before = sorted(os.listdir())
    done = CliRunner().invoke(main, [*WRITERS[command], place])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (1, 2) and "Traceback" not in done.output
    assert place.split("/")[-2 if place.count("/") > 2 else 0] in done.output
    assert sorted(os.listdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("module", ["demo", "demo_tools"])
@pytest.mark.parametrize("place", ["/proc/nope", "file/files", "file"])
def test_the_demos_have_no_traceback_either(module: str, place: str) -> None:
    command = [sys.executable, "-m", f"rlgraph.runtime.{module}"]
    done = subprocess.run([*command, place], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert place.partition("/files")[0] in done.stderr and "can't be used: " in done.stderr
    before = sorted(os.listdir())
    assert "[demo" in subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
    assert sorted(os.listdir()) == before, "an option is no folder"


@pytest.mark.parametrize("command", sorted({*WRITERS} - TAKES_A_FOLDER))
def test_a_full_disk_is_said(command: str) -> None:
    done = CliRunner().invoke(main, [*WRITERS[command], FULL])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1 and "the disk takes no more (no space left on device" in done.output
