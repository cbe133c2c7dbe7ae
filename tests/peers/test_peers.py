"""Peers still give what was recorded of them (at night, in the environment of ``make peers``)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[1] / ".peers/bin/python"
NAMES = sorted(path.stem.removeprefix("ask_") for path in FOLDER.glob("ask_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_is_recorded(name: str) -> None:
    assert (FOLDER / "recorded" / f"{name}.json").is_file(), "make peers records it"


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs .peers: make peers")
def test_a_peer_gives_what_was_recorded(name: str) -> None:
    command = [str(PYTHON), str(FOLDER / "record.py"), "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
