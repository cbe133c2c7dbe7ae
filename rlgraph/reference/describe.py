"""Descriptions of ops and losses from their declarations: for the terminal, the reference and the schema."""

import inspect
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.errors import COMMAND_LINE, GraphError, Mark, Source, fail, nearest
from rlgraph.laws.nodes import CALL_LAWS
from rlgraph.nodes import HOOKS, LOSSES, OPS
from rlgraph.ops.column_types import PathMarker, holds
from rlgraph.ops.declare import Loop, Loss, Op, PairLoss, Parser, Port
from rlgraph.ops.docstring import Docstring
from rlgraph.ops.registry import find_hook, find_op, load
from rlgraph.ops.tools import Tool, tool_schema
from rlgraph.reference.words import default_of, in_words

ROWS = {
    "each": "any subset of the rows, independently",
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
WIDTH = 110  # characters per line
CELL = 26  # characters of the widest cell, except in the last column


@dataclass(frozen=True)
class OpEntry:
    """An op, a loss, or another function that graphs name, in words."""

    name: str
    doc: Docstring
    reads: tuple[tuple[str, str, str], ...]  # column, type, condition
    writes: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]  # pairs such as ("model", "...")
    attributes: tuple[tuple[str, str, str, str], ...]  # name, type, default, description


def catalog_text() -> str:
    """Return every shipped op, loss, agent loop, tool and parser with its summary, in groups."""
    width = max(len(name) for names in GROUPS.values() for name in names)
    lines = []
    for title, names in GROUPS.items():
        lines.append(f"{title}:")
        for name in names:
            lines.append(f"  {name:<{width}}  {entry_of(name).doc.summary}")
    return "\n".join([*lines, "", "`rlgraph nodes NAME` describes one; NAME may be my_ops.py:name.", ""])


def describe(name: str) -> str:
    """Describe a shipped op or loss, or a function in a file, as text.

    Raises:
        GraphError: there is none, or its file can't be read.
    """
    entry = entry_of(name)
    summary = textwrap.fill(entry.doc.summary, WIDTH, initial_indent="  ", subsequent_indent="  ")
    blocks = [
        f"{entry.name}\n{summary}",
        textwrap.indent(entry.doc.body, "  "),
        _table("reads", entry.reads),
        _table("writes", entry.writes),
        "\n".join(_aligned(entry.facts, indent=0)),
        _table("attributes", entry.attributes),
    ]
    if entry.doc.example:
        blocks.append(f"example\n{textwrap.indent(entry.doc.example, '  ')}")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return rows below a title; empty if there are none."""
    if not rows:
        return ""
    return "\n".join([title, *_aligned(rows, indent=2)])


def entry_of(name: str) -> OpEntry:
    """Return the entry of an op or a loss.

    Raises:
        GraphError: there is none, or its file can't be read.
    """
    op = find(name)
    doc = op.docstring()
    facts = hook_facts(op, op.kind.word) if op.kind else op_facts(op)
    facts.append(("source", ", ".join(doc.sources)))
    return OpEntry(
        name=name,
        doc=doc,
        reads=tuple((port.name, str(port.type), condition(op, port)) for port in op.inputs),
        writes=tuple(_written(op)),
        facts=tuple((title, text) for title, text in facts if text),
        attributes=tuple(attribute_rows(op)),
    )


def _written(op: Op) -> Iterator[tuple[str, str]]:
    """Yield name and type of each column that an op writes; those of a hook are not columns."""
    if op.kind:
        return
    for port in op.outputs:
        kind = str(port.type)
        if port.optional:
            kind += f", only where {op.declared.when[port.name]} is true"
        yield port.name or "(the node's name)", kind


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
    file, colon, _ = name.rpartition(":")
    if not colon or Path(file).suffix != ".py":
        law = f"there is no op or loss `{name}`"
        known = [*itertools.chain(*GROUPS.values())]
        raise fail("unknown-op", law, None, known, nearest(name, known) or "or your own: my_ops.py:name")
    return _find_in_file(name)


def _find_in_file(name: str) -> Op:
    """Return the declaration of a function in a file, which may be an op or a hook of any kind."""
    mark = Mark(Source(COMMAND_LINE, name), 1, 1)
    try:
        op, _ = find_op(name, mark)
    except GraphError as error:
        kinds: list[Any] = [PairLoss, Loop, Parser]
        function = getattr(error.__cause__, "function", None)
        if not hasattr(
            function, "__op__"
        ):  # any function may be a tool; one that is declared as an op is not
            kinds.append(Tool)
        for kind in kinds:  # the first kind whose signature fits
            with suppress(GraphError):
                hook, _ = find_hook(kind, name, mark)
                return hook
        raise
    # a loss reads the log-probs that ``update.policy`` computes, which no node writes
    is_loss = {*Loss.provides} <= {port.name for port in op.inputs}
    if is_loss:
        loss, _ = find_hook(Loss, name, mark)
        return loss
    return op


def condition(op: Op, port: Port) -> str:
    """Return the condition under which an op reads a column; empty for always."""
    if port.name in op.declared.own:
        return "where a node of the same model writes it"
    if port.name in op.declared.when:
        return f"only where {op.declared.when[port.name]} is not 0"
    if op.kind and port.name in op.kind.provides:
        return "computed by the op that trains"
    return "where a node writes it" if port.optional else ""


def op_facts(op: Op) -> list[tuple[str, str]]:
    """Return facts of an op: where it runs, the rows it needs to see, what it makes and what it assumes."""
    facts = [("runs", _engine(op)), ("sees", ROWS[op.declared.rows]), ("makes", _new_rows(op))]
    if "tokenizer" in op.handles.values():
        facts.append(("tokenizer", "`tokenizer: MODEL`; by default that of the one trained language model"))
    facts.append(("assumes", _assumptions(op)))
    return facts


def hook_facts(op: Op, word: str) -> list[tuple[str, str]]:
    """Return facts of a loss, a tool or another hook: where graphs name it, and what it assumes.

    For a tool they also say what the policy passes to it.
    """
    facts = [("runs", STANDS[word].replace("NAME", op.name)), ("assumes", _assumptions(op))]
    if word == "tool":
        parameters = tool_schema(op.name, op.body)["function"]["parameters"]["properties"]
        for name, schema in parameters.items():
            facts.append((name, f"chosen by the policy: {in_words(schema)}"))
    return facts


def attribute_rows(op: Op) -> list[tuple[str, str, str, str]]:
    """Return name, type in words, default and description of each attribute."""
    descriptions = op.docstring().attributes
    rows = []
    for name, schema in attribute_schemas(op).items():
        kind = _hook_in_words(op, name) if name in op.hooks else in_words(schema)
        default = default_of(schema, op.attributes.model_fields[name].is_required())
        rows.append((name, kind, default, descriptions.get(name, "")))
    return rows


def _hook_in_words(op: Op, name: str) -> str:
    word = op.hooks[name].word
    if name not in op.several:
        return f"a {word}: {{kind: NAME, ...}}"
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{plural} by name: {{NAME: {{kind: NAME, ...}}}}"


def attribute_schemas(op: Op) -> dict[str, Any]:
    """Return the JSON schema of each attribute; a path has ``format: path``."""
    schemas: dict[str, Any] = op.attributes.model_json_schema().get("properties", {})
    for name, field in op.attributes.model_fields.items():
        if holds(PathMarker, field.annotation, *field.metadata):
            schema = schemas[name]
            for option in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
                if option.get("type") == "string":
                    option["format"] = "path"
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
        return "on one device; its rows were sampled earlier by `model: NAME`"
    if op.declared.beside:
        return "on CPUs, while the pool's devices go on; without a model"
    return "on the pool's devices, without a model"


def _new_rows(op: Op) -> str:
    """Return which rows an op makes that were not there before; empty if it makes none."""
    domain, times = op.declared.makes, op.declared.times
    if op.declared.filters:
        return "a subset of its rows: a node with `rows: THIS_NODE` reads only these"
    if op.declared.holds:
        rows = "some of the rows that it has seen, with every column of them that is read"
        return f"a new domain of {domain}: {rows}"
    if domain is None:
        return ""
    if op.source:
        return f"new rows: a new domain of {domain}"
    if op.declared.counts:
        return f"a new domain of {domain}: for each row that it reads, as many as `{op.declared.counts}` says"
    if times:
        return f"a new domain of {domain}: `{times}` for each row that it reads"
    return f"a new domain of {domain}"


def _assumptions(op: Op) -> str:
    sentences = []
    for name in op.declared.assumes:
        doc = inspect.getdoc(CALL_LAWS[name]) or name
        sentences.append(doc.partition("\n")[0])
    return " ".join(sentences)


def _aligned(rows: Sequence[Sequence[str]], indent: int) -> list[str]:
    """Return cells below one another, each wrapped; the last column takes the rest of the width."""
    if not rows:
        return []
    *widths, _ = [min(max(map(len, column)), CELL) for column in zip(*rows, strict=True)]
    widths.append(WIDTH - indent - sum(widths) - 2 * len(widths))
    lines = []
    for row in rows:
        cells = []
        for text, width in zip(row, widths, strict=True):
            cells.append(textwrap.wrap(text, width, break_on_hyphens=False))
        for texts in itertools.zip_longest(*cells, fillvalue=""):
            padded = [f"{text:<{width}}" for text, width in zip(texts, widths, strict=True)]
            lines.append((" " * indent + "  ".join(padded)).rstrip())
    return lines
