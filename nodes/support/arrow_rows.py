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
from pathlib import Path
from typing import Any

from rlgraph.errors import shortened
from rlgraph.nodes.support.lazy import datasets, numpy, parquet, pyarrow
from rlgraph.nodes.support.row_field import DataError, Row, Written, field_of, roots, schema_fields

BATCH = 1024  # rows of Arrow that are Python objects at a time
JSON = "arrow.json"  # what ``datasets`` from 5.0 on writes of fields that differ from row to row
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
            reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            names = roots(file, columns, optional, schema_fields(reader.schema))
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            small = (slice_of_batch for batch in batches for slice_of_batch in _slices(batch.select(names)))
            yield from _rows(file, small, [*columns, *optional])
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
    table = data.with_format("arrow", columns=names)
    try:
        batches = (slice_of_batch for batch in table.iter(BATCH) for slice_of_batch in batch.to_batches())
        yield from _rows(file, batches, [*columns, *optional])
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken(file, error) from error


def _broken(file: str, error: Exception) -> DataError:
    return DataError(f"{file}: can't be read by datasets: {error}; save the data set again")


def _slices(batch: Any) -> Iterator[Any]:
    """Yield the rows of a batch, so many at a time that they may be Python objects."""
    for begin in range(0, batch.num_rows, BATCH):
        yield batch.slice(begin, BATCH)


def _rows(file: str, batches: Iterable[Any], paths: Sequence[str]) -> ArrowRows:
    """Yield the rows of batches; raise an ``ArrowException`` where a text is not UTF-8.

    Raises:
        DataError: a field that ``paths`` lead to holds what has no value in JSON.
    """
    number = 0
    for batch in batches:
        batch.validate(full=True)
        fields = [*zip(batch.schema, batch.columns, strict=True)]
        converts: dict[str, Convert] = {}
        for field, column in fields:
            convert = _converter(field, _has_null_fields(column))
            if convert is not None:
                converts[field.name] = convert
        doubtful = {field.name for field, _ in fields if not _is_plain(field)}
        checked = [path for path in paths if any(_leads_into(path, name) for name in doubtful)]
        is_plain = not converts and not checked
        for number, row in enumerate(_python_rows(file, number, batch), number + 1):  # noqa: B020 - goes on counting
            place = f"{file}:{number}"
            if not is_plain:
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


def _python_rows(file: str, before: int, batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python objects."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # a time that Python has no object for
        law = f"{file}: rows {before + 1} to {before + batch.num_rows} hold what can't be read: {error}"
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
    kind, types = field.type, pyarrow.types
    if _is_json(field):
        return False  # Python reads NaN there too
    if types.is_struct(kind):
        return all(map(_is_plain, kind))
    if _is_list(kind):
        return _is_plain(kind.value_field)
    if types.is_dictionary(kind):
        return _is_plain(pyarrow.field("value", kind.value_type))
    return bool(types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or _is_text(kind))


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    types = pyarrow.types
    is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or is_view)


def _is_bytes(kind: Any) -> bool:
    types = pyarrow.types
    is_any = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return bool(is_any or types.is_binary_view(kind))


def _is_json(field: Any) -> bool:
    """Return whether a field is of JSON: by its type, or by its metadata where pyarrow does not know that."""
    name = getattr(field.type, "extension_name", None)
    return name == JSON or (field.metadata or {}).get(b"ARROW:extension:name") == JSON.encode()


def _has_null_fields(array: Any) -> bool:
    """Return whether some struct in an array may have a field that is null."""
    kind, types = array.type, pyarrow.types
    if types.is_struct(kind):
        children = [array.field(number) for number in range(kind.num_fields)]
        return any(child.null_count > 0 or _has_null_fields(child) for child in children)
    if _is_list(kind):
        return _has_null_fields(array.values)
    return bool(types.is_map(kind) and _has_null_fields(array.items))


def _convert_values(convert: Convert, values: Iterable[Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values]


def _converter(field: Any, drops_null: bool) -> Convert | None:
    """Return what makes of a value, as pyarrow gives it, that which JSON has for it; None: nothing is to do.

    ``drops_null`` has mappings that are structs lose their null fields: in Arrow each row has every field.
    """
    kind, types = field.type, pyarrow.types
    if _is_json(field):
        return loaded
    if isinstance(kind, pyarrow.BaseExtensionType):
        return str if kind.extension_name == "arrow.uuid" else None
    if types.is_struct(kind):
        return _struct_converter(kind, drops_null)
    if _is_list(kind):
        convert_value = _converter(kind.value_field, drops_null)
        return None if convert_value is None else partial(_convert_values, convert_value)
    if types.is_map(kind):
        each = _converter(kind.item_field, drops_null) or (lambda value: value)
        return lambda pairs: _mapping(pairs, each)
    if types.is_dictionary(kind):
        return _converter(pyarrow.field("value", kind.value_type), drops_null)
    if _is_bytes(kind):
        return _text
    if types.is_decimal(kind):
        return int if kind.scale <= 0 else lambda value: Written(f"{value:f}")
    if types.is_float32(kind):
        return lambda value: float(str(numpy.float32(value)))  # 0.1, not 0.10000000149
    if types.is_float16(kind):
        return lambda value: float(str(numpy.float16(value)))
    return None


def _struct_converter(kind: Any, drops_null: bool) -> Convert | None:
    converters = {field.name: _converter(field, drops_null) for field in kind}
    if not (drops_null or any(converters.values())):
        return None

    def convert(value: Mapping[str, Any]) -> dict[str, Any]:
        fields = {}
        for name, item in value.items():
            each = converters[name]
            if item is not None:
                fields[name] = each(item) if each else item
            elif not drops_null:
                fields[name] = None
        return fields

    return convert


def _mapping(pairs: Sequence[tuple[Any, Any]], each: Convert) -> Any:
    """Return a map as a mapping; as it is, which is refused, if its keys are not texts that differ."""
    keys = [key.decode() if isinstance(key, bytes) else key for key, _ in pairs]
    if len({*keys}) < len(keys) or not all(isinstance(key, str) for key in keys):
        return tuple(pairs)
    values = [None if value is None else each(value) for _, value in pairs]
    return dict(zip(keys, values, strict=True))


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
    if isinstance(value, Written) or (isinstance(value, float) and math.isnan(value)):
        return  # a whole field, which its column's type reads; nan is no value
    if reason := unreadable(value):
        what, remedy = reason
        raise DataError(f"{place}: {path!r} holds {what}; {remedy}")


def unreadable(value: Any) -> tuple[str, str] | None:
    """Return what in a value has no value in JSON, and what to do about it; None if there is nothing.

    Example:
        >>> unreadable({"a": [1, "x", None]})
        >>> unreadable({"a": [b"\\xff"]})[0]
        "b'\\\\xff', bytes that are not UTF-8 text"
    """
    if isinstance(value, dict):
        return next(filter(None, map(unreadable, value.values())), None)
    if isinstance(value, list):
        return next(filter(None, map(unreadable, value)), None)
    value_text = shortened(repr(value), 60)
    if isinstance(value, Written):
        return f"the decimal {value} in a list or mapping", "write it as a float or as text"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is not a number of JSON", "fill it in, or remove the row"
    if value is None or isinstance(value, str | bool | int | float):
        return None
    if isinstance(value, bytes):
        return f"{value_text}, bytes that are not UTF-8 text", "write them as text, as by base64"
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return f"the date or time {value}", "write it as the text that is meant, in a column of strings"
    if isinstance(value, tuple):
        return (
            f"the map {value_text}, whose keys are not texts that differ",
            "write it as a list, or as JSON text",
        )
    return f"{value_text}, a {type(value).__name__}", "write it as text, a number, a list or a mapping"
