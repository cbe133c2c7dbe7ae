"""Validation: turns a tree's values into strict records, or into problems in the graph's own terms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlgraph.errors import GraphError, Mark, Problem, nearest
from rlgraph.syntax.source import OPEN, Tree

Found = TypeVar("Found")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")
NODE_KEYS = ("op", "model", "tokenizer", "in", "out", "rows", "refill", "pool", "every", "from", "of")

StrictRecord = TypeVar("StrictRecord", bound=BaseModel)


@dataclass
class Binder:
    """Problems and results that binding collects on its way through a tree."""

    problems: list[Problem] = field(default_factory=list)
    open_values: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # models with a problem of their own
    strict: bool = True  # else attributes are not checked, and an op that is not found raises

    def attempt(self, find: Callable[..., Found], *arguments: Any) -> Found | None:
        """Return what a function finds, or None with the problems noted that it raises."""
        try:
            return find(*arguments)
        except GraphError as error:
            if not self.strict:
                raise
            self.problems += error.problems
            return None

    def kinds(self) -> set[str]:
        """Return the kinds of problems found so far."""
        return {problem.kind for problem in self.problems}

    def problem(
        self, kind: str, law: str, mark: Mark | None, accepted: Iterable[str] = (), remedy: str = ""
    ) -> None:
        self.problems.append(Problem(kind, law, mark, tuple(accepted), remedy))


def validate(
    section: type[BaseModel],
    tree: Tree,
    path: str,
    binder: Binder,
    what: str = "",
    keys: tuple[str, ...] = (),
) -> Any:
    """Return a tree as a strict record, or None with the problems noted. Values written ??? are passed over.

    Args:
        section: type of the record.
        tree: the values.
        path: the graph's name for the tree, as ``models.policy``.
        binder: where problems are noted.
        what: the name of the reader of the values, as ``op rollout``.
        keys: further keys that are accepted, for the message.
    """
    given = tree.plain()
    if not isinstance(given, dict):
        binder.problem("wrong-type", f"`{path}` is a mapping of attributes", tree.mark, section.model_fields)
        return None
    try:
        return section.model_validate(given)
    except ValidationError as error:
        found: dict[Mark, list[Any]] = {}
        for item in error.errors(include_url=False):
            place = tree.at(item["loc"])
            if place.value != OPEN or item["type"] == "extra_forbidden":
                found.setdefault(place.key or place.mark, []).append(item)
        for mark, items in found.items():
            binder.problems += _explain(items, mark, section, tree, path, what, keys)
        return None if found else _constructed(section, given)


def read_record(section: type[StrictRecord], tree: Tree, path: str) -> StrictRecord:
    """Return a tree as a strict record; arguments as those of ``validate``.

    Raises:
        GraphError: with every problem.
    """
    binder = Binder()
    found: StrictRecord | None = validate(section, tree, path, binder)
    if found is None or binder.problems:
        raise GraphError(binder.problems)
    return found


def _constructed(section: type[BaseModel], given: Mapping[str, Any]) -> Any:
    """Return a record with open values: defaults stand in for them where there are any."""
    values = {}
    for name, value in given.items():
        field = section.model_fields[name]
        inner = next((o for o in _options(field.annotation) if issubclass(o, BaseModel)), None)
        if inner and isinstance(value, dict):
            values[name] = _constructed(inner, value)
        elif value != OPEN or field.is_required():
            values[name] = value
    return section.model_construct(**values)


def _explain(
    items: list[Any],
    mark: Mark,
    section: type[BaseModel],
    tree: Tree,
    path: str,
    what: str,
    keys: tuple[str, ...],
) -> Iterable[Problem]:
    others = []
    for item in items:
        name = str(item["loc"][-1])
        if item["type"] == "extra_forbidden":
            known = [*_fields(section, item["loc"][:-1]), *keys]
            law = f"`{path}` has no attribute `{name}`" + (f" ({what})" if what else "")
            yield Problem("unknown-attribute", law, mark, tuple(known), nearest(name, known))
        elif item["type"] == "missing":
            inside = ".".join(map(str, (path, *item["loc"][:-1])))
            law = f"`{inside}` has no `{name}`" + (f", which {what} needs" if what else "")
            yield Problem("missing-attribute", law, mark, remedy=f"add `{name}: ...`")
        else:
            others.append(item)
    if others:
        place = tree.at(others[0]["loc"])
        where = ".".join(map(str, (path, *_known_part(tree, others[0]["loc"]))))
        wanted = " or ".join(dict.fromkeys(_wanted(item) for item in others))
        yield Problem("wrong-value", f"`{where}` {wanted}; it is {place.plain()!r}", place.mark)


def _wanted(item: Any) -> str:
    """Return pydantic's message in our words: ``must be at least 1; ...``."""
    message = re.sub(r"^(Input|Dictionary|List) should", "must", str(item["msg"]))
    message = re.sub(r" after validation, not \d+$", "", message)
    message = message.replace("a valid dictionary", "a mapping").replace("a valid integer", "a whole number")
    return message.replace("greater than or equal to", "at least").replace("a valid ", "a ")


def _known_part(tree: Tree, loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the part of pydantic's location that names something in the tree: it adds branches of unions."""
    known: list[Any] = []
    for part in loc:
        if tree.at((part,)) is tree:
            break
        tree = tree.at((part,))
        known.append(part)
    return tuple(known)


def _fields(section: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Return the names that may stand at a location inside a section."""
    for part in loc:
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        nested = [option for option in _options(annotation) if issubclass(option, BaseModel)]
        if not nested:
            return []
        section = nested[0]
    return [*section.model_fields]


def _options(annotation: Any) -> list[type]:
    """Return the classes of a union, or the one class."""
    return [o for o in getattr(annotation, "__args__", (annotation,)) if isinstance(o, type)]
