"""The table of a framework's keys: one row per key says what becomes of it.

    data.train_batch_size: {default: 1024, to: prompts.batch}
    trainer.balance_batch: {same: "rows are divided among devices by their length"}

``verl.yaml`` and ``trl.yaml`` are such tables, and say at their top what the words mean. The importer and the
documents are made of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlgraph.syntax import source
from rlgraph.syntax.yaml_text import flow

Fate = Literal["taken", "default", "hand", "none"]
TITLES: dict[Fate, str] = {
    "taken": "taken",
    "default": "default, or as rlgraph does anyway",
    "none": "has no equivalent",
    "hand": "needs a hand",
}
BELOW = ".*"


@dataclass(frozen=True)
class KeyRow:
    """What becomes of a key; ``says`` has the words of the table."""

    key: str
    section: str
    says: Mapping[str, Any]

    def __getattr__(self, word: str) -> Any:
        """Return what the table says by a word, or None."""
        return self.says.get(word)

    @property
    def default(self) -> Any:
        return self.says.get("default")

    def markdown(self) -> str:
        """Return the row of a table in the documents."""
        to = f"`{self.to}`" + (f": {self.note}" if self.note else "") if self.to else None
        parts = [self.shape, to, self.same, self.hand, self.none]
        words = [f"{theirs} is {ours}" for theirs, ours in (self.words or {}).items() if theirs != ours]
        found = [str(part) for part in parts if part]
        meaning = "; else: ".join([found[0] + (f" ({', '.join(words)})" if words else ""), *found[1:]])
        read = self.says.get("if")
        condition = f" (read with `{read}`)" if read else ""
        default = f"`{flow(self.default)}`" if "default" in self.says else ""
        default = f"`{self.follows}`" if self.follows else default
        return f"| `{self.key}` | {default} | {meaning}{condition} |".replace("\\", "\\\\")


@dataclass(frozen=True)
class KeyTable:
    """The rows of a framework, and the facts beside them that its draft is made by."""

    name: str
    kind: str
    rows: Mapping[str, KeyRow]
    facts: Mapping[str, Any]

    def row(self, key: str) -> KeyRow | None:
        """Return the row of a key: its own, or that of the nearest key above it."""
        if key in self.rows:
            return self.rows[key]
        above = key
        while above and above + BELOW not in self.rows:
            above = above.rpartition(".")[0]
        row = self.rows.get(above + BELOW)
        first = key[len(above) + 1 :].partition(".")[0]
        return row if row and (row.known is None or first in (*row.known, "_target_")) else None

    def renamed(self, key: str) -> str:
        """Return a key as the table spells it."""
        renames = self.facts.get("renames", {})
        for old in sorted(renames, key=len, reverse=True):
            if key == old or key.startswith(f"{old}."):
                return str(renames[old]) + key[len(old) :]
        return key

    def with_defaults(self, defaults: Mapping[str, Any]) -> "KeyTable":
        """Return the table with other defaults, of a release or an engine whose own these are."""
        rows = {
            key: replace(row, says={**row.says, "default": defaults[key]}) if key in defaults else row
            for key, row in self.rows.items()
        }
        return replace(self, rows=rows)

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the documents' tables, one per section."""
        for section, rows in self.facts["sections"].items():
            yield from ("", f"### {section}", "", f"| {self.name} | its default | rlgraph |", "|---|---|---|")
            yield from (KeyRow(key, section, says).markdown() for key, says in rows.items())


@cache
def table_of(name: str, kind: str = "") -> KeyTable:
    """Return the table of a framework; ``kind`` leaves the sections of one trainer, whose rows come last."""
    facts = source.read(Path(__file__).parent / f"{name}.yaml").plain()
    sections, of = facts["sections"], facts.get("sections_of", {})
    kept = [section for section in sections if not kind or kind in of.get(section, [kind])]
    rows = {key: KeyRow(key, section, says) for section in kept for key, says in sections[section].items()}
    return KeyTable(facts["name"], kind, rows, facts)
