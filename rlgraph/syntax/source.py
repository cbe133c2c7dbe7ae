"""Strict YAML: text becomes a tree in which every value knows its place, and a tree becomes text.

PyYAML composes the nodes; scalars are resolved here by the core schema of YAML 1.2, because PyYAML's own
rules read ``1e-6`` as a string, ``on`` as true and keep the last of two equal keys.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlgraph.errors import COMMAND_LINE, EDIT, GraphError, Mark, Problem, Source, fail
from rlgraph.records import dataclass

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INT = re.compile(r"[-+]?[0-9]+$")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
WORDS: dict[str, Any] = {
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}
OPEN = "???"  # a value that only the user can give
NOWHERE = Mark(Source(EDIT, ""), 1, 1)  # the mark of values that no file has
# PyYAML takes a ? inside {} for a complex key, though YAML 1.2 allows it: these stand in, of the same width
STAND_IN = "\ue000\ue000\ue000"
# what PyYAML gives to values without a tag
TAGS = ("str", "int", "float", "bool", "null", "timestamp", "value", "map", "seq", "merge")
MAX_DEPTH = 100  # of values in one another
MAX_SIZE = 200_000  # values of a graph
MAX_BYTES = 2**25  # of a file


@dataclass(frozen=True)
class Tree:
    """A scalar, a mapping or a list, with its place and, in a mapping, the place of its key."""

    value: Any  # a scalar, dict[str, Tree] or list[Tree]
    mark: Mark
    key: Mark | None = None
    reference: str = ""  # of a number from the environment: the ``${env:NAME}`` that it stands for
    removed: Mapping[str, Mark] = field(default_factory=dict)  # of a graph: what edits take out -> where

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, int | float) and not isinstance(self.value, bool)

    @property
    def is_count(self) -> bool:
        """Return whether it is a whole number, 1 or more."""
        return self.is_number and isinstance(self.value, int) and self.value >= 1

    @property
    def items(self) -> dict[str, Tree]:
        """Return the mapping; empty if this is not one."""
        return self.value if isinstance(self.value, dict) else {}

    def get(self, name: str) -> Tree | None:
        return self.items.get(name)

    @staticmethod
    def of(value: Any) -> Tree:
        """Return a plain value as a tree that has no place in any file."""
        if isinstance(value, Mapping):
            return Tree({str(name): Tree.of(child) for name, child in value.items()}, NOWHERE)
        if isinstance(value, list):
            return Tree([Tree.of(child) for child in value], NOWHERE)
        return Tree(value, NOWHERE)

    def plain(self) -> Any:
        """Return the tree as ordinary dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def written(self) -> Tree:
        """Return the tree as files have it: with references to the environment in place of its numbers."""
        return self.mapped(Tree._with_reference)

    def _with_reference(self) -> Tree:
        return replace(self, value=self.reference) if self.reference else self

    def mapped(self, change: Callable[[Tree], Tree]) -> Tree:
        """Return the tree with each scalar changed."""
        if isinstance(self.value, dict):
            items = {name: child.mapped(change) for name, child in self.value.items()}
            is_same = all(map(operator.is_, items.values(), self.value.values()))
            return self if is_same else replace(self, value=items)
        if isinstance(self.value, list):
            return replace(self, value=[child.mapped(change) for child in self.value])
        return change(self)

    def with_item(self, name: str, child: Tree | None) -> Tree:
        """Return the tree with one item of the mapping set, in its old place if it had one, or taken out."""
        items = self.items.copy()
        if child is None:
            items.pop(name, None)
        else:
            items[name] = child
        return replace(self, value=items)

    def walk(self, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Tree]]:
        """Yield this tree and every tree below, with the path to it."""
        yield path, self
        children = enumerate(self.value) if isinstance(self.value, list) else self.items.items()
        for name, child in children:
            yield from child.walk((*path, name))

    def find(self, path: tuple[str, ...]) -> Tree | None:
        """Return what is at a path of names, or None."""
        tree = self
        for name in path:
            child = tree.get(name)
            if child is None:
                return None
            tree = child
        return tree

    def at(self, path: tuple[Any, ...]) -> Tree:
        """Return the deepest tree along a path that is there."""
        tree = self
        for name in path:
            value = tree.value
            if isinstance(value, list):
                is_inside = isinstance(name, int) and name < len(value)
            else:
                is_inside = isinstance(value, dict) and name in value
            if not is_inside:
                break
            tree = value[name]
        return tree


def read(path: Path) -> Tree:
    """Load a YAML file.

    Raises:
        GraphError: it is not there, can't be read, is too large, is not YAML, or is not a mapping.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise fail("too-large", f"{path}: has {size:,} bytes; a graph has {MAX_BYTES:,} at most", None)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise fail("no-file", f"{path}: can't be read: {error.strerror}", None) from error
    except UnicodeDecodeError as error:
        raise fail("not-text", f"{path}: is not UTF-8 text (byte {error.start})", None) from error
    tree = parse(Source(str(path), text))
    if not tree.is_map:
        raise fail("not-a-mapping", "a graph is a mapping with `graph`, `models`, `nodes`", tree.mark)
    return tree


# checking reads a graph again to look for warnings, and parents are read by each child
@lru_cache(maxsize=64)
def parse(source: Source, start: int = 0) -> Tree:
    """Parse text into a tree; text before ``start`` is passed over. The same text gives the same tree.

    Raises:
        GraphError: the text is not YAML, has an alias that contains itself, or duplicate keys (all of them).
    """
    text = " " * start + source.text[start:].replace(OPEN, STAND_IN)
    try:
        _check_size(text, source)
        root = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = _place_of(error, source, start)
        law = f"this is not YAML: {error.problem}"
        raise fail("not-yaml", law, mark, remedy=_mended(source, mark)) from error
    except yaml.reader.ReaderError as error:
        lines = text[: error.position].split("\n")
        mark = Mark(source, len(lines), len(lines[-1]) + 1)
        raise fail("not-yaml", f"this is not YAML: {error.reason}", mark) from error
    if root is None:
        raise fail("empty", "nothing but white space and comments", Mark(source, 1, 1))
    reader = Reader(source)
    tree = reader.tree(root, frozenset())
    if reader.problems:
        raise GraphError(reader.problems)
    return tree


def _place_of(error: yaml.MarkedYAMLError, source: Source, start: int) -> Mark:
    """Return the place of an error; a value that never ends has its at the start of the value."""
    mark = _mark(error.problem_mark or error.context_mark, source)
    if error.context_mark and not source.line(mark.line).strip():
        mark = _mark(error.context_mark, source)
    if mark.line > source.text.count("\n") + 1:
        return Mark(source, 1, start + 1)
    return mark


def _mended(source: Source, mark: Mark) -> str:
    """Return how a line may become YAML."""
    line = source.line(mark.line)
    if "\t" in line:
        return "indent with spaces, not tabs"
    if re.search(r"[\[{,:] *\$\{", line):
        return 'in a list or a mapping a text with ${...} is quoted: ["${env:DATA}/train.jsonl"]'
    if source.name != COMMAND_LINE:
        return ""
    is_cut = line.count("[") > line.count("]") or line.count("{") > line.count("}")
    if is_cut:
        return f"quote it for the shell, which cuts it at blanks: '{source.text.strip()} ...'"
    return ""


def _check_size(text: str, source: Source) -> None:
    """Refuse nesting so deep that composing would overflow the C stack, and texts with too many values."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=LOADER)):
        if count > 3 * MAX_SIZE:  # a value in a mapping is two events, a mapping two of its own
            law = f"the text up to here makes more than {MAX_SIZE} values"
            raise fail("too-large", law, _mark(event.start_mark, source))
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            law = f"the value is nested over {MAX_DEPTH} deep"
            raise fail("too-deep", law, _mark(event.start_mark, source))


@dataclasses.dataclass
class Reader:
    """Turns composed YAML into trees, noting every problem on the way.

    Invariants:
        - ``size`` counts the values so far, those of an alias each time that it is used;
        - a problem is noted, and reading goes on; only a text that is too large ends it.
    """

    source: Source
    problems: list[Problem] = field(default_factory=list)
    size: int = 0

    def problem(self, kind: str, law: str, mark: Mark, remedy: str = "") -> None:
        self.problems.append(Problem(kind, law, mark, remedy=remedy))

    def tree(self, node: Any, above: frozenset[int], key: Mark | None = None) -> Tree:
        mark = _mark(node.start_mark, self.source)
        self.size += 1
        if self.size > MAX_SIZE:
            raise fail("too-large", f"the aliases up to here make more than {MAX_SIZE} values", mark)
        if id(node) in above:
            self.problem("self-alias", "the value contains itself, through an alias", mark)
            return Tree(None, mark, key)
        if node.tag.removeprefix("tag:yaml.org,2002:") not in TAGS:
            self.problem("tag", f"the tag `{node.tag}` has no meaning here", mark, "remove it")
        if isinstance(node, yaml.ScalarNode):
            return Tree(self.scalar(node, mark), mark, key)
        above = above | {id(node)}
        if isinstance(node, yaml.SequenceNode):
            children = [self.tree(child, above) for child in node.value]
            return Tree(children, mark, key)
        return Tree(self.items(node, above), mark, key)

    def items(self, node: Any, above: frozenset[int]) -> dict[str, Tree]:
        items: dict[str, Tree] = {}
        for key, child in node.value:
            mark = _mark(key.start_mark, self.source)
            if not isinstance(key, yaml.ScalarNode):
                self.problem("bad-key", "a key is a plain word", mark)
                continue
            name = str(key.value).replace(STAND_IN, OPEN)
            is_quoted = bool(key.style)
            if name == "<<" and not is_quoted:
                remedy = "write the values out, or change another graph with `extends` and `edits`"
                self.problem("merge-key", "`<<` merges nothing: YAML 1.2 has no merge keys", mark, remedy)
                continue
            if name in items:
                law = f"duplicate key `{name}`: it stands at {items[name].key} already"
                self.problem("duplicate-key", law, mark, "remove one of the two")
                continue
            items[name] = self.tree(child, above, mark)
        return items

    def scalar(self, node: Any, mark: Mark) -> Any:
        text = node.value.replace(STAND_IN, OPEN)
        is_quoted = node.style in ("'", '"', "|", ">")
        value = text if is_quoted else scalar(text)
        if isinstance(value, float) and not math.isfinite(value):
            self.problem("not-finite", f"`{text}` is not a finite number", mark)
        return value


def _mark(place: Any, source: Source) -> Mark:
    return Mark(source, place.line + 1, place.column + 1)


def scalar(text: str) -> Any:
    """Return a plain scalar's value.

    Example:
        >>> [scalar(text) for text in ("1e-6", "on", "007", "true", "-3", "a b", "~")]
        [1e-06, 'on', 7, True, -3, 'a b', None]
    """
    if text in WORDS:
        return WORDS[text]
    if INT.match(text) and len(text) < 400:  # a longer one is infinite as a float, and refused as such
        return int(text)
    if FLOAT.match(text):
        return float(text)
    return text
