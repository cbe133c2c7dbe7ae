"""Reads YAML that inherits: ``defaults: parent.yaml``, references to values, and ``key=value`` on top."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.options import REFERENCE, flattened, read_settings, without
from rlgraph.syntax.source import scalar

OVERRIDE = "_override_"  # a key in a section that replaces the parent's section
# ${mul:2, 3} and the like, once the values inside are known
ARITHMETIC = re.compile(r"\$\{(add|mul|div|max|min): *([^${},]+), *([^${},]+)\}")
FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
}
RELATIVE = re.compile(r"\$\{(\.+)([\w.]+)\}")
MOST_STEPS = 100  # in a chain of references, or of parents


class Loader(yaml.SafeLoader):
    """YAML 1.1 with its merge keys, but numbers such as 1e-6 as OmegaConf reads them, and no dates."""


def _without_dates_and_floats(resolvers: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]


# a table of its own, as the one of SafeLoader is everybody's
Loader.yaml_implicit_resolvers = {}
for initial, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    Loader.yaml_implicit_resolvers[initial] = _without_dates_and_floats(resolvers)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$|[-+]?(\d[\d_]*\.\d*|\.\d+)$|[-+]?\.inf$|\.nan$"),
    [*"-+0123456789."],
)


def read_inherited(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a file and its parents by dotted keys, with ``key=value`` on top.

    References are filled in after the overrides, as far as they are known.

    Raises:
        GraphError: a file can't be read, does not exist, or inherits itself.
    """
    settings: dict[str, Any] = {}
    if file is not None:
        settings.update(flattened(_merged(file, ())))
    for override in overrides:
        if override.startswith("~"):
            settings = without(settings, override)
            continue
        for key, value in read_settings(None, [override]).items():
            # a value in the place of a section takes away what was below it
            below_key = [name for name in settings if name.startswith(f"{key}.")]
            for name in below_key:
                del settings[name]
            settings[key] = value
    return resolved(settings)


def _merged(file: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    """Return a file's content merged over that of its parents, of which a later one overrides an earlier one.

    ``heirs`` are the files that led here by their ``defaults``.
    """
    place = file.resolve()
    if place in heirs or len(heirs) > MOST_STEPS:
        law = f"{file}: its `defaults` lead back to it"
        chain = " -> ".join(path.name for path in (*heirs, place))
        raise GraphError([Problem("cycle", law, remedy=f"remove one of them: {chain}")])
    content = _content(file, heirs)
    parents = content.pop("defaults", None)
    merged: dict[str, Any] = {}
    for parent in _parent_names(file, parents):
        merged = _over(merged, _merged(file.parent / parent, (*heirs, place)))
    return _over(merged, content)


def _parent_names(file: Path, parents: Any) -> Iterator[str]:
    """Yield the files that ``defaults`` names: one, several, or none."""
    if not parents:
        return
    if isinstance(parents, str):
        parents = [parents]
    for parent in parents:
        if not isinstance(parent, str):
            law = f"{file}: `defaults` has {parent!r}, which is not a file"
            remedy = "name files, relative to this one: defaults: parent.yaml"
            raise GraphError([Problem("no-file", law, remedy=remedy)])
        yield parent


def _content(file: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        inherited_by = f", which {heirs[-1]} inherits" if heirs else ""
        law = f"there is no file {file}{inherited_by}: {error.strerror}"
        remedy = "`defaults` are relative to the file that has them: put the parent there, or import the "
        remedy += "file from its place in the checkout"
        raise GraphError([Problem("no-file", law, remedy=remedy)]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GraphError([Problem("yaml", f"{file} is not YAML: {error}", remedy="")]) from error
    if not isinstance(content, dict):
        law = f"{file} is not a mapping of settings"
        raise GraphError([Problem("yaml", law, remedy="give the YAML file that the trainer takes")])
    return content


def _over(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings merged; lists and other values of ``child`` replace those of ``parent``."""
    merged = dict(parent)
    for key, value in child.items():
        if key == OVERRIDE:
            continue
        if isinstance(value, Mapping):
            merged[key] = _section_over(merged.get(key), value)
        else:
            merged[key] = value
    return merged


def _section_over(parent: Any, section: Mapping[str, Any]) -> dict[str, Any]:
    is_replaced = section.get(OVERRIDE, False)
    if is_replaced or not isinstance(parent, Mapping):
        return _over({}, section)
    return _over(parent, section)


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with references filled in, ``${.a}``, ``${..a}``, ``${a.b}`` and ``${mul:2, ${a}}``.

    A reference that leads back to itself, or to a key that is not known, stays as it is written.

    Example:
        >>> resolved({"a.b": 3, "a.c": "${.b}", "d": "${mul:${a.b}, 2}"})
        {'a.b': 3, 'a.c': 3, 'd': 6}
    """
    known = dict(settings)
    for key, value in [*_copies(known)]:
        known.setdefault(key, value)
    return {key: _filled(key, value, known) for key, value in known.items()}


def _copies(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of sections that are copied: with ``a: ${b}`` there is ``a.c`` for each ``b.c``."""
    for key, value in settings.items():
        if not isinstance(value, str):
            continue
        match = REFERENCE.fullmatch(_absolute(key, value))
        if match is None or match[2] in settings:
            continue
        section = f"{match[2]}."
        for name in settings:
            if name.startswith(section):
                yield f"{key}.{name.removeprefix(section)}", settings[name]


def _filled(key: str, value: Any, settings: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(key, item, settings) for item in value]
    if isinstance(value, dict):
        return {name: _filled(key, item, settings) for name, item in value.items()}
    for _ in range(MOST_STEPS):
        has_reference = isinstance(value, str) and "${" in value
        if not has_reference:
            return value
        next_value = _step(key, value, settings)
        if next_value == value:
            leads_back = "${" + key + "}" in value
            return settings[key] if leads_back else value
        value = next_value
    return settings[key]


def _step(key: str, text: str, settings: Mapping[str, Any]) -> Any:
    """Return a text with one reference, or one computation, filled in."""
    text = _absolute(key, text)
    for match in REFERENCE.finditer(text):
        function, referred, _ = match.groups()
        if function == "env" or referred not in settings:
            continue
        if referred == key:  # it can't be filled in by itself
            continue
        value = settings[referred]
        if isinstance(value, str):
            value = _absolute(referred, value)
        if match[0] == text:
            return value
        if isinstance(value, list | dict):  # it can't stand inside a text
            continue
        replacement = "null" if value is None else str(value)
        return text.replace(match[0], replacement)
    return _computation_filled(text)


def _computation_filled(text: str) -> Any:
    """Return a text with its first computation, as ``${mul:2, 3}``, replaced by the result."""
    computation = ARITHMETIC.search(text)
    if computation is None:
        return text
    function, a, b = computation.groups()
    result = _computed(function, scalar(a.strip()), scalar(b.strip()))
    if result is None:
        return text
    if computation[0] == text:
        return result
    return text.replace(computation[0], str(result))


def _computed(function: str, a: Any, b: Any) -> Any:
    """Return the result of a function of two numbers; None without numbers, or for a division by 0."""
    are_numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if not are_numbers:
        return None
    if function == "div" and b == 0:
        return None
    return FUNCTIONS[function](a, b)


def _absolute(key: str, text: str) -> str:
    """Return a text with relative references made absolute: one dot stands for the key's own section."""

    def absolute(match: re.Match[str]) -> str:
        names = key.split(".")
        section = names[: max(len(names) - len(match[1]), 0)]
        return "${" + ".".join([*section, match[2]]) + "}"

    return RELATIVE.sub(absolute, text)
