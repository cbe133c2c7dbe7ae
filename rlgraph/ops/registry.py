"""Names of ops and hooks -> their declarations.

Shipped ones stand in the literal dicts of ``rlgraph.nodes``; ``my_ops.py:name`` is a function in a user's
file. Only what a graph names is imported.
"""

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlgraph.errors import Mark, fail, nearest
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.declare import Hook, Op, OpError
from rlgraph.ops.signature import signature

USER = "rlgraph_user_"  # how the names of modules of users' files begin
_runs_code = True


@contextmanager
def without_code() -> Iterator[None]:
    """Refuse users' files in this block, on all threads: loading one runs it."""
    global _runs_code
    before, _runs_code = _runs_code, False
    try:
        yield
    finally:
        _runs_code = before


def find_op(name: str, mark: Mark) -> tuple[Op, str]:
    """Return an op by the name that a graph uses, and the target that a worker loads it by.

    Raises:
        GraphError: no such op, its file can't be loaded, or its signature can't be an op's.
    """
    return _find(name, "op", OPS, mark)


def find_hook(kind: type[Hook], name: str, mark: Mark) -> tuple[Op, str]:
    """Return a function that an attribute names, likewise: a loss, an agent loop, a tool, a parser."""
    return _find(name, kind.word, HOOKS[kind.word], mark, kind)


def find_function(name: str, what: str, mark: Mark) -> str:
    """Return the target of a plain function in a user's file, with no declaration: ``my_buffer.py:name``.

    Raises:
        GraphError: there is no such file or function, or the file can't be loaded.
    """
    place, _, function = name.rpartition(":")
    path = (Path(mark.source.name).parent / place).resolve()
    if not place.endswith(".py") or not path.is_file():
        law = f"{what} `{name}` names no function in a file" + (f": there is no {path}" if place else "")
        raise fail("no-file", law, mark, remedy=f"as my_{what}.py:name, relative to the graph")
    _check_code(what, name, mark)
    try:
        module = _load_file(str(path))
    except Exception as error:  # the file is the user's: loading it may raise anything
        raise fail("bad-op", f"{what} `{name}`: {_said(error, name, path)}", mark) from error
    known = [name for name, value in vars(module).items() if callable(value)]
    if function not in known:
        law = f"{place} has no function `{function}`"
        raise fail(f"unknown-{what}", law, mark, known, nearest(function, known))
    return f"{path}:{function}"


def load_function(target: str) -> Any:
    """Return what ``find_function`` found."""
    place, _, function = target.rpartition(":")
    return getattr(_load_file(place), function)


@functools.cache
def load(target: str, name: str = "", kind: Any = None) -> Op:
    """Return the declaration of ``package.module:function`` or ``/path/file.py:function``, under a name.

    ``kind`` is the class of a hook, such as ``Loss``.
    """
    place, _, function = target.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    return signature(name or target, getattr(module, function), kind)


def _find(name: str, what: str, known: dict[str, str], mark: Mark, kind: Any = None) -> tuple[Op, str]:
    if name in known:
        return load(known[name], name, kind), known[name]
    place, colon, function = name.rpartition(":")
    if not (colon and place.endswith(".py")):
        remedy = nearest(name, known) or f"or your own: {what}: my_ops.py:name"
        raise fail(f"unknown-{what}", f"there is no {what} `{name}`", mark, known, remedy)
    path = _resolved(os.path.abspath(os.path.join(os.path.dirname(mark.source.name), place)))
    if not os.path.isfile(path):
        folder, file = os.path.split(path)
        law = f"{what} `{name}`: there is no file {file} in {folder}"
        raise fail("no-file", law, mark, remedy="paths are relative to the file that they stand in")
    _check_code(what, name, mark)
    target = f"{path}:{function}"
    try:
        module = _load_file(path)
        op = load(target, name, kind) if hasattr(module, function) else None
    except Exception as error:  # the file is the user's: loading it may raise anything
        raise fail("bad-op", f"{what} `{name}`: {_said(error, name, Path(path))}", mark) from error
    if op is None:
        ops = [name for name, value in vars(module).items() if _offered(name, value, kind)]
        law = f"{place} has no function `{function}`"
        raise fail(f"unknown-{what}", law, mark, ops, nearest(function, ops))
    _declared_well(op, mark)
    return op, target


@functools.cache  # thousands of nodes may name one file
def _resolved(path: str) -> str:
    return os.path.realpath(path)


def _check_code(what: str, name: str, mark: Mark) -> None:
    if not _runs_code:
        law = f"{what} `{name}` is in a Python file, which --no-code does not load: that would run it"
        raise fail("no-code", law, mark, remedy="read the file, then leave out --no-code")


def _said(error: Exception, name: str, path: Path) -> str:
    """Return what went wrong in a user's file, with its line where there is one."""
    if isinstance(error, OpError):
        return str(error).removeprefix(f"op {name}: ")
    if isinstance(error, SyntaxError):
        return f"{error}: {(error.text or '').strip()}".removesuffix(": ")
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" ({path.name}, line {lines[-1]})" if lines else "")


def _offered(name: str, value: Any, kind: type[Hook] | None) -> bool:
    """Return whether a file's value may be meant: what is marked as an op, or a tool of the file itself."""
    if kind is None or kind.writes:
        return hasattr(value, "__op__")
    own = str(getattr(value, "__module__", "")).startswith(USER)
    return callable(value) and own and not name.startswith("_")


def _declared_well(op: Op, mark: Mark) -> None:
    """Check that what ``@op`` names stands in the signature."""
    ports, attributes, declared = [port.name for port in op.inputs], op.attributes.model_fields, op.declared
    named: tuple[tuple[str, Iterable[str], Collection[str]], ...] = (
        ("times", filter(None, [declared.times]), attributes),
        ("leaves_with", filter(None, [declared.leaves_with]), attributes),
        ("when", declared.when, [*ports, *attributes]),
        ("when", declared.when.values(), attributes),
        ("measures", declared.measures, attributes),
        ("roles", declared.roles.values(), attributes),
    )
    if declared.state == "keeps" and declared.rows != "all":
        law = f"op `{op.name}` keeps a state, and may see some of the rows"
        raise fail("bad-op", law, mark, remedy='declare it @op(state="keeps", rows="all")')
    for word, names, known in named:
        for name in names:
            if name not in known:
                law = f"op `{op.name}`: its `{word}` names `{name}`, which is not in its signature"
                raise fail("bad-op", law, mark, known, nearest(name, known))


@functools.cache
def _load_file(path: str) -> Any:
    # a name of its own, so that two users' files called ops.py are two modules
    name = USER + path.strip("/").replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
