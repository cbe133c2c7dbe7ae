"""The settings of a run elsewhere, by dotted keys: from a YAML file, and ``key=value`` as Hydra takes it."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.frontend.compose import setting
from rlgraph.importing.table import BELOW, KeyTable
from rlgraph.syntax.source import read, scalar

# ${a.b}, ${.b}, ${oc.select:a.b,1} and ${oc.env:NAME,1}, with no other inside
REFERENCE = re.compile(r"\$\{(?:oc\.(select|env):)?([\w.]+)(?:, *([^${}]*))?\}")
# a word of a mapping or list of Hydra's
HYDRA_WORD = re.compile(
    r"(?P<space>\s+)|(?P<mark>[{}\[\],:])|(?P<quoted>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<plain>(?:\\.|\$\{[^{}]*\}|:(?=//)|[^\\{}\[\],:'\"])+)"
)
LONGEST_TEXT = 10_000  # characters; what grows beyond stays as it is written
LONGEST_CHAIN = 100  # references, each to a key with the next


class Options:
    """What a user gave, with a framework's defaults behind it.

    ``values`` are given, by the table's spelling of their keys; ``spelled`` has the user's. Paths become
    relative to ``folder``, the graph's; those of settings are relative to the working directory.
    """

    def __init__(self, table: KeyTable, given: Mapping[str, Any], folder: Path = Path()) -> None:
        self.table, self.folder = table, folder
        self.values, self.spelled = dict[str, Any](), dict[str, str]()
        for key, value in given.items():
            self._add(table.renamed(key), key, value)
        self._resolutions = dict[str, Any]()
        self._copy_mappings()
        self.values = {key: self._of_key(key) for key in self.values}

    def __getitem__(self, key: str) -> Any:
        """Return what is given, or else the framework's default, which may be the value of another key."""
        value, row = self.values.get(key), self.table.rows.get(key)
        if row and (value is None or self.is_odd(key)):
            return self[row.follows] if row.follows else row.default
        return value

    def is_odd(self, key: str) -> bool:
        """Return whether a text is given where the framework has a number or a switch, as ``$((1024))``.

        So is what a launch script does not say, ``${shell:NAME}``, wherever it stands.
        """
        row, value = self.table.rows.get(key), self.values.get(key)
        if isinstance(value, str) and "${shell:" in value:
            return True
        if row is None or value in (row.texts or ()):  # texts that stand beside numbers
            return False
        return isinstance(value, str) and isinstance(row.default, int | float)

    def is_on(self, key: str) -> bool:
        """Return whether a switch is on: true, or a number above 0."""
        value = self[key]
        return value > 0 if isinstance(value, int | float) else bool(value)

    def path(self, path: str) -> str:
        """Return a path as the graph has it; names on the hub, URLs and absolute paths stay."""
        full = os.path.expandvars(os.path.expanduser(path))
        if "://" in full or os.path.isabs(full) or not os.path.exists(full):
            return full
        return os.path.relpath(full, self.folder)

    def below(self, key: str) -> dict[str, Any]:
        """Return what is given below a key that ends with ``.*``, as nested mappings."""
        out: dict[str, Any] = {}
        row, above = self.table.rows[key], key.removesuffix(BELOW)
        for name, value in self.values.items():
            if self.table.row(name) is not row or not name.startswith(above):
                continue
            if below := name[len(above) :].strip("."):
                put_in(out, below, value)
        return out

    def _add(self, key: str, spelled: str, value: Any) -> None:
        """Add a value; of two spellings of a key, the one that is not the default counts."""
        row = self.table.row(key)
        idle = value is None or (row is not None and value == row.default)
        if key not in self.values or not idle:
            self.values[key], self.spelled[key] = value, spelled

    def _copy_mappings(self) -> None:
        """Give a key that stands for a mapping, as ``a: ${b}``, the values below that: ``a.c`` for ``b.c``.

        Of a mapping that is renamed to the key itself the values are there already.
        """
        for key, value in [*self.values.items()]:
            if not isinstance(value, str) or not (match := REFERENCE.fullmatch(value)) or match[1] == "env":
                continue
            path = self._path_of(key, match[2])
            below = [name for name in self.values if name.startswith(f"{path}.")]
            if (path in self.values and path != key) or not below:
                continue
            del self.values[key]
            for name in below:
                copy = f"{key}{name.removeprefix(path)}"
                if copy not in self.values:
                    self.values[copy], self.spelled[copy] = self.values[name], copy

    def _of_key(self, key: str, above: tuple[str, ...] = ()) -> Any:
        """Return the value of a key with its references filled in.

        A key that refers to itself, at once or by way of others, stays as it is written, as do keys that
        refer to it; so does what ``LONGEST_TEXT`` and ``LONGEST_CHAIN`` leave no room for.
        """
        if key not in self._resolutions:
            self._resolutions[key] = self._resolved(key, self.values[key], above)
        return self._resolutions[key]

    def _resolved(self, key: str, value: Any, above: tuple[str, ...]) -> Any:
        """Return a value with its references filled in, as far as they are known."""
        if isinstance(value, list):
            return [self._resolved(key, item, above) for item in value]
        while isinstance(value, str) and (match := REFERENCE.search(value)):
            found = self._named(key, match, above)
            text = "null" if found is None else str(found)
            if found is ... or REFERENCE.search(text) or len(text) > LONGEST_TEXT:
                break
            value = found if match[0] == value else value.replace(match[0], text)
        return value

    def _named(self, key: str, match: re.Match[str], above: tuple[str, ...]) -> Any:
        """Return what a reference names, or ... where that is not known."""
        how, path, otherwise = match.groups()
        if how == "env":
            return os.environ.get(path, otherwise if otherwise is not None else ...)
        path = self._path_of(key, path)
        if path in self.values:
            is_cycle = path in (*above, key)
            return ... if is_cycle or len(above) >= LONGEST_CHAIN else self._of_key(path, (*above, key))
        row = self.table.rows.get(path)
        if row is not None and "default" in row.says:
            return row.default
        return scalar(otherwise) if otherwise is not None else ...

    def _path_of(self, key: str, path: str) -> str:
        """Return the key, in the table's spelling, that a reference in the value of a key names."""
        return self.table.renamed(f"{key.rpartition('.')[0]}{path}" if path.startswith(".") else path)


def put_in(mapping: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested mappings at a dotted path."""
    *above, last = path.split(".")
    for part in above:
        mapping = mapping.setdefault(part, {})
    mapping[last] = value


def read_settings(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings by dotted keys, of a YAML file and of ``key=value``, ``+key=value`` and ``~key``.

    Raises:
        GraphError: the file or a value is no YAML.
    """
    given = dict(flattened(read(file).plain())) if file else {}
    for override in overrides:
        if override.startswith("~"):
            given = without(given, override)
            continue
        name, equals, text = override.lstrip("+").partition("=")
        if equals and text.lstrip()[:1] in ("{", "["):
            value = hydra_value(text)
            if value is not ...:
                given |= flattened(value, name.strip())
                continue
        name, tree = setting(override.lstrip("+"))
        given |= flattened(tree.plain(), name)
    return given


def without(given: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return settings without the key that ``~key`` takes out, and without what is below it.

    Example:
        >>> without({"a.b": 1, "ab": 2}, "~a")
        {'ab': 2}
    """
    name = override[1:].partition("=")[0]
    return {key: value for key, value in given.items() if not f"{key}.".startswith(f"{name}.")}


def hydra_value(text: str) -> Any:
    """Return a mapping or a list as Hydra's own grammar writes it, or ... where it is none.

    It is close to YAML, but a colon needs no space behind it and ``\\`` takes a bracket as it is.

    Example:
        >>> hydra_value("{a:1,b:[x,'y z']}")
        {'a': 1, 'b': ['x', 'y z']}
    """
    words = [match for match in HYDRA_WORD.finditer(text) if not match["space"]]
    place = 0

    def value() -> Any:
        nonlocal place
        match = words[place]
        place += 1
        if match["mark"] == "{":
            return dict(items("}", pair))
        if match["mark"] == "[":
            return list(items("]", value))
        return word(match)

    def pair() -> tuple[str, Any]:
        nonlocal place
        key = word(words[place])
        if words[place + 1]["mark"] != ":":
            raise ValueError
        place += 2
        return str(key), value()

    def items(end: str, item: Callable[[], Any]) -> Iterator[Any]:
        nonlocal place
        while words[place]["mark"] != end:
            yield item()
            if words[place]["mark"] == ",":
                place += 1
            elif words[place]["mark"] != end:
                raise ValueError
        place += 1

    def word(match: re.Match[str]) -> Any:
        if match["mark"]:
            raise ValueError
        if match["quoted"]:
            return re.sub(r"\\(['\"])", r"\1", match["quoted"][1:-1])
        is_escaped = "\\" in match["plain"]
        plain = re.sub(r"\\(.)", r"\1", match["plain"]).strip()
        return plain if is_escaped else scalar(plain)

    try:
        read_value = value()
    except (ValueError, IndexError):
        return ...
    return read_value if place == len(words) else ...


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted keys.

    Example:
        >>> dict(flattened({"a": {"b": 1, "c": {}}}))
        {'a.b': 1, 'a.c': {}}
    """
    if isinstance(value, Mapping) and (value or not path):
        for name, child in value.items():
            yield from flattened(child, f"{path}.{name}" if path else str(name))
    else:
        yield path, value
