"""The README's screens are what the commands print, and its graphs are the shipped ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCREENS = re.findall(r"```\n\$ rlgraph (.*?)\n(.*?)\n```", README, re.DOTALL)


@pytest.mark.parametrize(("command", "screen"), SCREENS, ids=[command for command, _ in SCREENS])
def test_a_screen_is_what_the_command_prints(command: str, screen: str) -> None:
    result = CliRunner().invoke(main, shlex.split(command))
    printed = (result.stdout + result.stderr).rstrip()
    for piece in screen.split("\n...\n"):  # three dots stand for lines left out
        assert piece.strip("\n") in printed


def test_there_are_screens() -> None:
    assert len(SCREENS) >= 2


def test_the_graphs_shown_are_the_shipped_ones() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    shipped = [path.read_text(encoding="utf-8") for path in (ROOT / "graphs").glob("*.yaml")]
    without_about = [
        "".join(line for line in text.splitlines(True) if not line.startswith("about:")) for text in shipped
    ]
    for block in blocks:
        assert any(block.strip() in text for text in without_about), block


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
