"""The table of all families in docs/models.md: the model types that share a result (``--bless``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import __version__

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## Every family of transformers "
HEAD = ["| model types | trained | embedded | refused because |", "|---|---|---|---|"]
Result = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """A family: whether it trains, packed or beside each other, whether the embedded engine samples from it,
    and why it does not."""

    kind: str
    trained: str
    embedded: str
    why: tuple[str, ...]

    def result(self) -> Result:
        """Return the cells of the table beside the family's name."""
        reasons = "<br>".join(dict.fromkeys(reason.partition("; ")[0] for reason in self.why))
        return self.trained, self.embedded, " ".join(reasons.replace("|", "/").split())


def compare_row(row: Row, bless: bool) -> None:
    """Compare what a test has found of a family with the page; or write it there."""
    if bless:
        before, results, after = _parts()
        heading = f"{HEADING}{__version__}"
        rows = _rows({**results, row.kind: row.result()})
        text = [*before, heading, "", *_introduction(), "", *HEAD, *rows, *after]
        PAGE.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    _, results, _ = _parts()
    assert results.get(row.kind) == row.result()


def listed_rows() -> tuple[str, list[str]]:
    """The version of transformers that the page names, and the families that it lists."""
    (version,) = re.findall(f"{HEADING}(.*)", PAGE.read_text(encoding="utf-8"))
    return version, sorted(_parts()[1])


def _rows(results: Mapping[str, Result]) -> list[str]:
    """The lines of the table: results without a reason first, then those of most families."""
    kinds: dict[Result, list[str]] = defaultdict(list)
    for kind in sorted(results):
        kinds[results[kind]].append(kind)
    in_order = sorted(kinds, key=lambda result: (bool(result[2]), -len(kinds[result]), kinds[result]))
    return [f"| {', '.join(kinds[result])} | {' | '.join(result)} |" for result in in_order]


def _introduction() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heading = next((at for at, line in enumerate(lines) if line.startswith(HEADING)), None)
    if heading is None:
        return ["(what is tried)"]
    head = lines.index(HEAD[0])
    return lines[heading + 2 : head - 1]


def _parts() -> tuple[list[str], dict[str, Result], list[str]]:
    """The page before the section of the table, the result of each family in it, and the lines behind it."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heading = next((at for at, line in enumerate(lines) if line.startswith(HEADING)), len(lines))
    if heading == len(lines):
        return [*lines, ""], {}, []
    first = lines.index(HEAD[0]) + len(HEAD)
    end = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
    results: dict[str, Result] = {}
    for line in lines[first:end]:
        kinds, trained, embedded, reasons = (cell.strip() for cell in line.strip("|").split("|"))
        results |= dict.fromkeys(kinds.split(", "), (trained, embedded, reasons))
    return lines[:heading], results, lines[end:]
