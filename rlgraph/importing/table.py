"""The table of a framework's keys: one row per key says what becomes of it.

    data.train_batch_size: {default: 1024, to: prompts.batch}
    trainer.balance_batch: {same: "rows are divided among devices by their length"}

Each framework has such a table, as ``verl.yaml``; comments at the top of ``verl.yaml`` and ``trl.yaml``
explain the words. The importer and the documents are both made from the tables.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlgraph.syntax import source
from rlgraph.syntax.yaml_text import flow

Fate = Literal["taken", "default", "hand", "none"]
TITLES: dict[Fate, str] = {
    "taken": "taken",
    "default": "default, or what rlgraph does anyway",
    "none": "has no equivalent",
    "hand": "to do by hand",
}
BELOW = ".*"


@dataclass(frozen=True)
class KeyRow:
    """The rule for a key; ``entry`` has the words of the table, which are attributes too."""

    key: str
    section: str
    entry: Mapping[str, Any]

    def __getattr__(self, word: str) -> Any:
        """Return the value of a word in the table, or None."""
        return self.entry.get(word)

    @property
    def default(self) -> Any:
        return self.entry.get("default")

    def markdown(self) -> str:
        """Return the row as a line of the documents' table."""
        default = ""
        if self.follows:
            default = f"`{self.follows}`"
        elif "default" in self.entry:
            default = f"`{flow(self.default)}`"
        return f"| `{self.key}` | {default} | {self._meaning()} |".replace("\\", "\\\\")

    def _meaning(self) -> str:
        words = (self.shape, self._target(), self.same, self.hand, self.none)
        texts = [str(word) for word in words if word]
        renamed = []
        for theirs, ours in (self.words or {}).items():
            if theirs != ours:
                renamed.append(f"{theirs} is {ours}")
        if renamed:
            texts[0] += f" ({', '.join(renamed)})"
        meaning = "; else: ".join(texts)
        condition = self.entry.get("if")
        if condition:
            meaning += f" (read with `{condition}`)"
        return meaning

    def _target(self) -> str:
        """Return the field of the graph that the key becomes, and what the table notes of it."""
        if not self.to:
            return ""
        if not self.note:
            return f"`{self.to}`"
        return f"`{self.to}`: {self.note}"


@dataclass(frozen=True)
class KeyTable:
    """The rows of a framework's table.

    Attributes:
        name: the framework's name.
        kind: the trainer whose rows these are, "" if the framework has one.
        rows: the rows by their keys.
        facts: the rest of the table's file, from which drafts are made.
        families: rows for keys without a row of their own, by the beginning of such keys.
    """

    name: str
    kind: str
    rows: Mapping[str, KeyRow]
    facts: Mapping[str, Any]
    families: Mapping[str, KeyRow] = field(default_factory=dict)

    def row(self, key: str) -> KeyRow | None:
        """Return the row of a key: its own, or that of the nearest key above it."""
        if key in self.rows:
            return self.rows[key]
        section = key
        while section and section + BELOW not in self.rows:
            section = section.rpartition(".")[0]
        row = self.rows.get(section + BELOW)
        if row is None:
            row = self.families.get(_family(key, self.families))
        if row is None:
            return None
        name = key[len(section) + 1 :].partition(".")[0]
        if row.known is None or name in (*row.known, "_target_"):
            return row
        return None

    def renamed(self, key: str) -> str:
        """Return a key as the table spells it: renamed as for all trainers, then as for this one."""
        trainer_renames = self.facts.get("renames_of", {}).get(self.kind, {})
        key = _renamed(key, self.facts.get("renames", {}))
        return _renamed(key, trainer_renames)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "KeyTable":
        """Return the table with other defaults, those of another release or of an engine."""
        rows = dict(self.rows)
        for key, default in defaults.items():
            if key in rows:
                rows[key] = replace(rows[key], entry={**rows[key].entry, "default": default})
        return replace(self, rows=rows)

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the documents' tables, one per section."""
        for section, rows in self.facts["sections"].items():
            yield from ("", f"### {section}", "", f"| {self.name} | its default | rlgraph |", "|---|---|---|")
            for key, entry in rows.items():
                yield KeyRow(key, section, entry).markdown()


@cache
def table_of(name: str, kind: str = "") -> KeyTable:
    """Return the table of a framework.

    ``kind`` selects one trainer's sections, whose rows override those of all trainers.
    """
    facts = source.read(Path(__file__).parent / f"{name}.yaml").plain()
    trainers_of_section = facts.get("sections_of", {})
    models = facts.get("models_of", {}).get(kind, {})
    rows: dict[str, KeyRow] = {}
    for section, section_rows in facts["sections"].items():
        trainers = trainers_of_section.get(section)
        is_of_another = kind and trainers is not None and kind not in trainers
        if is_of_another:
            continue
        for key, entry in section_rows.items():
            rows[key] = KeyRow(key, section, _of_model(entry, models))
    for key in facts.get("architecture", ()):
        rows[key] = KeyRow(key, "model", {"none": "the shape of a model comes from its config.json"})
    families: dict[str, KeyRow] = {}
    for entry in facts.get("families", ()):
        families[entry["begins"]] = KeyRow(f"{entry['begins']}*", "families", entry)
    return KeyTable(facts["name"], kind, rows, facts, families)


def _renamed(key: str, renames: Mapping[str, str]) -> str:
    """Return a key with its longest beginning that has another name renamed."""
    longest_first = sorted(renames, key=len, reverse=True)
    for old in longest_first:
        if key == old or key.startswith(f"{old}."):
            return str(renames[old]) + key[len(old) :]
    return key


def _family(key: str, families: Mapping[str, KeyRow]) -> str:
    """Return the longest beginning of a key that has a row, or ""."""
    beginnings = [begins for begins in families if key.startswith(begins)]
    return max(beginnings, key=len, default="")


def _of_model(entry: Mapping[str, Any], models: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the words for a key, for a trainer that trains another model than `policy`."""
    to = entry.get("to") or ""
    for theirs, ours in models.items():
        prefix = f"models.{theirs}."
        if to.startswith(prefix):
            field_path = to.removeprefix(prefix)
            return {**entry, "to": f"models.{ours}.{field_path}"}
    return entry
