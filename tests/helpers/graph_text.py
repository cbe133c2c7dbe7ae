"""A graph between two passes as text, for golden files."""

from __future__ import annotations

from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.intervals import words
from rlgraph.ir.steps import Version


def graph_text(graph: Graph) -> str:
    """Return a graph between two passes: one line a node, with what is known of it so far.

    As ``old_logprobs: run logprobs policy@v one, tokens loss_mask -> old_logprobs, after sync:policy``.
    """
    return "".join(f"{line}\n" for line in [*map(_node, graph.nodes), *graph.notes])


def _node(node: Node) -> str:
    version = "" if node.version is None else f"@{Version(node.version)}"
    said = [f"{node.name}:", node.kind, node.op.name if node.call else ""]
    said += [f"{node.model}{version}" if node.model else "", node.layout]
    edges = " ".join([*node.reads, *(("->", *node.writes) if node.writes else ())])
    after = f"after {' '.join(node.after)}" if node.after else ""
    told = (" ".join(filter(None, said)), edges, after, words(node.when))
    return ", ".join(part for part in told if part)
