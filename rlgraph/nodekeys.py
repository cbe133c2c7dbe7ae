"""What nodes say beside their attributes: when they run, whose weights they copy, what they have recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlgraph.cadence import ALWAYS, Cadence, Cadences
from rlgraph.errors import nearest
from rlgraph.graph import Model
from rlgraph.op import Op, Port
from rlgraph.source import OPEN, Tree
from rlgraph.types import ColumnType
from rlgraph.validate import Binder

KEYS = ("every", "from")


def cadence(name: str, tree: Tree, op: Op, binder: Binder) -> Cadences:
    """In which iterations a node runs; what writes columns says nothing: it runs when they are read."""
    numbers: dict[str, int] = {}
    for key in KEYS:
        item = tree.get(key)
        if item is None or item.value == OPEN:
            continue
        if op.outputs:
            law = f"node `{name}` runs in the iterations in which what it writes is read"
            binder.problem("cadence", law, item.key, remedy=f"give `{key}` to the update that it leads to")
        elif not isinstance(item.value, int) or isinstance(item.value, bool) or item.value < 1:
            law = f"`{name}.{key}` is a number of iterations, 1 or more; it is {item.plain()!r}"
            binder.problem("wrong-value", law, item.mark)
        else:
            numbers[key] = item.value
    every = numbers.get("every", 1)
    found = Cadence(numbers.get("from", every), every)
    return () if found == ALWAYS else (found,)


def with_columns(name: str, op: Op, attributes: Mapping[str, Any], tree: Tree, binder: Binder) -> Op:
    """An op of recorded rows with the columns that its attribute names beside its own."""
    if not op.declared.recorded:
        return op
    own, ports = {port.name for port in op.outputs}, []
    for column, text in (attributes.get("columns") or {}).items():
        mark = tree.at(("columns", column)).mark
        try:
            ports.append(Port(column, ColumnType.parse(text)))
        except ValueError as error:
            binder.problem("wrong-value", f"`{name}.columns.{column}`: {error}", mark)
        if column in own:
            law = f"`{name}.columns` names `{column}`, which op {op.name} writes anyway"
            binder.problem("two-writers", law, mark, remedy=f"remove {name}.columns.{column}")
    return replace(op, outputs=(*op.outputs, *(port for port in ports if port.name not in own)))


def copied(
    name: str, tree: Tree, op: Op, onto: Model | None, models: Mapping[str, Model], binder: Binder
) -> tuple[str | None, bool]:
    """The model whose weights a node copies onto its own, and whether it is the version after the update."""
    item = tree.get("of")
    if item and not op.copies:
        law = f"op {op.name} copies no weights"
        binder.problem("of-unused", law, item.key, remedy="remove `of`")
    if not op.copies or onto is None or (item and item.value == OPEN):
        return None, False
    model, _, at = str(item.value if item else "").partition("@")
    mark = (item.mark if item else tree.key) or tree.mark
    if model in binder.broken:
        return None, False
    if model not in models or at not in ("", "next"):
        law = f"there is no model `{item.plain()}`" if item else f"node `{name}` does not say whose weights"
        binder.problem("unknown-model", law, mark, models, nearest(model, models) or "add `of: MODEL`")
        return None, False
    found = models[model]
    if found is onto:
        law = f"node `{name}` copies `{model}` onto itself"
        binder.problem("copy-onto-itself", law, mark, remedy="name the model whose weights it is to have")
    if not onto.spec.frozen:
        law = f"node `{name}` copies onto model `{onto.name}`, which is trained"
        binder.problem("copy-onto-trained", law, tree.items["model"].mark, remedy="copy onto a frozen one")
    if found.spec.head != onto.spec.head:
        law = f"node `{name}` copies `{model}`, which has head {found.spec.head}, onto `{onto.name}`, "
        law += f"which has {onto.spec.head}"
        binder.problem("wrong-head", law, mark, remedy=f"give models.{onto.name} `head: {found.spec.head}`")
    return model, at == "next"
