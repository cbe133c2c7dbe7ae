"""Validation: turns a tree's values into strict records, or into problems in the graph's own terms."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlgraph.errors import GraphError, Mark, Problem, nearest
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.yaml_text import flow
from rlgraph.variables import referred

Result = TypeVar("Result")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")
QUOTED = re.compile(r"'([^']+)'")
NODE_KEYS = (
    "op",
    "model",
    "tokenizer",
    "in",
    "out",
    "rows",
    "refill",
    "pool",
    "every",
    "from",
    "of",
    "state",
    "joins",
)

StrictRecord = TypeVar("StrictRecord", bound=BaseModel)


@dataclass
class Binder:
    """Problems and results that binding collects on its way through a tree."""

    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # models with a problem of their own
    removed: Mapping[str, Mark] = field(default_factory=dict)  # what edits took out of the graph -> where
    strict: bool = True  # else attributes are not checked, and an op that is not found raises

    def attempt(self, find: Callable[..., Result], *arguments: Any) -> Result | None:
        """Return what a function finds, or None with the problems noted that it raises."""
        try:
            return find(*arguments)
        except GraphError as error:
            if not self.strict:
                raise
            self.problems += error.problems
            return None

    def problem(
        self, kind: str, law: str, mark: Mark | None, accepted: Iterable[str] = (), remedy: str = ""
    ) -> None:
        self.problems.append(Problem(kind, law, mark, tuple(accepted), remedy))


def validate(
    section: type[BaseModel],
    tree: Tree,
    path: str,
    binder: Binder,
    reader: str = "",
    keys: tuple[str, ...] = (),
    elsewhere: Callable[[str], str] = lambda name: "",
) -> Any:
    """Return a tree as a strict record, or None with its problems noted. Values written ??? are not checked.

    Args:
        section: the type of the record.
        tree: the values.
        path: the graph's name for them, as ``models.policy``.
        binder: where problems are noted.
        reader: the name of the reader of the values, as ``op rollout``.
        keys: further keys that are accepted.
        elsewhere: says, for the message, what has a key that this record lacks.
    """
    values = tree.plain()
    if not isinstance(values, dict):
        binder.problem("wrong-type", f"`{path}` is a mapping of attributes", tree.mark, section.model_fields)
        return None
    try:
        return section.model_validate(values)
    except ValidationError as error:
        texts = _texts(error, tree)
        if texts is not tree:
            return validate(section, texts, path, binder, reader, keys, elsewhere)
        wrong: dict[Mark, list[Any]] = {}
        for item in error.errors(include_url=False):
            place = tree.at(item["loc"])
            is_open = place.value == OPEN and item["type"] != "extra_forbidden"
            if not is_open:
                wrong.setdefault(place.key or place.mark, []).append(item)
        for items in wrong.values():
            binder.problems += _explain(items, section, tree, path, reader, keys, elsewhere)
        return None if wrong else _constructed(section, values)


def read_record(section: type[StrictRecord], tree: Tree, path: str) -> StrictRecord:
    """Return a tree as a strict record. The arguments are those of ``validate``.

    Raises:
        GraphError: with every problem.
    """
    binder = Binder()
    record: StrictRecord | None = validate(section, tree, path, binder)
    if record is None or binder.problems:
        raise GraphError(binder.problems)
    return record


def _texts(error: ValidationError, tree: Tree) -> Tree:
    """Return a tree with references in place of numbers from the environment where a text is required."""
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "string_type" and tree.at(item["loc"]).reference:
            tree = tree.with_item(name, tree.items[name].written())
            referred(tree.items[name].plain())  # it may be a key
    return tree


def _constructed(section: type[BaseModel], values: Mapping[str, Any]) -> Any:
    """Return a record with open values, which have their defaults if there are any."""
    fields = {}
    for name, value in values.items():
        has_default = not section.model_fields[name].is_required()
        if value == OPEN and has_default:
            continue
        inner = _nested(section, name)
        if inner and isinstance(value, dict):
            value = _constructed(inner, value)
        fields[name] = value
    return section.model_construct(**fields)


def _explain(
    items: list[Any],
    section: type[BaseModel],
    tree: Tree,
    path: str,
    reader: str,
    keys: tuple[str, ...],
    elsewhere: Callable[[str], str],
) -> Iterable[Problem]:
    """Yield the problems of one place, from pydantic's errors there."""
    wrong_values = []
    place = tree.at(items[0]["loc"])
    mark = place.key or place.mark
    for item in items:
        name = str(item["loc"][-1])
        if item["type"] == "extra_forbidden":
            known = [*_fields(section, item["loc"][:-1]), *keys]
            law = f"`{path}` has no attribute `{name}`"
            if reader:
                law += f" ({reader})"
            remedy = nearest(name, known) or elsewhere(name)
            yield Problem("unknown-attribute", law, mark, tuple(known), remedy)
        elif name == "[key]":  # of a mapping whose keys are a Literal
            *outer, name, _ = map(str, item["loc"])
            known = QUOTED.findall(item["ctx"]["expected"])
            law = f"`{'.'.join((path, *outer))}` has no attribute `{name}`"
            yield Problem("unknown-attribute", law, mark, tuple(known), nearest(name, known))
        elif item["type"] == "missing":
            inside = ".".join(map(str, (path, *item["loc"][:-1])))
            law = f"`{inside}` has no `{name}`"
            if reader:
                law += f", which {reader} needs"
            yield Problem("missing-attribute", law, mark, remedy=f"add `{name}: ...`")
        else:
            wrong_values.append(item)
    if wrong_values:
        yield _wrong_value(wrong_values, tree, path)


def _wrong_value(items: list[Any], tree: Tree, path: str) -> Problem:
    """Return the problem with one value, from pydantic's errors about each type that it may have."""
    place = tree.at(items[0]["loc"])
    name = ".".join(map(str, (path, *_known_part(tree, items[0]["loc"]))))
    requirements = dict.fromkeys(_requirement(item) for item in items)
    wanted = " or ".join(requirements).replace("or must be", "or")
    value = place.written().plain()
    remedy = nearest(str(value), QUOTED.findall(wanted))
    may_be_list = any(item["type"] == "list_type" for item in items)
    if may_be_list and isinstance(value, str):
        remedy = f"as a list: {name}: {flow([value])}; for a shell, '{name}={flow([value])}'"
    return Problem("wrong-value", f"`{name}` {wanted}; it is {value!r}", place.mark, (), remedy)


def _requirement(item: Any) -> str:
    """Return pydantic's message in our words: ``must be at least 1; ...``."""
    message = re.sub(r"^Value error, ", "", str(item["msg"]))
    message = re.sub(r"^(Input|Dictionary|List|String) should", "must", message)
    message = re.sub(r" after validation, not \d+$", "", message)
    message = message.replace("a valid dictionary", "a mapping").replace("a valid integer", "a whole number")
    return message.replace("greater than or equal to", "at least").replace("a valid ", "a ")


def _known_part(tree: Tree, loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return pydantic's location without the branches of unions, which name nothing in the tree."""
    for depth, name in enumerate(loc):
        child = tree.at((name,))
        if child is tree:
            return loc[:depth]
        tree = child
    return loc


def _fields(section: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Return the names that may stand at a location inside a section."""
    for name in loc:
        inner = _nested(section, name)
        if inner is None:
            return []
        section = inner
    return [*section.model_fields]


def _nested(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the record in a field's type, which may be a union."""
    if name not in section.model_fields:
        return None
    annotation = section.model_fields[name].annotation
    options = getattr(annotation, "__args__", (annotation,))
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None
