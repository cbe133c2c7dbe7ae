"""The table of all families in docs/models.md: a row per model type of transformers (``--bless``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from transformers import __version__

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## Every family of transformers "
HEAD = ["| model type | trained | embedded | refused, since |", "|---|---|---|---|"]


@dataclass(frozen=True)
class Row:
    """A family: whether it trains, packed or beside each other, whether the embedded engine samples from it,
    and why it does not."""

    kind: str
    trained: str
    embedded: str
    why: tuple[str, ...]

    def __str__(self) -> str:
        reasons = "<br>".join(dict.fromkeys(reason.partition("; ")[0] for reason in self.why))
        return f"| {self.kind} | {self.trained} | {self.embedded} | {reasons.replace('|', '/')} |"


def compare_row(row: Row, bless: bool) -> None:
    """Compare what a test has found of a family with the page; or write it there."""
    if bless:
        before, rows, after = _parts()
        rows = sorted([line for line in rows if _kind(line) != row.kind] + [str(row)], key=_kind)
        heading = f"{HEADING}{__version__}"
        text = [*before, heading, "", *_introduction(), "", *HEAD, *rows, *after]
        PAGE.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    _, rows, _ = _parts()
    assert [line for line in rows if _kind(line) == row.kind] == [str(row)]


def listed_rows() -> tuple[str, list[str]]:
    """The version of transformers that the page names, and the families that it lists."""
    (version,) = re.findall(f"{HEADING}(.*)", PAGE.read_text(encoding="utf-8"))
    return version, [_kind(line) for line in _parts()[1]]


def _introduction() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heading = next((at for at, line in enumerate(lines) if line.startswith(HEADING)), None)
    if heading is None:
        return ["(what is tried)"]
    head = lines.index(HEAD[0])
    return lines[heading + 2 : head - 1]


def _parts() -> tuple[list[str], list[str], list[str]]:
    """The lines of the page before the section of the table, the table's rows, and the lines behind it."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heading = next((at for at, line in enumerate(lines) if line.startswith(HEADING)), len(lines))
    if heading == len(lines):
        return [*lines, ""], [], []
    first = lines.index(HEAD[0]) + len(HEAD)
    end = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
    return lines[:heading], lines[first:end], lines[end:]


def _kind(line: str) -> str:
    return line.split("|")[1].strip()
