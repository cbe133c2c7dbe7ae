"""Rows of Arrow: parquet files, Arrow files, and the folders of ``datasets.Dataset.save_to_disk``.

Arrow knows more types than JSON. A value comes as the one that JSON has for it, where there is one:

text of any layout, uuid                text            struct             a mapping; null fields are absent
binary that is UTF-8                    text            map                a mapping, if its keys are texts
decimal without a fraction              a whole number  arrow.json         what its text says, at any depth
decimal with one                        as written      dictionary         the value that is meant

Dates, times, nan, other bytes and what else has no such value are refused where a row's field is asked for.
"""

import datetime
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rlgraph.errors import shortened
from rlgraph.nodes.support.lazy import datasets, numpy, parquet, pyarrow
from rlgraph.nodes.support.row_field import DataError, Row, Written, field_of, roots, schema_fields

BATCH = 1024  # rows of Arrow that are Python objects at a time
JSON = "arrow.json"  # what ``datasets`` from 5.0 on writes of fields that differ from row to row
# names of types as in pyarrow.types.is_NAME, which tells layouts of 32 and 64 bits and views apart
LIST_KINDS = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
BYTES_KINDS = ("binary", "large_binary", "fixed_size_binary", "binary_view")
PLAIN_KINDS = ("null", "boolean", "integer", "string", "large_string", "string_view")
Convert = Callable[[Any], Any]
ArrowRows = Iterator[tuple[str, Row]]


def parquet_rows(file: str, local: Path, columns: Sequence[str], optional: Sequence[str]) -> ArrowRows:
    """Yield the place and some columns of each row of a parquet file."""
    try:
        with parquet.ParquetFile(local) as reader:
            names = roots(file, columns, optional, schema_fields(reader.schema_arrow))
            yield from _rows(file, reader.iter_batches(BATCH, columns=names), [*columns, *optional])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: can't be read as parquet: {error}; write it again") from error


def arrow_rows(file: str, local: Path, columns: Sequence[str], optional: Sequence[str]) -> ArrowRows:
    """Yield the place and some columns of each row of an Arrow file, of either kind: stream or file."""
    try:
        with pyarrow.memory_map(str(local)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = reader = pyarrow.ipc.open_stream(source)
            names = roots(file, columns, optional, schema_fields(reader.schema))
            yield from _rows(file, _slices(batches, names), [*columns, *optional])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: can't be read as Arrow: {error}; write it again") from error


def saved_rows(file: str, folder: Path, columns: Sequence[str], optional: Sequence[str]) -> ArrowRows:
    """Yield the place and some columns of each row of a folder of ``save_to_disk``, as ``datasets`` loads it.

    Nothing in the folder is run: it holds data and their description.
    """
    try:
        data = datasets.load_from_disk(str(folder))
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise _broken(file, error) from error
    names = roots(file, columns, optional, schema_fields(data.features.arrow_schema))
    tables = data.with_format("arrow", columns=names).iter(BATCH)
    batches = chain.from_iterable(table.to_batches() for table in tables)
    try:
        yield from _rows(file, batches, [*columns, *optional])
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken(file, error) from error


def _broken(file: str, error: Exception) -> DataError:
    return DataError(f"{file}: can't be read by datasets: {error}; save the data set again")


def _slices(batches: Iterable[Any], names: Sequence[str]) -> Iterator[Any]:
    """Yield some columns of batches, so many rows at a time that they may be Python objects."""
    for batch in batches:
        selected = batch.select(names)
        for begin in range(0, selected.num_rows, BATCH):
            yield selected.slice(begin, BATCH)


def _rows(file: str, batches: Iterable[Any], paths: Sequence[str]) -> ArrowRows:
    """Yield the rows of batches; raise an ``ArrowException`` where a text is not UTF-8.

    Raises:
        DataError: a field that ``paths`` lead to holds what has no value in JSON.
    """
    number = 0
    for batch in batches:
        batch.validate(full=True)
        converts: dict[str, Convert] = {}
        doubtful = []  # columns some values of which JSON may not have
        for field, column in zip(batch.schema, batch.columns, strict=True):
            convert = _converter(field, _has_null_fields(column))
            if convert is not None:
                converts[field.name] = convert
            if not _is_plain(field):
                doubtful.append(field.name)
        checked = [path for path in paths if any(_leads_into(path, name) for name in doubtful)]
        for row in _python_rows(file, number, batch):
            number += 1
            place = f"{file}:{number}"
            _convert_fields(place, row, converts, checked)
            yield place, row


def _convert_fields(
    place: str, row: dict[str, Any], converts: Mapping[str, Convert], checked: Sequence[str]
) -> None:
    """Convert some fields of a row in place, and refuse what they hold if JSON has no value for it."""
    for name, convert in converts.items():
        if row[name] is not None:
            row[name] = _converted(place, name, convert, row[name])
    for path in checked:
        refuse_unreadable(place, row, path)


def _python_rows(file: str, rows_before: int, batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python objects."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # a time that Python has no object for
        span = f"rows {rows_before + 1} to {rows_before + batch.num_rows}"
        law = f"{file}: {span} hold what can't be read: {error}"
        raise DataError(f"{law}; write dates and times as text") from error
    return rows


def _leads_into(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _converted(place: str, name: str, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except (ValueError, RecursionError) as error:
        law = f"{place}: {name!r} is a column of JSON ({JSON}), and holds what is not: {error}"
        raise DataError(f"{law}; write the column again") from error


def _is_plain(field: Any) -> bool:
    """Return whether all values of a field are of JSON as they come."""
    kind = field.type
    types = pyarrow.types
    if _is_json(field):
        return False  # Python reads NaN there too
    if types.is_struct(kind):
        return all(map(_is_plain, kind))
    if _is_any(kind, LIST_KINDS):
        return _is_plain(kind.value_field)
    if types.is_dictionary(kind):
        return _is_plain(pyarrow.field("value", kind.value_type))
    return _is_any(kind, PLAIN_KINDS)


def _is_any(kind: Any, names: Sequence[str]) -> bool:
    """Return whether pyarrow says of a type that it is one of some."""
    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def _is_json(field: Any) -> bool:
    """Return whether a field is of JSON: by its type, or by its metadata where pyarrow does not know that."""
    if getattr(field.type, "extension_name", None) == JSON:
        return True
    metadata = field.metadata or {}
    return bool(metadata.get(b"ARROW:extension:name") == JSON.encode())


def _has_null_fields(array: Any) -> bool:
    """Return whether some struct in an array may have a field that is null."""
    kind = array.type
    if pyarrow.types.is_struct(kind):
        for number in range(kind.num_fields):
            child = array.field(number)
            if child.null_count > 0 or _has_null_fields(child):
                return True
        return False
    if _is_any(kind, LIST_KINDS):
        return _has_null_fields(array.values)
    if pyarrow.types.is_map(kind):
        return _has_null_fields(array.items)
    return False


def _convert_values(convert: Convert, values: Iterable[Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values]


def _converter(field: Any, drops_null: bool) -> Convert | None:
    """Return what makes of a value, as pyarrow gives it, that which JSON has for it; None: nothing is to do.

    ``drops_null`` has mappings that are structs lose their null fields: in Arrow each row has every field.
    """
    kind = field.type
    types = pyarrow.types
    if _is_json(field):
        return loaded
    if isinstance(kind, pyarrow.BaseExtensionType):
        return str if kind.extension_name == "arrow.uuid" else None
    if types.is_struct(kind):
        return _struct_converter(kind, drops_null)
    if _is_any(kind, LIST_KINDS):
        convert_value = _converter(kind.value_field, drops_null)
        return None if convert_value is None else partial(_convert_values, convert_value)
    if types.is_map(kind):
        convert_item = _converter(kind.item_field, drops_null)
        return partial(_mapping, convert_item or _unchanged)
    if types.is_dictionary(kind):
        return _converter(pyarrow.field("value", kind.value_type), drops_null)
    if _is_any(kind, BYTES_KINDS):
        return _text
    if types.is_decimal(kind):
        return int if kind.scale <= 0 else lambda value: Written(f"{value:f}")
    if types.is_float32(kind):
        return lambda value: float(str(numpy.float32(value)))  # 0.1, not 0.10000000149
    if types.is_float16(kind):
        return lambda value: float(str(numpy.float16(value)))
    return None


def _unchanged(value: Any) -> Any:
    return value


def _struct_converter(kind: Any, drops_null: bool) -> Convert | None:
    """Return what converts the fields of a mapping, or None where all of them stay as they are."""
    converters = {field.name: _converter(field, drops_null) or _unchanged for field in kind}
    is_unchanged = all(convert is _unchanged for convert in converters.values())
    if is_unchanged and not drops_null:
        return None

    def convert(value: Mapping[str, Any]) -> dict[str, Any]:
        fields = {}
        for name, item in value.items():
            if item is not None:
                fields[name] = converters[name](item)
            elif not drops_null:
                fields[name] = None
        return fields

    return convert


def _mapping(convert: Convert, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return a map as a mapping; as it is, which is refused, if its keys are not texts that differ."""
    fields = {}
    for key, value in pairs:
        name = key.decode() if isinstance(key, bytes) else key
        if not isinstance(name, str) or name in fields:
            return tuple(pairs)
        fields[name] = None if value is None else convert(value)
    return fields


def _text(value: bytes) -> str | bytes:
    """Return bytes as text; as they are, which is refused, if they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def loaded(text: str | bytes) -> Any:
    """Return what a text of JSON says.

    Raises:
        ValueError: it is not JSON, or holds half of a surrogate pair.
    """
    value = json.loads(text)
    escape = b"\\u" if isinstance(text, bytes) else "\\u"
    if escape in text:  # type: ignore[operator]
        json.dumps(value, ensure_ascii=False).encode()
    return value


def refuse_unreadable(place: str, row: Row, path: str) -> None:
    """Raise where the field of a row at a path, if it has one, holds what has no value in JSON.

    Raises:
        DataError: it does; the message says what it is, and how to write it.
    """
    try:
        value = field_of(row, path)
    except LookupError:
        return
    is_nan = isinstance(value, float) and math.isnan(value)
    if is_nan or isinstance(value, Written):
        return  # the field itself, which is read as its column's type; nan is an absent value
    reason = unreadable(value)
    if reason:
        description, remedy = reason
        raise DataError(f"{place}: {path!r} holds {description}; {remedy}")


def unreadable(value: Any) -> tuple[str, str] | None:
    """Return what in a value has no value in JSON, and what to do about it; None if there is nothing.

    Example:
        >>> unreadable({"a": [1, "x", None]})
        >>> unreadable({"a": [b"\\xff"]})[0]
        "b'\\\\xff', bytes that are not UTF-8 text"
    """
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            reason = unreadable(item)
            if reason:
                return reason
        return None
    if isinstance(value, Written):
        return f"the decimal {value} in a list or mapping", "write it as a float or as text"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is not a number of JSON", "fill it in, or remove the row"
    if value is None or isinstance(value, str | bool | int | float):
        return None
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return f"the date or time {value}", "write it as the text that is meant, in a column of strings"
    value_text = shortened(repr(value), 60)
    if isinstance(value, bytes):
        return f"{value_text}, bytes that are not UTF-8 text", "write them as text, as by base64"
    if isinstance(value, tuple):
        law = f"the map {value_text}, whose keys are not texts that differ"
        return law, "write it as a list, or as JSON text"
    return f"{value_text}, a {type(value).__name__}", "write it as text, a number, a list or a mapping"
