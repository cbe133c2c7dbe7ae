"""Names of ops and hooks -> their declarations.

Shipped ones stand in the literal dicts of ``rlgraph.nodes``; ``my_ops.py:name`` is a function in a user's
file. Only what a graph names is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlgraph.errors import Mark, fail, nearest
from rlgraph.nodes import LOSSES, OPS
from rlgraph.op import Op, OpError, signature


def known_ops() -> list[str]:
    """Names of the shipped ops."""
    return [*OPS]


def find_op(name: str, mark: Mark) -> tuple[Op, str]:
    """An op by the name that a graph uses, and the target that a worker loads it by.

    Raises:
        GraphError: no such op, its file can't be loaded, or its signature can't be an op's.
    """
    return _find(name, "op", OPS, mark)


def find_loss(name: str, mark: Mark) -> tuple[Op, str]:
    """A loss, likewise."""
    return _find(name, "loss", LOSSES, mark)


@functools.cache
def load(target: str, name: str = "") -> Op:
    """``package.module:function`` or ``/path/file.py:function`` -> its declaration, named as in the graph."""
    place, _, function = target.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    return signature(name or target, getattr(module, function))


def _find(name: str, what: str, known: dict[str, str], mark: Mark) -> tuple[Op, str]:
    if name in known:
        return load(known[name], name), known[name]
    place, colon, function = name.rpartition(":")
    if not (colon and place.endswith(".py")):
        law = f"there is no {what} `{name}`"
        raise fail(
            f"unknown-{what}",
            law,
            mark,
            known,
            nearest(name, known) or f"or your own: {what}: my_ops.py:name",
        )
    path = Path(mark.source.name).parent / place
    if not os.path.isfile(path):
        raise fail("no-file", f"{what} `{name}`: there is no file {path}", mark)
    target = f"{path.resolve()}:{function}"
    try:
        module = _load_file(str(path.resolve()))
        op = load(target, name) if hasattr(module, function) else None
    except Exception as error:  # the file is the user's: loading it may raise anything
        raise fail("bad-op", f"{what} `{name}`: {_said(error, name, path.resolve())}", mark) from error
    if op is None:
        ops = [name for name, value in vars(module).items() if hasattr(value, "__op__")]
        law = f"{place} has no function `{function}`"
        raise fail(f"unknown-{what}", law, mark, ops, nearest(function, ops))
    _declared_well(op, mark)
    return op, target


def _said(error: Exception, name: str, path: Path) -> str:
    """What went wrong in a user's file, with its line where there is one."""
    if isinstance(error, OpError | SyntaxError):
        return str(error).removeprefix(f"op {name}: ")
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" ({path.name}, line {lines[-1]})" if lines else "")


def _declared_well(op: Op, mark: Mark) -> None:
    """What ``@op`` names must stand in the signature."""
    ports, attributes = {port.name for port in op.inputs}, op.attributes.model_fields
    declared = op.declared
    named: list[tuple[str, str, Collection[str]]] = []
    named += [("times", declared.times, attributes)] if declared.times else []
    named += [("when", port, ports) for port in declared.when]
    named += [("when", attribute, attributes) for attribute in declared.when.values()]
    for word, name, known in named:
        if name not in known:
            law = f"op `{op.name}`: its `{word}` names `{name}`, which is not in its signature"
            raise fail("bad-op", law, mark, known, nearest(name, known))


@functools.cache
def _load_file(path: str) -> Any:
    # a name of its own, so that two users' files called ops.py are two modules
    name = "rlgraph_user_" + path.strip("/").replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
