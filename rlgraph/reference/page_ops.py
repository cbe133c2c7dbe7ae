"""Writes the reference page: every op, loss and section, from their declarations, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlgraph.reference.describe import GROUPS, OpEntry, entry_of
from rlgraph.reference.words import default_of, in_words
from rlgraph.syntax.settings import (
    Eval,
    GraphFile,
    Lora,
    ModelSection,
    Optimizer,
    Pool,
    Refill,
    Schedule,
    Section,
    Serve,
    Train,
)

SECTIONS: dict[str, type[Section]] = {
    "a graph file": GraphFile,
    "models.NAME": ModelSection,
    "models.NAME.optimizer": Optimizer,
    "models.NAME.serve": Serve,
    "models.NAME.train": Train,
    "models.NAME.train.lora": Lora,
    "nodes.FILTER.refill": Refill,
    "pools.NAME": Pool,
    "schedule": Schedule,
    "eval": Eval,
}
HEAD = """# Reference

Made by `rlgraph nodes --format markdown -o docs/reference.md` from the declarations that `rlgraph check`
uses; do not edit it. [The language](language.md) says how the parts go together.

Beside its attributes a node has `op`, `model` where its op reads one, `in: {parameter: column}`,
`out: {output: column}` and `rows: FILTER`; a filter, `refill`.
"""


def reference() -> str:
    """Return the whole page."""
    blocks = [HEAD, "## Sections", *(section_markdown(title, kind) for title, kind in SECTIONS.items())]
    for title, known in GROUPS.items():
        blocks += [f"## {title.capitalize()}", *(entry_markdown(entry_of(name)) for name in known)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def entry_markdown(entry: OpEntry) -> str:
    """Describe an op or a loss: its purpose, the columns it reads and writes, its attributes, an example."""
    blocks = [f"### {entry.name}", entry.doc.summary, entry.doc.body]
    blocks += [_table(("reads", "type", ""), entry.reads), _table(("writes", "type"), entry.writes)]
    blocks.append("\n".join(f"- {title}: {text}" for title, text in entry.facts))
    blocks.append(_table(("attribute", "type", "default", ""), entry.attributes))
    blocks += [f"```yaml\n{entry.doc.example}\n```"] if entry.doc.example else []
    return "\n\n".join(block for block in blocks if block)


def section_markdown(title: str, section: type[Section]) -> str:
    """Describe a section: its purpose, and its keys."""
    schema = section.model_json_schema()
    required = schema.get("required", ())
    rows = [
        (name, in_words(value), default_of(value, name in required), value["description"])
        for name, value in schema["properties"].items()
    ]
    table = _table(("attribute", "type", "default", ""), rows)
    if section is GraphFile:  # its required keys depend on `extends`, for which it has defaults of its own
        table = _table(("section", "type", ""), [(name, kind, text) for name, kind, _, text in rows])
    return f"### {title}\n\n{schema['description']}\n\n{table}".replace("``", "`")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [(f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)) for name, *cells in rows]
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
