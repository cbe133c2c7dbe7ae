"""What each pass does to a small graph: pairs of before and after, in ``tests/golden/passes/PASS.txt``.

A pair is a title behind ``# ``, a graph as a user writes it, what the passes before make of it, and what
this pass makes of that. To add one, write a title and a graph into the file and run this file with
``--bless``, which fills in the rest. A graph may leave out ``graph``, ``models`` and ``schedule``, which
are then those of ``HEAD``; a line ``devices: 2`` says how many there are.

A line is a node: its kind, op and model with the version that it reads; what it reads -> what it writes.
Behind it stand its pool once it has one, and attributes that the pass has set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from graph_text import graph_text
from rlgraph.frontend.bind import bind
from rlgraph.ir.graph import Graph, Node
from rlgraph.passes import PASSES
from rlgraph.syntax.source import Source, parse

FOLDER = Path(__file__).parents[1] / "golden/passes"
HEAD = {
    "graph": "graph: small",
    "models": "models: {policy: {path: a/b, optimizer: {lr: 1e-4}}, ref: {path: a/b, frozen: true}}",
    "schedule": "schedule: {iterations: 4}",
}
BEFORE, AFTER = "--- before", "--- after"
NAMES = [apply.__name__ for apply in PASSES]


@dataclass(frozen=True)
class Pair:
    """A title, and the graph that stands below it."""

    title: str
    written: str

    @property
    def devices(self) -> int:
        found = re.search(r"^devices: (\d+)$", self.written, re.MULTILINE)
        return int(found[1]) if found else 1

    @property
    def graph(self) -> Graph:
        text = re.sub(r"^devices: \d+\n", "", self.written, flags=re.MULTILINE)
        missing = [line for key, line in HEAD.items() if not re.search(rf"^{key}:", text, re.MULTILINE)]
        return bind(parse(Source("small.yaml", "\n".join([*missing, text]))), self.devices)


def pairs_in(text: str) -> Iterator[Pair]:
    """Yield the pairs of a file, without what is behind each graph."""
    for block in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = block.partition("\n")
        yield Pair(title, rest.partition(f"\n{BEFORE}")[0].strip("\n") + "\n")


def lines(graph: Graph, beside: Graph) -> str:
    """Return a graph as text, with the attributes that differ from those of the other side of its pair."""
    others = {node.name: node for node in beside.nodes}
    nodes = [*zip(graph.nodes, graph_text(graph).splitlines(), strict=False)]
    found = [line + more(node, others.get(node.name)) for node, line in nodes]
    return "\n".join([*found, *(f"note: {note}" for note in graph.notes)])


def more(node: Node, other: Node | None) -> str:
    """Return what the text of a node does not say: its pool, and attributes that its other side has not."""
    text = f" [{node.pool}]" if node.pool else ""
    if node.call and other and other.call:
        unlike = {
            name: value
            for name, value in node.call.attributes.items()
            if other.call.attributes.get(name) != value
        }
        text += f" {unlike}" if unlike else ""
    return text


@pytest.mark.parametrize("name", NAMES)
def test_pairs_of_a_pass(name: str, golden: Callable[[str, str], None]) -> None:
    path = FOLDER / f"{name}.txt"
    assert path.is_file(), f"the pass {name} has no pairs: write a title and a graph into {path}"
    blocks = []
    for pair in pairs_in(path.read_text(encoding="utf-8")):
        before = pair.graph
        for apply in PASSES[: NAMES.index(name)]:
            before = apply(before)
        after = PASSES[NAMES.index(name)](before)
        assert after != before, f"{name} leaves the graph of `{pair.title}` as it is"
        old, new = lines(before, after), lines(after, before)
        blocks.append(f"# {pair.title}\n{pair.written}\n{BEFORE}\n{old}\n\n{AFTER}\n{new}\n")
    assert blocks, f"{path} has no pair: a title behind `# `, and a graph"
    golden(f"passes/{name}.txt", "\n\n".join(blocks))


def test_every_file_is_of_a_pass() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*NAMES}
