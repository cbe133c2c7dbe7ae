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
    """The options that a user gave, with a framework's defaults behind them.

    Invariants:

    - ``values`` are those that the user gave, by the table's spelling of their keys; ``spelled`` has the
      user's. Both have the same keys.
    - References in ``values`` are filled in; one that is left is not known, or leads back to itself.
    - Paths become relative to ``folder``, the graph's; those of settings are relative to the working
      directory.
    """

    def __init__(self, table: KeyTable, settings: Mapping[str, Any], folder: Path = Path()) -> None:
        self.table = table
        self.folder = folder
        self.values: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        for key, value in settings.items():
            self._add(table.renamed(key), key, value)
        self._resolutions: dict[str, Any] = {}
        self._copy_mappings()
        self.values = {key: self._of_key(key) for key in self.values}

    def __getitem__(self, key: str) -> Any:
        """Return the user's value, or else the framework's default, which may be the value of another key."""
        value = self.values.get(key)
        row = self.table.rows.get(key)
        if row is None:
            return value
        if value is not None and not self.is_odd(key):
            return value
        if row.follows:
            return self[row.follows]
        return row.default

    def is_odd(self, key: str) -> bool:
        """Return whether a text is given where the framework has a number or a switch, as ``$((1024))``.

        So is what a launch script does not say, ``${shell:NAME}``, wherever it stands.
        """
        value = self.values.get(key)
        if not isinstance(value, str):
            return False
        if "${shell:" in value:
            return True
        row = self.table.rows.get(key)
        if row is None or not isinstance(row.default, int | float):
            return False
        accepted_texts = row.texts or ()  # beside numbers
        return value not in accepted_texts

    def is_on(self, key: str) -> bool:
        """Return whether a switch is on: true, or a number above 0."""
        value = self[key]
        if isinstance(value, int | float):
            return value > 0
        return bool(value)

    def path(self, path: str) -> str:
        """Return a path as the graph has it; names on the hub, URLs and absolute paths stay."""
        full = os.path.expandvars(os.path.expanduser(path))
        if "://" in full or os.path.isabs(full):
            return full
        if not os.path.exists(full):  # as a model on the hub
            return full
        return os.path.relpath(full, self.folder)

    def nested(self, key: str) -> dict[str, Any]:
        """Return the values under a key that ends with ``.*``, as nested mappings."""
        mapping: dict[str, Any] = {}
        row = self.table.rows[key]
        prefix = key.removesuffix(BELOW)
        for name, value in self.values.items():
            has_this_row = self.table.row(name) is row
            if not has_this_row or not name.startswith(prefix):
                continue
            path = name[len(prefix) :].strip(".")
            if path:
                put_in(mapping, path, value)
        return mapping

    def _add(self, key: str, spelled: str, value: Any) -> None:
        """Add a value; of two spellings of a key, the one that is not the default counts."""
        if key in self.values:
            row = self.table.row(key)
            is_default = row is not None and value == row.default
            if value is None or is_default:
                return
        self.values[key] = value
        self.spelled[key] = spelled

    def _copy_mappings(self) -> None:
        """Give a key that stands for a mapping, as ``a: ${b}``, the values under that: ``a.c`` for ``b.c``.

        The values of a mapping that is renamed to the key itself are there already.
        """
        for key, value in [*self.values.items()]:
            path = self._referred_key(key, value)
            if not path:
                continue
            names = [name for name in self.values if name.startswith(f"{path}.")]
            is_single_value = path in self.values and path != key
            if not names or is_single_value:
                continue
            del self.values[key]
            for name in names:
                copy = f"{key}{name.removeprefix(path)}"
                if copy not in self.values:
                    self.values[copy] = self.values[name]
                    self.spelled[copy] = copy

    def _referred_key(self, key: str, value: Any) -> str:
        """Return the key that a value refers to, where it is that reference and no more; "" elsewhere."""
        if not isinstance(value, str):
            return ""
        match = REFERENCE.fullmatch(value)
        if match is None or match[1] == "env":
            return ""
        return self._path_of(key, match[2])

    def _of_key(self, key: str, referrers: tuple[str, ...] = ()) -> Any:
        """Return the value of a key with its references filled in.

        A key that refers to itself, at once or by way of others, stays as it is written, as do keys that
        refer to it; so does what ``LONGEST_TEXT`` and ``LONGEST_CHAIN`` leave no room for.
        """
        if key not in self._resolutions:
            self._resolutions[key] = self._resolved(key, self.values[key], referrers)
        return self._resolutions[key]

    def _resolved(self, key: str, value: Any, referrers: tuple[str, ...]) -> Any:
        """Return a value with its references filled in, as far as they are known."""
        if isinstance(value, list):
            return [self._resolved(key, item, referrers) for item in value]
        while isinstance(value, str):
            match = REFERENCE.search(value)
            if match is None:
                return value
            target = self._target(key, match, referrers)
            if target is ...:
                return value
            text = "null" if target is None else str(target)
            is_left = REFERENCE.search(text) is not None
            if is_left or len(text) > LONGEST_TEXT:
                return value
            is_all = match[0] == value
            value = target if is_all else value.replace(match[0], text)
        return value

    def _target(self, key: str, match: re.Match[str], referrers: tuple[str, ...]) -> Any:
        """Return the value that a reference stands for, or ... where it is not known."""
        function, path, default = match.groups()
        if function == "env":
            fallback = ... if default is None else default
            return os.environ.get(path, fallback)
        path = self._path_of(key, path)
        if path in self.values:
            is_cycle = path in (*referrers, key)
            if is_cycle or len(referrers) >= LONGEST_CHAIN:
                return ...
            return self._of_key(path, (*referrers, key))
        row = self.table.rows.get(path)
        if row is not None and "default" in row.entry:
            return row.default
        if default is None:
            return ...
        return scalar(default)

    def _path_of(self, key: str, path: str) -> str:
        """Return the key, in the table's spelling, that a reference in the value of a key names."""
        if path.startswith("."):
            path = f"{key.rpartition('.')[0]}{path}"
        return self.table.renamed(path)


def put_in(mapping: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested mappings at a dotted path."""
    *sections, key = path.split(".")
    for section in sections:
        mapping = mapping.setdefault(section, {})
    mapping[key] = value


def read_settings(file: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings by dotted keys, of a YAML file and of ``key=value``, ``+key=value`` and ``~key``.

    Raises:
        GraphError: the file or a value is not YAML.
    """
    settings: dict[str, Any] = {}
    if file is not None:
        settings.update(flattened(read(file).plain()))
    for override in overrides:
        if override.startswith("~"):
            settings = without(settings, override)
        else:
            settings.update(_overridden(override.lstrip("+")))
    return settings


def _overridden(override: str) -> Iterator[tuple[str, Any]]:
    """Yield what ``key=value`` sets: several keys where the value is a mapping."""
    name, equals, text = override.partition("=")
    opens_bracket = text.lstrip()[:1] in ("{", "[")
    if equals and opens_bracket:
        value = hydra_value(text)
        if value is not ...:
            yield from flattened(value, name.strip())
            return
    name, tree = setting(override)
    yield from flattened(tree.plain(), name)


def without(settings: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return settings without the key that ``~key`` takes out, and without what is below it.

    Example:
        >>> without({"a.b": 1, "ab": 2}, "~a")
        {'ab': 2}
    """
    name = override[1:].partition("=")[0]
    return {key: value for key, value in settings.items() if not f"{key}.".startswith(f"{name}.")}


def hydra_value(text: str) -> Any:
    """Return a mapping or a list as Hydra's own grammar writes it, or ... where it is neither.

    It is close to YAML, but a colon needs no space behind it and ``\\`` takes a bracket as it is.

    Example:
        >>> hydra_value("{a:1,b:[x,'y z']}")
        {'a': 1, 'b': ['x', 'y z']}
    """
    parser = _HydraParser(text)
    try:
        value = parser.value()
    except (ValueError, IndexError):
        return ...
    if not parser.is_at_end():
        return ...
    return value


class _HydraParser:
    """Reads a value of Hydra's grammar, word by word; a text that is not one is a ValueError or IndexError.

    ``place`` is the word that is read next.
    """

    def __init__(self, text: str) -> None:
        self.words = [match for match in HYDRA_WORD.finditer(text) if not match["space"]]
        self.place = 0

    def is_at_end(self) -> bool:
        return self.place == len(self.words)

    def value(self) -> Any:
        match = self._next()
        if match["mark"] == "{":
            return dict(self._items("}", self._pair))
        if match["mark"] == "[":
            return list(self._items("]", self.value))
        return self._word(match)

    def _next(self) -> re.Match[str]:
        match = self.words[self.place]
        self.place += 1
        return match

    def _pair(self) -> tuple[str, Any]:
        key = self._word(self._next())
        if self._next()["mark"] != ":":
            raise ValueError
        return str(key), self.value()

    def _items(self, end: str, read_item: Callable[[], Any]) -> Iterator[Any]:
        while self.words[self.place]["mark"] != end:
            yield read_item()
            mark = self.words[self.place]["mark"]
            if mark == ",":
                self.place += 1
            elif mark != end:
                raise ValueError
        self.place += 1

    @staticmethod
    def _word(match: re.Match[str]) -> Any:
        if match["mark"]:
            raise ValueError
        if match["quoted"]:
            return re.sub(r"\\(['\"])", r"\1", match["quoted"][1:-1])
        plain = re.sub(r"\\(.)", r"\1", match["plain"]).strip()
        if "\\" in match["plain"]:  # what is escaped is a text, whatever it looks like
            return plain
        return scalar(plain)


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted keys.

    Example:
        >>> dict(flattened({"a": {"b": 1, "c": {}}}))
        {'a.b': 1, 'a.c': {}}
    """
    is_empty_value = not value and path != ""
    if not isinstance(value, Mapping) or is_empty_value:
        yield path, value
        return
    for name, child in value.items():
        child_path = f"{path}.{name}" if path else str(name)
        yield from flattened(child, child_path)
