"""Writes two pages as Markdown: every op, loss and section, and every shipped graph as an edit of another."""

import re
from collections.abc import Iterable, Sequence

import networkx as nx

from rlgraph.engines.registry import SERVING
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.reference.describe import GROUPS, OpEntry, entry_of
from rlgraph.reference.words import default_of, in_words
from rlgraph.section import Section
from rlgraph.syntax import model_settings, settings, source

SECTIONS: dict[str, type[Section]] = {
    "a graph file": settings.GraphFile,
    "models.NAME": model_settings.ModelSection,
    "models.NAME.optimizer": model_settings.Optimizer,
    "models.NAME.serve": model_settings.Serve,
    **{f"models.NAME.serve.{name}": engine.settings for name, engine in SERVING.items() if engine.settings},
    "models.NAME.train": model_settings.Train,
    "models.NAME.train.lora": model_settings.Lora,
    "nodes.FILTER.refill": settings.Refill,
    "schedule.buffer": settings.Buffer,
    "schedule.stop": settings.Stop,
    "schedule.best": settings.Best,
    "pools.NAME": settings.Pool,
    "schedule": settings.Schedule,
    "eval": settings.Eval,
}
REFERENCE = """# Reference

Made by `rlgraph nodes --format markdown -o docs/reference.md` from the declarations that `rlgraph check`
uses; do not edit it. [The language](language.md) says how the parts go together.

Beside its attributes a node has `op`, `model` where its op reads one, `in: {parameter: column}`,
`out: {output: column}` and `rows: FILTER`; a filter, `refill`.
"""
ALGORITHMS = """# Algorithms

Choose a graph, and begin yours with `extends: NAME`. Most are edits of another graph, shown here as
`rlgraph diff PARENT GRAPH` prints them. Each section lists what agrees with the paper's equations and what
does not; a test compares the values with the graph. [The reference](reference.md) has the ops and losses.

Made by `rlgraph graphs --format markdown -o docs/algorithms.md` from the files in [graphs/](../graphs); do
not edit it."""


def reference() -> str:
    """Return the page of ops, losses and sections."""
    blocks = [REFERENCE, "## Sections"]
    for title, section in SECTIONS.items():
        blocks.append(section_markdown(title, section))
    for title, names in GROUPS.items():
        blocks.append(f"## {title.capitalize()}")
        for name in names:
            blocks.append(entry_markdown(entry_of(name)))
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def entry_markdown(entry: OpEntry) -> str:
    """Describe an op or a loss: its purpose, the columns it reads and writes, its attributes, an example."""
    blocks = [
        f"### {entry.name}",
        entry.doc.summary,
        entry.doc.body,
        _table(("reads", "type", ""), entry.reads),
        _table(("writes", "type"), entry.writes),
        "\n".join(f"- {title}: {text}" for title, text in entry.facts),
        _table(("attribute", "type", "default", ""), entry.attributes),
    ]
    if entry.doc.example:
        blocks.append(f"```yaml\n{entry.doc.example}\n```")
    return "\n\n".join(block for block in blocks if block)


def section_markdown(title: str, section: type[Section]) -> str:
    """Describe a section: its purpose, and its keys."""
    schema = section.model_json_schema()
    required = schema.get("required", ())
    rows = []
    for name, value in schema["properties"].items():
        text = " ".join(value["description"].split())
        rows.append((name, in_words(value), default_of(value, name in required), text))
    table = _table(("attribute", "type", "default", ""), rows)
    if section is settings.GraphFile:  # its required keys depend on `extends`, and have defaults for it
        table = _table(("section", "type", ""), [(name, kind, text) for name, kind, _, text in rows])
    return f"### {title}\n\n{schema['description']}\n\n{table}".replace("``", "`")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = []
    for name, *cells in rows:
        lines.append([f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)])
    if not lines:
        return ""
    lines = [[*headings], ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def algorithms() -> str:
    """Return the page of graphs: a table, then a section per graph, parents before the edits of them."""
    parents = {name: _parent(name) for name in shipped_graphs()}
    edits = nx.DiGraph((str(parent), name) for name, parent in parents.items())  # "None" leads to the roots
    names = [*nx.dfs_preorder_nodes(edits, "None")][1:]
    rows = [f"| [{name}](#{name}) | {_origin(parents[name])} | {_about(name)} |" for name in names]
    table = "\n".join(["| graph | edit of | |", "| --- | --- | --- |", *rows])
    return "\n\n".join([ALGORITHMS, table, *(_section(name, parents[name]) for name in names)]) + "\n"


def _section(name: str, parent: str | None) -> str:
    drawing, prose = _opening(name)
    blocks = [f"## {name}", f"{_about(name)}.", f"```text\n{drawing}\n```", prose]
    if parent:
        blocks.append(f"An edit of {_origin(parent)}:\n\n```text\n{_edits(parent, name)}\n```")
    else:
        text = shipped_graphs()[name].read_text(encoding="utf-8")
        blocks.append(f"```yaml\n{text[text.index('graph:') :].rstrip()}\n```")
    return "\n\n".join(filter(None, blocks))


def _parent(name: str) -> str | None:
    """Return the graph that a shipped graph extends."""
    extends = source.read(shipped_graphs()[name]).get("extends")
    return str(extends.value) if extends else None


def _opening(name: str) -> tuple[str, str]:
    """Return the comment that a graph's file opens with: its drawing, and the text below it."""
    lines = shipped_graphs()[name].read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    text = "\n".join(line[1:].rstrip() for line in lines[:end])
    drawing, _, prose = text.partition("\n\n")
    prose = "\n".join(line.strip() for line in prose.splitlines())
    return drawing, re.sub(r"^rlgraph run .*", r"```\n\g<0>\n```", prose, flags=re.MULTILINE)


def _edits(parent: str, name: str) -> str:
    """Return what `rlgraph diff` prints of two graphs, less their names and abouts."""
    old, new = as_written(parent), as_written(name)
    for key in ("graph", "about"):
        old = old.with_item(key, new.items[key])
    return diff_text(old, new).rstrip()


def _about(name: str) -> str:
    about = as_written(name).get("about")
    assert about, f"the shipped graph {name} has no about"
    return str(about.value)


def _origin(parent: str | None) -> str:
    return f"[{parent}](#{parent})" if parent else ""
