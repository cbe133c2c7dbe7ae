"""Fields of rows by their paths, and their values as columns of a graph.

reward_model.ground_truth    a field of a field        columns: {tests: json,
turns[0].content             an item of a list                   gold: {from: reward_model.ground_truth}}
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

from rlgraph.errors import RunError, nearest, shortened
from rlgraph.nodes.support.lazy import pyarrow, torch
from rlgraph.ops.column_types import DTYPES, LISTED

PART = re.compile(r"\[(-?\d+)\]|([^.\[\]]+)")
KEYS = ("from", "type", "default")
KINDS: dict[str, tuple[type, ...]] = {"text": (str, int, float), "boolean": (bool,), "float32": (int, float)}
KINDS["int64"] = (int,)


class DataError(RunError):
    """Data that can't be used; the message names the file and row, and says what to do."""


def _checked(column: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return what ``columns`` says of one, if it is a type or knows its keys."""
    spec = column if isinstance(column, dict) else {"type": column}
    for known, names in ((KEYS, [*spec]), ([*DTYPES], [str(spec.get("type", "text"))])):
        for name in names:
            if name not in known:
                options = " or ".join(map(repr, known))
                raise ValueError(f"must be {options}, not {name!r}; {nearest(name, known)}".rstrip("; "))
    if not isinstance(path := spec.get("from", ""), str):
        raise ValueError(f"must be a path such as 'extra_info.index', not {path!r}")
    return column


FileColumn = Annotated[str | dict[str, Any], AfterValidator(_checked)]
FileColumns = dict[str, FileColumn]


def path_of(name: str, column: str | Mapping[str, Any]) -> str:
    """Return the field of the files that a column of ``columns`` comes from."""
    return name if isinstance(column, str) else str(column.get("from", name))


def type_of(column: str | Mapping[str, Any]) -> str:
    """Return the dtype of a column of ``columns``."""
    return column if isinstance(column, str) else str(column.get("type", "text"))


def root_of(path: str, names: Sequence[str]) -> str:
    """Return the top-level field that a path begins with; ``names`` may have the path itself.

    Example:
        >>> root_of("turns[0].content", ["turns"]), root_of("a.b", ["a.b"])
        ('turns', 'a.b')
    """
    return path if path in names else re.split(r"[.\[]", path, maxsplit=1)[0]


def field_of(row: Mapping[str, Any], path: str) -> Any:
    """Return the field of a row at a path; a ``LookupError`` where the row has none.

    Example:
        >>> field_of({"turns": [{"content": "a"}, {"content": "b"}]}, "turns[-1].content")
        'b'
    """
    if path in row:
        return row[path]
    value: Any = row
    for index, key in PART.findall(path):
        if not isinstance(value, list if index else dict):
            raise LookupError(path)
        value = value[int(index) if index else key]
    return value


def given(place: str, row: Mapping[str, Any], path: str) -> Any:
    """Return the field of a row at a path.

    Raises:
        DataError: the row has none.
    """
    try:
        return field_of(row, path)
    except LookupError:
        raise missing(place, path, row) from None


def missing(place: str, path: str, row: Mapping[str, Any]) -> DataError:
    """Return the error of a file or a row, whose fields ``row`` has, without the one at a path."""
    known = [*dict.fromkeys(_paths(row))]
    top = ", ".join(repr(name) for name in row)
    remedy = nearest(path, known) or "name one of them with question:, answer:, where: or columns:"
    return DataError(f"{place}: has no column {path!r}, only {top}; {remedy}")


def schema_fields(schema: Any) -> dict[str, Any]:
    """Return the names of an Arrow schema's or struct's fields, as a row without values."""
    is_struct = pyarrow.types.is_struct
    return {field.name: schema_fields(field.type) if is_struct(field.type) else None for field in schema}


def _paths(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{path}" for path in _paths(value))


def column_values(place: str, row: Mapping[str, Any], columns: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a row's values of the columns that ``columns`` names.

    Raises:
        DataError: the row has no such field and there is no default, or its value is of another type.
    """
    return {name: _value(place, row, name, column) for name, column in (columns or {}).items()}


def _value(place: str, row: Mapping[str, Any], name: str, column: str | Mapping[str, Any]) -> Any:
    spec: Mapping[str, Any] = {} if isinstance(column, str) else column
    path, dtype = path_of(name, column), type_of(column)
    try:
        value = field_of(row, path)
    except LookupError:
        value = spec.get("default")
        if "default" not in spec:
            raise missing(place, path, row) from None
    value = spec["default"] if value is None and "default" in spec else value
    kinds = KINDS.get(dtype, ())
    if is_json(value) if dtype == "json" else type(value) in kinds:
        return str(value) if dtype == "text" else value
    law = f"{place}: {path!r} is no {dtype}, but {shortened(repr(value), 60)}"
    remedy = "correct the row" if dtype == "json" else "correct the row, or type:"
    raise DataError(f"{law}; {'give a default: for rows without, ' * (value is None)}{remedy}")


def is_json(value: Any) -> bool:
    """Return whether a value is one that JSON brings back as it is.

    Example:
        >>> [is_json(value) for value in ({"a": [1, None]}, {1: 2}, (1, 2), float("nan"))]
        [True, False, False, False]
    """
    try:
        back = json.loads(json.dumps(value, allow_nan=False))
        return type(back) is type(value) and bool(back == value)
    except (TypeError, ValueError, RecursionError):
        return False


def as_column(dtype: str, values: Sequence[Any]) -> Any:
    """Return values as an op returns them, by the dtype of their column: a tensor or a list."""
    kinds = {"float32": torch.float32, "int64": torch.int64, "boolean": torch.bool}
    return list(values) if dtype in LISTED else torch.tensor(values, dtype=kinds[dtype])
