"""Descriptions of ops and losses from their declarations: for the terminal, the reference and the schema."""

import functools
import inspect
import itertools
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Mark, Source, fail, nearest
from rlgraph.laws.nodes import CALL_LAWS
from rlgraph.nodes import HOOKS, LOSSES, OPS
from rlgraph.ops.column_types import PathMarker, holds
from rlgraph.ops.declare import Loop, Loss, Op, PairLoss, Parser, Port
from rlgraph.ops.docstring import Docstring
from rlgraph.ops.registry import find_hook, find_op, load
from rlgraph.ops.tools import Tool, tool_schema
from rlgraph.reference.words import default_of, in_words

ROWS = {
    "each": "any part of the rows on its own",
    "group": "all samples of a prompt together",
    "all": "the whole batch at once",
}
KINDS: dict[str, Any] = {kind.word: kind for kind in (Loss, PairLoss, Loop, Tool, Parser)}
GROUPS = {"ops": OPS, "losses": LOSSES, "pair_losses": HOOKS["pair_loss"]}
GROUPS |= {f"{word}s": HOOKS[word] for word in ("loop", "tool", "parser")}
STANDS = {
    "loss": "`loss: {kind: NAME}` of update.policy; its columns become columns of the node",
    "pair_loss": "`losses: {any_name: {kind: NAME}}` of preference.dpo",
    "loop": "`loop: {kind: NAME}` of rollout.agent; its columns, of prompts, become columns of the node",
    "tool": "`tools: {any_name: {kind: NAME}}` of rollout.agent; its columns likewise",
    "parser": "`parser: {kind: NAME}` of rollout.agent",
}
WIDTH, CELL = 110, 26  # characters per line, and the widest cell but the last


@dataclass(frozen=True)
class OpEntry:
    """An op, a loss or such, in words. Rows of a table are as wide as its heading."""

    name: str
    doc: Docstring
    reads: tuple[tuple[str, str, str], ...]  # column, type, condition
    writes: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]  # pairs such as ("model", "...")
    attributes: tuple[tuple[str, str, str, str], ...]  # name, type, default, description


def catalog_text() -> str:
    """Return every shipped op, loss, agent loop, tool and parser with its summary, in groups."""
    width = max(len(name) for known in GROUPS.values() for name in known)
    lines = []
    for title, known in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{width}}  {entry_of(name).doc.summary}" for name in known]
    return "\n".join([*lines, "", "`rlgraph nodes NAME` says all of one; NAME may be my_ops.py:name.", ""])


def describe(name: str) -> str:
    """Describe a shipped op or loss, or a function in a file, as text.

    Raises:
        GraphError: there is none, or its file can't be read.
    """
    entry = entry_of(name)
    summary = textwrap.fill(entry.doc.summary, WIDTH, initial_indent="  ", subsequent_indent="  ")
    blocks = [f"{entry.name}\n{summary}", textwrap.indent(entry.doc.body, "  ")]
    tables = {"reads": entry.reads, "writes": entry.writes, "": entry.facts, "attributes": entry.attributes}
    for title, rows in tables.items():
        blocks.append("\n".join([*filter(None, [title]), *_aligned(rows, 2 * bool(title))]) if rows else "")
    if entry.doc.example:
        blocks.append(f"example\n{textwrap.indent(entry.doc.example, '  ')}")
    return "\n\n".join(filter(None, blocks)) + "\n"


def entry_of(name: str) -> OpEntry:
    """Return the entry of an op or a loss.

    Raises:
        GraphError: there is none, or its file can't be read.
    """
    op = find(name)
    doc, word = op.docstring(), op.kind.word if op.kind else ""
    only = {p.name: f", only where {op.declared.when[p.name]} is true" for p in op.outputs if p.optional}
    outputs = () if word else op.outputs
    facts = [*(hook_facts(op, word) if word else op_facts(op)), ("source", ", ".join(doc.sources))]
    return OpEntry(
        name=name,
        doc=doc,
        reads=tuple((port.name, str(port.type), condition(op, port)) for port in op.inputs),
        writes=tuple((p.name or "(the node's name)", p.type + only.get(p.name, "")) for p in outputs),
        facts=tuple((title, text) for title, text in facts if text),
        attributes=tuple(attribute_rows(op)),
    )


def find(name: str) -> Op:
    """Return the declaration of a shipped op or loss, or of a function in a file (``my_ops.py:name``).

    Raises:
        GraphError: there is none, or its file can't be read.
    """
    if name in OPS:
        return load(OPS[name], name)
    for word, shipped in HOOKS.items():
        if name in shipped:
            return load(shipped[name], name, KINDS[word])
    place, colon, _ = name.rpartition(":")
    if not (colon and Path(place).suffix == ".py"):
        law, known = f"there is no op or loss `{name}`", [*itertools.chain(*GROUPS.values())]
        raise fail("unknown-op", law, None, known, nearest(name, known) or "or your own: my_ops.py:name")
    mark = Mark(Source("command line", name), 1, 1)
    try:
        op, _ = find_op(name, mark)
    except GraphError:
        for kind in (PairLoss, Loop, Parser, Tool):  # the first whose signature fits
            with suppress(GraphError):
                return find_hook(kind, name, mark)[0]
        raise
    # a loss reads what ``update.policy`` computes, the log-probs of now
    is_loss = {*Loss.provides} <= {port.name for port in op.inputs}
    return find_hook(Loss, name, mark)[0] if is_loss else op


def condition(op: Op, port: Port) -> str:
    """Return the condition under which an op reads a column; empty for always."""
    if port.name in op.declared.own:
        return "where a node of the same model writes it"
    if port.name in op.declared.when:
        return f"only where {op.declared.when[port.name]} is not 0"
    if op.kind and port.name in op.kind.provides:
        return "computed now by the op that trains"
    return "where a node writes it" if port.optional else ""


def op_facts(op: Op) -> list[tuple[str, str]]:
    """Return facts of an op: where it runs, the rows it needs to see, what it makes and what it assumes."""
    facts = [("runs", _engine(op)), ("sees", ROWS[op.declared.rows]), ("makes", _made(op))]
    if "tokenizer" in op.handles.values():
        facts.append(("tokenizer", "`tokenizer: MODEL`; by default that of the one trained language model"))
    return [*facts, ("assumes", _assumed(op))]


def hook_facts(op: Op, word: str) -> list[tuple[str, str]]:
    """Return facts of a loss or such: where it is named, what the policy gives a tool, what it assumes."""
    facts = [("runs", STANDS[word].replace("NAME", op.name)), ("assumes", _assumed(op))]
    if word == "tool":
        parameters = tool_schema(op.name, op.body)["function"]["parameters"]["properties"]
        facts += [(name, f"given by the policy: {in_words(schema)}") for name, schema in parameters.items()]
    return facts


def attribute_rows(op: Op) -> list[tuple[str, str, str, str]]:
    """Return name, type in words, default and description of each attribute."""
    said = op.docstring().attributes
    rows = []
    for name, schema in attribute_schemas(op).items():
        kind = _hook_in_words(op, name) if name in op.hooks else in_words(schema)
        default = default_of(schema, op.attributes.model_fields[name].is_required())
        rows.append((name, kind, default, said.get(name, "")))
    return rows


def _hook_in_words(op: Op, name: str) -> str:
    word, one = op.hooks[name].word, "{kind: NAME, ...}"
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{plural} by name: {{NAME: {one}}}" if name in op.several else f"a {word}: {one}"


def attribute_schemas(op: Op) -> dict[str, Any]:
    """Return the JSON schema of each attribute; a path has ``format: path``."""
    schemas: dict[str, Any] = op.attributes.model_json_schema().get("properties", {})
    for name, field in op.attributes.model_fields.items():
        if holds(PathMarker, field.annotation, *field.metadata):
            schema = schemas[name]
            for part in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
                part.update({"format": "path"} if part.get("type") == "string" else {})
    return schemas


def _engine(op: Op) -> str:
    head = op.declared.head
    if op.engine == "serve":
        return f"`model: NAME` generates, on its serve engine; needs head {head}; NAME@next: after its update"
    if op.copies:
        return "copies `of: NAME` onto `model: NAME`, which is frozen; writes its next version"
    if op.declared.updates:
        return f"trains `model: NAME`, on its train engine; needs head {head}; writes its next version"
    if op.engine == "train":
        return f"reads `model: NAME`, on its train engine; needs head {head}; NAME@next: after its update"
    if op.declared.recorded:
        return "on one device; its rows were sampled by `model: NAME`, at an earlier time"
    if op.declared.beside:
        return "beside the pool's devices, on CPUs, while they go on; without a model"
    return "on the pool's devices, without a model"


def _made(op: Op) -> str:
    makes, times = op.declared.makes, op.declared.times
    if op.declared.filters:
        return "a part of its rows: a node with `rows: THIS_NODE` reads those alone"
    if op.declared.holds:
        return (
            f"a new domain of {makes}: some of those that it has seen, with every column that is read of them"
        )
    if makes is None:
        return ""
    if op.source:
        return f"rows from nothing: a new domain of {makes}"
    if op.declared.counts:
        return f"a new domain of {makes}: for each row that it reads as many as `{op.declared.counts}` says"
    return f"a new domain of {makes}" + (f": `{times}` for each row that it reads" if times else "")


def _assumed(op: Op) -> str:
    sentences = []
    for name in op.declared.assumes:
        doc = inspect.getdoc(CALL_LAWS[name]) or name
        sentences.append(doc.partition("\n")[0])
    return " ".join(sentences)


def _aligned(rows: Sequence[Sequence[str]], indent: int) -> list[str]:
    """Return cells under one another, each wrapped; the last takes the rest of the width."""
    *widths, _ = (min(max(map(len, column)), CELL) for column in zip(*rows, strict=True))
    widths.append(WIDTH - indent - sum(widths) - 2 * len(widths))
    lines = []
    for row in rows:
        wrapped = map(functools.partial(textwrap.wrap, break_on_hyphens=False), row, widths)
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            text = "  ".join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            lines.append((" " * indent + text).rstrip())
    return lines
