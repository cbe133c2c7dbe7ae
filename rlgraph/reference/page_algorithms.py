"""Writes the page of algorithms: every shipped graph, drawn, with the edits of its parent, as Markdown."""

from __future__ import annotations

import networkx as nx

from rlgraph.frontend.compose import as_written
from rlgraph.frontend.graph_diff import diff_text
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.syntax import source

HEAD = """# Algorithms

Made by `rlgraph graphs --format markdown -o docs/algorithms.md` from the shipped graphs; do not edit it.
Each is a file in [graphs/](../graphs), opens with its drawing, and is an edit of another where it can be:
what `rlgraph diff PARENT GRAPH` prints stands below it. [The reference](reference.md) has the ops and losses,
and `extends: NAME` makes any of these the start of your own."""


def algorithms() -> str:
    """Return the whole page: a table, then a section per graph, parents before the edits of them."""
    parents = {name: _parent(name) for name in shipped_graphs()}
    edits = nx.DiGraph((str(parent), name) for name, parent in parents.items())  # from "None" to the roots
    names = [*nx.dfs_preorder_nodes(edits, "None")][1:]
    rows = [f"| [{name}](#{name}) | {_origin(parents[name])} | {_about(name)} |" for name in names]
    table = "\n".join(["| graph | edit of | |", "| --- | --- | --- |", *rows])
    return "\n\n".join([HEAD, table, *(_section(name, parents[name]) for name in names)]) + "\n"


def _section(name: str, parent: str | None) -> str:
    drawing, prose = _opening(name)
    blocks = [f"## {name}", f"{_about(name)}.", f"```text\n{drawing}\n```", prose]
    if parent is None:
        text = shipped_graphs()[name].read_text(encoding="utf-8")
        blocks.append(f"```yaml\n{text[text.index('graph:') :].rstrip()}\n```")
    else:
        blocks.append(f"An edit of {_origin(parent)}:\n\n```text\n{_edits(parent, name)}\n```")
    return "\n\n".join(block for block in blocks if block)


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
    return drawing, "\n".join(line.strip() for line in prose.splitlines())


def _edits(parent: str, name: str) -> str:
    """Return what `rlgraph diff` prints of two graphs, less their names and abouts."""
    old, new = as_written(parent), as_written(name)
    for said in ("graph", "about"):
        old = old.with_item(said, new.items[said])
    return diff_text(old, new).rstrip()


def _about(name: str) -> str:
    about = as_written(name).get("about")
    assert about, f"the shipped graph {name} has no about"
    return str(about.value)


def _origin(parent: str | None) -> str:
    return f"[{parent}](#{parent})" if parent else ""
