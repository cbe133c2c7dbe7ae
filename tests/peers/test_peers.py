"""Peers still give what was recorded of them (at night, in the environment of ``make peers``)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from checkout import folder_of

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
    recorded = json.loads((FOLDER / "recorded" / f"{name}.json").read_text())
    if missing := [peer for peer in recorded["versions"] if "/" in peer and not folder_of(peer).is_dir()]:
        pytest.skip(f"needs a checkout of {missing[0]} (tests/peers/checkout.py)")
    command = [str(PYTHON), str(FOLDER / "record.py"), "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
