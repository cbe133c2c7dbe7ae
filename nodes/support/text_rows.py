"""Rows of text: JSON lines, JSON, CSV and TSV, each of which may be compressed.

JSON is read by Python, so that every value is what the file says: ``pyarrow``'s reader, and that of
``datasets`` on top of it, makes times of texts that look like dates, and one type of all values of a field
(docs/decisions/2026-11-28-datasets.md has more).
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlgraph.nodes.support.arrow_rows import refuse_unreadable
from rlgraph.nodes.support.lazy import pyarrow
from rlgraph.nodes.support.row_field import DataError, Row, Written, roots

TextRows = Iterator[tuple[str, Row]]
ICONV = "convert the file, as by: iconv -f latin1 -t utf-8"
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)


def _arrow_stream(name: str) -> Callable[[Path], IO[bytes]]:
    return lambda path: io.BufferedReader(pyarrow.input_stream(str(path), compression=name))


OPENERS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _arrow_stream("zstd"),
    ".lz4": _arrow_stream("lz4"),
}


@contextmanager
def _opened(file: str, local: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed.

    Raises:
        DataError: its compressed content is broken or cut off.
    """
    opener = OPENERS.get(local.suffix)
    if opener is None:
        with local.open("rb") as plain:
            yield plain
        return
    try:
        with opener(local) as unpacked:
            yield unpacked
    except BROKEN as error:
        law = f"{file}: can't be decompressed: {error}"
        raise DataError(f"{law}; fetch or compress it again") from error


def json_line_rows(file: str, local: Path, columns: Sequence[str], optional: Sequence[str]) -> TextRows:
    """Yield the place and the object of each line; blank lines count."""
    with _opened(file, local) as lines:
        yield from _objects(file, lines, columns, optional)


def _objects(file: str, lines: Iterable[bytes], columns: Sequence[str], optional: Sequence[str]) -> TextRows:
    paths = [*columns, *optional]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        row = _object(place, line)
        roots(place, columns, optional, row)
        if b"NaN" in line or b"Infinity" in line:
            _refuse(place, row, paths)
        yield place, row


def _refuse(place: str, row: Row, paths: Iterable[str]) -> None:
    for path in paths:
        refuse_unreadable(place, row, path)


def _object(place: str, line: bytes) -> dict[str, Any]:
    """Return the object of a line of JSON; a byte-order mark before it is passed over."""
    row = _value(place, line, "each line must be one object")
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__}, not an object; write {{...}} a line")
    return row


def _value(place: str, data: bytes, remedy: str) -> Any:
    """Return what JSON says.

    Raises:
        DataError: it is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if b"\\u" in data:  # what is written so may be half of a character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{place}: holds {half}, half of a surrogate pair; give both or neither") from error
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}; {remedy}") from error
    except RecursionError as error:
        raise DataError(f"{place}: not JSON that can be read: nested too deeply; flatten it") from error
    return value


def _not_utf8(place: str, error: UnicodeDecodeError) -> DataError:
    byte = f"byte {error.object[error.start]:#04x} at {error.start + 1}"
    return DataError(f"{place}: is not UTF-8 ({byte}); {ICONV}")


def json_rows(file: str, local: Path, columns: Sequence[str], optional: Sequence[str]) -> TextRows:
    """Yield the place and the object of each row of a ``.json`` file.

    It is a list of objects, an object with such a list in one of its fields, or in truth JSON lines. An
    object that has the columns itself is one row.
    """
    with _opened(file, local) as source:
        filled_lines = (line for line in source if line.strip())
        first_line = next(filled_lines, b"")
        has_more = next(filled_lines, None) is not None
    if has_more and _is_object(first_line):
        yield from json_line_rows(file, local, columns, optional)
        return
    with _opened(file, local) as source:
        value = _value(file, source.read(), "write a list of objects, or JSON lines as .jsonl")
    if isinstance(value, dict):
        value = [value] if _has_columns(value, columns) else _only_list(file, value)
    if not isinstance(value, list):
        raise DataError(f"{file}: holds {type(value).__name__}; write a list of objects")
    for number, row in enumerate(value, 1):
        place = f"{file}:{number}"
        if not isinstance(row, dict):
            raise DataError(f"{place}: {type(row).__name__}, not an object; write a list of objects")
        roots(place, columns, optional, row)
        _refuse(place, row, [*columns, *optional])
        yield place, row


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _has_columns(value: Row, columns: Sequence[str]) -> bool:
    try:
        roots("", columns, (), value)
    except DataError:
        return False
    return True


def _only_list(file: str, value: Row) -> list[Any]:
    """Return the one field of an object that is a list of objects.

    Raises:
        DataError: there is none, or there are several.
    """
    lists = {}
    for name, field in value.items():
        is_list = isinstance(field, list) and bool(field)
        if is_list and all(isinstance(item, dict) for item in field):
            lists[name] = field
    if len(lists) == 1:
        return next(iter(lists.values()))
    if lists:
        law = f"{file}: an object with several lists of rows: {', '.join(lists)}"
        raise DataError(f"{law}; write the one that is meant to a file of its own")
    law = f"{file}: an object without a list of rows, with the fields {', '.join(map(repr, value))}"
    raise DataError(f'{law}; write a list of objects (of pandas: to_json(orient="records"))')


def csv_rows(file: str, local: Path, columns: Sequence[str], optional: Sequence[str]) -> TextRows:
    """Yield the place and the cells of each row behind a header; an empty cell is null."""
    yield from _table(file, local, ",", columns, optional)


def tsv_rows(file: str, local: Path, columns: Sequence[str], optional: Sequence[str]) -> TextRows:
    """Yield what ``csv_rows`` does of a file whose cells are separated by tabs."""
    yield from _table(file, local, "\t", columns, optional)


def _table(
    file: str, local: Path, separator: str, columns: Sequence[str], optional: Sequence[str]
) -> TextRows:
    csv.field_size_limit(2**31 - 1)  # of the process; by default a longer text is an error
    with _opened(file, local) as source:
        cells = _cells(file, csv.reader(_lines(file, source), delimiter=separator, strict=True))
        header = next(cells, None)
        if header is None:
            return
        for name in header:
            if name and header.count(name) > 1:
                raise DataError(f"{file}: has two columns {name!r}; rename one")
        roots(file, columns, optional, dict.fromkeys(header))
        for number, row in enumerate(cells, 1):
            place = f"{file}:{number}"
            if len(row) != len(header):
                law = f"{place}: has {len(row)} cells, and the header {len(header)}"
                raise DataError(f"{law}; put a cell that has a {separator!r} or a line's end between \"")
            fields = {}
            for name, cell in zip(header, row, strict=True):
                fields[name] = Written(cell) if cell else None
            yield place, fields


def _lines(file: str, source: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(source, 1):
        try:
            encoding = "utf-8-sig" if number == 1 else "utf-8"  # a byte-order mark stands in front
            yield line.decode(encoding)
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{file}, line {number}", error) from error


def _cells(file: str, reader: Any) -> Iterator[list[str]]:
    """Yield the cells of each row that has some."""
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        law = f"{file}, line {reader.line_num}: can't be read as a table: {error}"
        raise DataError(f"{law}; write it again by a library for CSV") from error
