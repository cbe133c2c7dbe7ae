"""YAML that inherits: ``defaults: parent.yaml``, values that name others, and ``key=value`` on top."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.options import REFERENCE, flattened, read_settings, without
from rlgraph.syntax.source import scalar

OVERRIDE = "_override_"  # in a section: it takes the place of the parent's
# ${mul:2, 3} and the like, once what is inside is known
ARITHMETIC = re.compile(r"\$\{(add|mul|div|max|min): *([^${},]+), *([^${},]+)\}")
RELATIVE = re.compile(r"\$\{(\.+)([\w.]+)\}")
MOST_STEPS = 100  # references behind each other, and parents


class Loader(yaml.SafeLoader):
    """YAML 1.1 with its merge keys, but numbers such as 1e-6 as OmegaConf reads them, and no dates."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":timestamp", ":float"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$|[-+]?(\d[\d_]*\.\d*|\.\d+)$|[-+]?\.inf$|\.nan$"),
    [*"-+0123456789."],
)


def read_inherited(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings by dotted keys, of a file with what it inherits, and of ``key=value``.

    References are filled in behind the overrides, as far as they are known.

    Raises:
        GraphError: a file can't be read, is not there, or inherits itself.
    """
    given = dict(flattened(_merged(file, ()))) if file else {}
    for override in overrides:
        if override.startswith("~"):
            given = without(given, override)
            continue
        for key, value in read_settings(None, [override]).items():
            given = {other: old for other, old in given.items() if not other.startswith(f"{key}.")}
            given[key] = value
    return resolved(given)


def _merged(file: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return a file's content over that of its parents, the last of which counts most."""
    place = file.resolve()
    if place in above or len(above) > MOST_STEPS:
        law = f"{file}: its `defaults` lead back to it"
        chain = " -> ".join(path.name for path in (*above, place))
        raise GraphError([Problem("cycle", law, None, (), f"take one of them out: {chain}")])
    content = _content(file, above)
    parents = content.pop("defaults", None) or []
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if not isinstance(parent, str):
            law = f"{file}: `defaults` has {parent!r}, which is no file"
            remedy = "name files, relative to this one: defaults: parent.yaml"
            raise GraphError([Problem("no-file", law, None, (), remedy)])
        merged = _over(merged, _merged(file.parent / parent, (*above, place)))
    return _over(merged, content)


def _content(file: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        named = f", which {above[-1]} inherits" if above else ""
        law = f"there is no file {file}{named}: {error.strerror}"
        remedy = (
            "`defaults` are relative to the file that has them: put the parent there, or import the file "
        )
        remedy += "where its checkout has it"
        raise GraphError([Problem("no-file", law, None, (), remedy)]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GraphError([Problem("yaml", f"{file} is no YAML: {error}", None, (), "")]) from error
    if not isinstance(content, dict):
        law = f"{file} is no mapping of settings"
        raise GraphError([Problem("yaml", law, None, (), "give the YAML file that the trainer takes")])
    return content


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings as one; lists and values of the second take the place of the first's."""
    merged = dict(below)
    for key, value in above.items():
        if key == OVERRIDE:
            continue
        if not isinstance(value, Mapping):
            merged[key] = value
            continue
        under = merged.get(key)
        replaces = value.get(OVERRIDE, False) or not isinstance(under, Mapping)
        merged[key] = _over({} if replaces or not isinstance(under, Mapping) else under, value)
    return merged


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with references filled in, ``${.a}``, ``${..a}``, ``${a.b}`` and ``${mul:2, ${a}}``.

    One that leads back to itself, or names what is not known, stays as it is written.

    Example:
        >>> resolved({"a.b": 3, "a.c": "${.b}", "d": "${mul:${a.b}, 2}"})
        {'a.b': 3, 'a.c': 3, 'd': 6}
    """
    known = dict(given)
    for key, value in [*_copies(known)]:
        known.setdefault(key, value)
    return {key: _filled(key, value, known) for key, value in known.items()}


def _copies(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what is below a key whose value names a section: ``a: ${b}`` for ``a.c`` where ``b.c`` is."""
    for key, value in given.items():
        if isinstance(value, str) and (match := REFERENCE.fullmatch(_absolute(key, value))):
            below = f"{match[2]}."
            for name in given:
                if name.startswith(below) and match[2] not in given:
                    yield f"{key}.{name.removeprefix(below)}", given[name]


def _filled(key: str, value: Any, given: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(key, item, given) for item in value]
    if isinstance(value, dict):
        return {name: _filled(key, item, given) for name, item in value.items()}
    for _ in range(MOST_STEPS):
        if not isinstance(value, str) or "${" not in value:
            return value
        now = _step(key, value, given)
        if now == value:
            return given[key] if "${" + key + "}" in value else value
        value = now
    return given[key]


def _step(key: str, text: str, given: Mapping[str, Any]) -> Any:
    """Return a text with one reference, or one sum, filled in."""
    text = _absolute(key, text)
    for match in REFERENCE.finditer(text):
        if match[1] == "env" or match[2] not in given or match[2] == key:
            continue
        value = given[match[2]]
        if isinstance(value, str):
            value = _absolute(match[2], value)
        if match[0] == text:
            return value
        if not isinstance(value, list | dict):
            return text.replace(match[0], "null" if value is None else str(value))
    if sum_ := ARITHMETIC.search(text):
        value = _computed(sum_[1], scalar(sum_[2].strip()), scalar(sum_[3].strip()))
        if value is not None:
            return value if sum_[0] == text else text.replace(sum_[0], str(value))
    return text


def _computed(name: str, one: Any, other: Any) -> Any:
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return None
    if name == "div":
        return one / other if other else None
    return {"add": one + other, "mul": one * other, "max": max(one, other), "min": min(one, other)}[name]


def _absolute(key: str, text: str) -> str:
    """Return a text whose references count from the top: one dot is the key's own section."""

    def named(match: re.Match[str]) -> str:
        parts = key.split(".")
        above = parts[: max(len(parts) - len(match[1]), 0)]
        return "${" + ".".join([*above, match[2]]) + "}"

    return RELATIVE.sub(named, text)
