"""Names of ops and hooks -> their declarations.

Shipped ones stand in the literal dicts of ``rlgraph.nodes``; ``my_ops.py:name`` is a function in a user's
file. Only what a graph names is imported.
"""

import ast
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Mark, Problem, fail, few_of, nearest
from rlgraph.nodes import HOOKS, OPS
from rlgraph.ops.declare import Hook, Op
from rlgraph.ops.op_error import OpError
from rlgraph.ops.signature import signature
from rlgraph.ops.source_places import place_in_file, place_of_function

SHIPPED_NAMES = {target: name for name, target in OPS.items()}
USER = "rlgraph_user_"  # how the names of modules of users' files begin
_runs_code = True


@contextmanager
def without_code() -> Iterator[None]:
    """Refuse users' files in this block, on all threads: loading one runs it."""
    global _runs_code
    could_run = _runs_code
    _runs_code = False
    try:
        yield
    finally:
        _runs_code = could_run


def find_op(name: str, mark: Mark) -> tuple[Op, str]:
    """Return an op by the name that a graph uses, and the target that a worker loads it by.

    Raises:
        GraphError: no such op, its file can't be loaded, or its signature can't be an op's.
    """
    return _find(name, "op", OPS, mark)


def find_hook(kind: type[Hook], name: str, mark: Mark) -> tuple[Op, str]:
    """Return a function that an attribute names, likewise: a loss, an agent loop, a tool, a parser."""
    return _find(name, kind.word, HOOKS[kind.word], mark, kind)


def find_function(name: str, noun: str, mark: Mark) -> str:
    """Return the target of a plain function, with no declaration.

    It is named ``my_buffer.py:name``, in a file beside the graph, or ``package.module:name``, in a module
    that can be imported. Errors call it a ``noun``.

    Raises:
        GraphError: there is no such file, module or function, or it can't be loaded.
    """
    place, _, function = name.rpartition(":")
    path = (mark.source.base / place).resolve()
    in_file = place.endswith(".py")
    place_exists = path.is_file() if in_file else _is_module_name(place)
    if not place_exists:
        law = f"{noun} `{name}` names no function in a file"
        if place:
            law += f": there is no {path}"
        remedy = f"as my_{noun}.py:name, relative to the graph, or package.module:name of what is installed"
        raise fail("no-file", law, mark, remedy=remedy)
    _check_code(noun, name, mark, "file" if in_file else "module")
    target = f"{path}:{function}" if in_file else name
    try:
        module = load_module(target)
        value = getattr(module, function, None)
    except Exception as error:  # the code is the user's: loading it may raise anything
        is_beside_graph = path.with_name(f"{path.name}.py").is_file()
        if is_beside_graph and not in_file:
            remedy = f"a file beside the graph is named {place}.py:{function}"
        else:
            remedy = absent_module(error, path.parent)
        raise _loading_error(error, noun, name, path, mark, remedy) from error
    if not callable(value):
        known = [name for name, member in vars(module).items() if callable(member)]
        law = f"{place} has no function `{function}`"
        raise fail(f"unknown-{noun}", law, mark, known, nearest(function, known))
    return target


def load_function(target: str) -> Any:
    """Return what ``find_function`` found."""
    return getattr(load_module(target), target.rpartition(":")[2])


def load_module(target: str) -> Any:
    """Return the module of ``package.module:function`` or ``/path/file.py:function``."""
    place = target.rpartition(":")[0]
    return _load_file(place) if place.endswith(".py") else importlib.import_module(place)


def absent_module(error: BaseException, folder: Path | None = None) -> str:
    """Return what to do about an import of what is not there; nothing where an error is another.

    Args:
        error: what loading or calling a user's code raised.
        folder: that of the user's file.

    Example:
        >>> absent_module(ModuleNotFoundError("No module named 'no_such'", name="no_such.part"))
        'install what has the module `no_such` (often: pip install no_such) on each machine of the run'
        >>> absent_module(ValueError("no"))
        ''
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    top = error.name.partition(".")[0]
    if folder and ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
        return f"`{top}` lies beside the file: add its folder to PYTHONPATH"
    if importlib.util.find_spec(top) is not None:
        return f"the package `{top}` that is installed has no `{error.name}`: install a release that has it"
    return f"install what has the module `{top}` (often: pip install {top}) on each machine of the run"


@functools.cache
def load(target: str, name: str = "", kind: Any = None) -> Op:
    """Return the declaration of ``package.module:function`` or ``/path/file.py:function``, under a name.

    ``kind`` is the class of a hook, such as ``Loss``. A shipped op has its own name unless another is given.
    """
    if not name and target in SHIPPED_NAMES:
        return load(target, SHIPPED_NAMES[target], kind)  # so that its signature is read once
    return signature(name or target, load_function(target), kind)


def _find(name: str, noun: str, known: dict[str, str], mark: Mark, kind: Any = None) -> tuple[Op, str]:
    if name in known:
        return load(known[name], name, kind), known[name]
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        remedy = nearest(name, known) or f"or your own: {noun}: my_ops.py:name"
        few = few_of(name, known, "rlgraph nodes")
        raise fail(f"unknown-{noun}", f"there is no {noun} `{name}`", mark, known, remedy, few)
    path = _real_path(os.path.abspath(os.path.join(mark.source.base, place)))
    if not os.path.isfile(path):
        folder, file = os.path.split(path)
        law = f"{noun} `{name}`: there is no file {file} in {folder}"
        raise fail("no-file", law, mark, remedy="paths are relative to the file that they stand in")
    _check_code(noun, name, mark)
    target = f"{path}:{function}"
    try:
        module = _load_file(path)
        op = load(target, name, kind) if hasattr(module, function) else None
    except Exception as error:  # the file is the user's: loading it may raise anything
        remedy = absent_module(error, Path(path).parent)
        raise _loading_error(error, noun, name, Path(path), mark, remedy) from error
    if op is None:
        ops = [name for name, value in vars(module).items() if _is_candidate(name, value, kind)]
        law = f"{place} has no function `{function}`"
        raise fail(f"unknown-{noun}", law, mark, ops, nearest(function, ops))
    return op, target


@functools.cache  # thousands of nodes may name one file
def _real_path(path: str) -> str:
    return os.path.realpath(path)


def _check_code(noun: str, name: str, mark: Mark, kind: str = "file") -> None:
    if not _runs_code:
        law = f"{noun} `{name}` is in a Python {kind}, which --no-code does not load: that would run it"
        raise fail("no-code", law, mark, remedy=f"read the {kind}, then leave out --no-code")


def _is_module_name(place: str) -> bool:
    return all(name.isidentifier() for name in place.split("."))


def _loading_error(error: Exception, noun: str, name: str, path: Path, mark: Mark, remedy: str) -> GraphError:
    """Return what went wrong in a user's file, at its line in this file where there is one.

    Args:
        error: what loading the file, or reading the function's declaration, raised.
        noun: what the graph names: op, loss, ...
        name: by what the graph names it, as my_ops.py:name.
        path: the user's file.
        mark: the place in the graph.
        remedy: what to do, where the error does not say it.
    """
    accepted: tuple[str, ...] = ()
    is_refused_on_load = False
    place = _line_of_error(error, path)
    if isinstance(error, OpError):
        text = error.law.removeprefix(f"op {name}: ")
        accepted, remedy = error.accepted, error.remedy
        place = place_of_function(error.function, error.argument) or place
        function_name = getattr(error.function, "__name__", "")
        is_refused_on_load = bool(function_name) and not error.law.startswith("op ")
        if is_refused_on_load:  # whichever of the file's functions the graph names
            noun, name = "op", f"{path.name}:{function_name}"
    elif isinstance(error, SyntaxError):
        text = f"SyntaxError: {error.msg}"
        if place and error.filename != place[0]:
            text += f" ({error.filename}, line {error.lineno})"
    else:
        text = f"{type(error).__name__}: {error}"
    law = f"{noun} `{name}`: {text}"
    code_mark = place_in_file(*place) if place else None
    if code_mark is None:
        return fail("bad-op", law, mark, accepted, remedy)
    is_in_file = mark.source.name != "command line"
    graph_place = f"named in {mark}" if is_in_file and not is_refused_on_load else ""
    return GraphError([Problem("bad-op", law, code_mark, accepted, remedy, graph_place)])


def _line_of_error(error: Exception, path: Path) -> tuple[str, int, int] | None:
    """Return the file, line and column of an error in a user's file; None where no line of it took part."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno:
        return str(path), error.lineno, max(error.offset or 1, 1)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path) and frame.lineno]
    return (str(path), lines[-1], 1) if lines else None


def _is_candidate(name: str, value: Any, kind: type[Hook] | None) -> bool:
    """Return whether a file's value may be meant: what is marked as an op, or a tool of the file itself."""
    is_op = kind is None or kind.writes
    if is_op:
        return hasattr(value, "__op__")
    if name.startswith("_") or not callable(value):
        return False
    module = str(getattr(value, "__module__", ""))
    return module.startswith(USER)


@functools.cache
def _load_file(path: str) -> Any:
    """Return the module of a file.

    A file of a package that is installed is imported by its own name there, by which processes that it starts
    find it, too. Any other file is a module of its own, or, where it has relative imports, of its package.
    """
    file = Path(path)
    packages = _packages_around(file)
    if packages and _is_installed(packages[0]):
        return importlib.import_module(".".join(_module_names(file, packages)))
    if packages and _has_relative_imports(file):
        return _load_in_package(file, packages)
    return _executed(_private_name(file), file)


def _packages_around(path: Path) -> list[Path]:
    """Return the folders of the package that a file is in, the outermost first; none where it is in none."""
    packages = list[Path]()
    for folder in path.parents:
        is_package = (folder / "__init__.py").is_file() and folder.name.isidentifier()
        if not is_package:
            break
        packages.insert(0, folder)
    return packages


def _module_names(path: Path, packages: list[Path]) -> list[str]:
    """Return the names in a dotted path to a file's module; the module of a package has the package's."""
    names = [folder.name for folder in packages]
    return names if path.name == "__init__.py" else [*names, path.stem]


def _is_installed(package: Path) -> bool:
    """Return whether importing a package by its name gives the one in this folder."""
    try:
        spec = importlib.util.find_spec(package.name)
    except (ImportError, ValueError):  # a module of this name has no spec
        return False
    if spec is None or spec.origin is None:
        return False
    return os.path.realpath(spec.origin) == os.path.realpath(package / "__init__.py")


def _has_relative_imports(path: Path) -> bool:
    tree = ast.parse(path.read_bytes(), str(path))
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


def _load_in_package(path: Path, packages: list[Path]) -> Any:
    """Return the module of a file as a member of its package, whose outermost name is one of ours."""
    outermost = packages[0] / "__init__.py"
    private_name = _private_name(outermost)
    if private_name not in sys.modules:
        _executed(private_name, outermost, [str(packages[0])])
    _, *inner_names = _module_names(path, packages)
    return importlib.import_module(".".join([private_name, *inner_names]))


def _private_name(path: Path) -> str:
    """Return a module name of a user's file alone, so that two files called ops.py are two modules."""
    return USER + str(path).strip("/").replace("/", "_").removesuffix(".py")


def _executed(name: str, path: Path, search: list[str] | None = None) -> Any:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
