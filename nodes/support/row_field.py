"""Fields of rows by their paths, and their values as columns of a graph.

reward_model.ground_truth    a field of a field        columns: {tests: json,
turns[0].content             an item of a list                   gold: {from: reward_model.ground_truth}}
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

from rlgraph.errors import RunError, nearest, shortened
from rlgraph.nodes.support.lazy import pyarrow, torch
from rlgraph.ops.column_types import DTYPES, LISTED

STEP = re.compile(r"\[(-?\d+)\]|([^.\[\]]+)")
KEYS = ("from", "type", "default")
KINDS: dict[str, tuple[type, ...]] = {
    "text": (str, int, float),
    "boolean": (bool,),
    "float32": (int, float),
    "int64": (int,),
}
INTEGER = re.compile(r"[+-]?\d+")
BOOLEANS = {"true": True, "false": False}
INT64 = range(-(2**63), 2**63)
LARGEST = 3.4028234663852886e38  # of float32
Row = Mapping[str, Any]


class DataError(RunError):
    """Data that can't be used; the message names the file and row, and says what to do."""


class Written(str):
    """A value of which a file has the text alone, as a cell of CSV: of the type that a column asks for."""


def _checked(column: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return what ``columns`` says of one, if it is a type or knows its keys."""
    spec = column if isinstance(column, dict) else {"type": column}
    for key in spec:
        _refuse_unknown(key, KEYS)
    _refuse_unknown(str(spec.get("type", "text")), [*DTYPES])
    path = spec.get("from", "")
    if not isinstance(path, str):
        raise ValueError(f"must be a path such as 'extra_info.index', not {path!r}")
    return column


def _refuse_unknown(name: str, known: Sequence[str]) -> None:
    if name not in known:
        options = " or ".join(map(repr, known))
        raise ValueError(f"must be {options}, not {name!r}; {nearest(name, known)}".rstrip("; "))


FileColumn = Annotated[str | dict[str, Any], AfterValidator(_checked)]
FileColumns = dict[str, FileColumn]


def as_number(value: Any) -> Any:
    """Return a number of NumPy's or torch's as Python's; anything else as it is.

    Example:
        >>> as_number(True), as_number("1")
        (True, '1')
    """
    if not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return value


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
    if path in names:
        return path
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def field_of(row: Mapping[str, Any], path: str) -> Any:
    """Return the field of a row at a path; a ``LookupError`` where the row has none.

    Example:
        >>> field_of({"turns": [{"content": "a"}, {"content": "b"}]}, "turns[-1].content")
        'b'
    """
    if path in row:
        return row[path]
    value: Any = row
    for index, key in STEP.findall(path):
        container = list if index else dict
        if not isinstance(value, container):
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


def roots(place: str, columns: Sequence[str], optional: Sequence[str], fields: Row) -> list[str]:
    """Return the fields of a file or row, of those in ``fields``, that have some columns in them.

    Raises:
        DataError: it lacks one.
    """
    names = [*fields]
    for path in columns:
        if root_of(path, names) not in fields:
            raise missing(place, path, fields)
    wanted = dict.fromkeys(root_of(path, names) for path in [*optional, *columns])
    return [name for name in wanted if name in fields]


def schema_fields(schema: Any) -> dict[str, Any]:
    """Return the names of an Arrow schema's or struct's fields, as a row without values."""
    fields = {}
    for field in schema:
        is_struct = pyarrow.types.is_struct(field.type)
        fields[field.name] = schema_fields(field.type) if is_struct else None
    return fields


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
    values = {}
    for name, column in (columns or {}).items():
        values[name] = _value(place, row, name, column)
    return values


def _value(place: str, row: Mapping[str, Any], name: str, column: str | Mapping[str, Any]) -> Any:
    spec: Mapping[str, Any] = {} if isinstance(column, str) else column
    path = path_of(name, column)
    dtype = type_of(column)
    try:
        value = field_of(row, path)
    except LookupError:
        if "default" not in spec:
            raise missing(place, path, row) from None
        value = None
    if isinstance(value, Written):
        value = parsed(value, dtype)
    is_nan = value != value  # nan is how pandas says that there is none
    if value is None or is_nan:
        value = spec.get("default", value)
    reason = unfit(value, dtype)
    if reason:
        law = f"{place}: {path!r} is no {dtype}, but {shortened(repr(value), 60)}"
        raise DataError(f"{law}; {reason}")
    return str(value) if dtype == "text" else value


def unfit(value: Any, dtype: str) -> str:
    """Return what to do about a value that a column of some type can't have, or nothing.

    A whole number is text as it is written. Of one with a fraction, 0.5 is; 72.0 is not, which may have been
    72 before a library put it beside a missing value.

    Example:
        >>> [bool(unfit(value, "text")) for value in ("x", 72, 0.5, 72.0, True, None)]
        [False, False, False, True, True, True]
        >>> [bool(unfit(value, "int64")) for value in (2**63 - 1, 2**63, 1.0)]
        [False, True, True]
    """
    if dtype == "json":
        return "" if is_json(value) else "correct the row"
    is_float = isinstance(value, float)
    if value is None or (is_float and math.isnan(value)):
        return "give a default: for rows without, correct the row, or type:"
    if type(value) not in KINDS[dtype]:
        return "correct the row, or type:"
    if dtype == "text" and is_float:
        reads_back = math.isfinite(value) and not value.is_integer()
        return "" if reads_back else "write it as the text that is meant, or as a whole number"
    if dtype == "int64" and value not in INT64:
        return "it is beyond 64 bits; type: text"
    if dtype == "float32" and not -LARGEST <= value <= LARGEST:
        return "it is beyond the range of float32; scale it, or type: text"
    return ""


def parsed(value: Written, dtype: str) -> Any:
    """Return what a file has as text alone as a column's type; as a text, if it is not of that type.

    Example:
        >>> [parsed(Written("3"), dtype) for dtype in ("text", "int64", "float32", "json", "boolean")]
        ['3', 3, 3.0, 3, '3']
    """
    text = str(value)
    try:
        if dtype == "boolean":
            return BOOLEANS.get(text.lower(), text)
        if dtype == "int64" and INTEGER.fullmatch(text):
            return int(text)
        if dtype == "float32":
            return float(text)
        if dtype == "json":
            return json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text


def is_json(value: Any) -> bool:
    """Return whether a value is one that JSON brings back as it is.

    Example:
        >>> [is_json(value) for value in ({"a": [1, None]}, {1: 2}, (1, 2), float("nan"))]
        [True, False, False, False]
    """
    try:
        reread = json.loads(json.dumps(value, allow_nan=False))
        return type(reread) is type(value) and bool(reread == value)
    except (TypeError, ValueError, RecursionError):
        return False


def as_column(dtype: str, values: Sequence[Any]) -> Any:
    """Return values as an op returns them, by the dtype of their column: a tensor or a list."""
    if dtype in LISTED:
        return list(values)
    kinds = {"float32": torch.float32, "int64": torch.int64, "boolean": torch.bool}
    return torch.tensor(values, dtype=kinds[dtype])
