"""Rows of parquet and JSON-lines files and of Hugging Face ``datasets`` folders, on this machine or by URL.

Places are written ``FILE:N``, N from 1: the line of a .jsonl file, the row of any other.
"""

import fcntl
import functools
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.files import cache_folder, copy_of
from rlgraph.nodes.support.lazy import parquet, pyarrow
from rlgraph.nodes.support.row_field import DataError as DataError
from rlgraph.nodes.support.row_field import given, missing, root_of, schema_fields

Row = Mapping[str, Any]
KINDS = "a .parquet or .jsonl file, or a folder that datasets' save_to_disk wrote"
BATCH = 1024  # rows of Arrow that are Python objects at a time
SHOWN = 8  # values of a column that an error names


def read_rows(file: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """Yield the place and some columns, or more, of each row of a file: a path, or a URL that fsspec knows.

    Columns are paths of fields; those that are ``optional`` may be missing.

    Raises:
        DataError: it is not there, is of no kind that is read, or lacks a column.
    """
    local = Path(local_path(file))
    if local.is_dir():
        return _saved(file, local, columns, optional)
    readers: dict[str, Callable[..., Iterator[tuple[str, Row]]]] = {".parquet": _parquet, ".jsonl": _jsonl}
    if local.suffix not in readers:
        raise DataError(f"{file}: is neither .parquet nor .jsonl; convert it, or rename it if it is one")
    return readers[local.suffix](file, local, columns, optional)


def changed(file: str) -> int:
    """Return when a file, or its copy in the cache, was written, in ns.

    Raises:
        DataError: there is no such file.
    """
    local = Path(local_path(file))
    if not local.exists():
        raise DataError(f"{file}: there is no such file; give {KINDS}")
    state = local / "state.json"
    return (state if state.is_file() else local).stat().st_mtime_ns


def state_of(file: str) -> tuple[int, int]:
    """Return when a file was written, in ns, and its bytes; of a folder, those of the files in it.

    Raises:
        DataError: there is no such file.
    """
    time, local = changed(file), Path(local_path(file))
    return time, sum(path.stat().st_size for path in (local.iterdir() if local.is_dir() else [local]))


def local_path(file: str) -> str:
    """Return a path as it is; of a URL, that of a cached copy, which is made on first use.

    A copy is known by the URL and by what its
    system says of each file (its time, size or checksum), so that a changed one is fetched anew.

    Raises:
        DataError: the protocol is not known or needs a package; or nothing is there, or can't be fetched.
    """
    return _fetched(file) if "://" in file else file


@functools.cache
def _fetched(url: str) -> str:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    protocol = url.partition("://")[0]
    try:
        system, path = fsspec.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"{url}: reading {protocol}:// needs a package that is not here: {error}") from error
    except Exception as error:  # file systems of many authors raise what they like
        law = f"{url}: fsspec can't read such a URL: {type(error).__name__}: {error}"
        raise DataError(f"{law}; correct it, or copy the file here and give its path") from error
    if isinstance(system, LocalFileSystem):
        return str(path)
    try:
        is_file = system.isfile(path)  # find() would return the links of a web page
        files = [path] if is_file else sorted(system.find(path))
        if not files:
            raise DataError(f"{url}: there is no such file; give {KINDS}")
        names = [url, *(f"{name} {system.ukey(name)}" for name in files)]
        copy = cache_folder() / hashlib.sha256("\n".join(names).encode()).hexdigest()[:32] / Path(path).name
        if not copy.exists():
            _copy(system, path, not is_file, copy)
        _link(copy_of(url), copy)
    except DataError:
        raise
    except Exception as error:
        law = f"{url}: can't be fetched: {type(error).__name__}: {error}"
        raise DataError(f"{law}; correct the URL, or copy the file here and give its path") from error
    return str(copy)


def _copy(system: Any, path: str, is_folder: bool, copy: Path) -> None:
    """Fetch under another name and rename, so that a copy is whole; one process of a host does it for all."""
    copy.parent.parent.mkdir(parents=True, exist_ok=True)
    with copy.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.exists():
            with tempfile.TemporaryDirectory(dir=copy.parent.parent, ignore_cleanup_errors=True) as aside:
                system.get(path, f"{aside}/{copy.name}", recursive=is_folder)
                Path(aside).rename(copy.parent)


def _link(link: Path, copy: Path) -> None:
    """Have a link lead to a copy, at any moment to a whole one."""
    if not (link.exists() and link.samefile(copy)):
        link.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=link.parent) as aside:
            Path(aside, "link").symlink_to(copy.absolute())
            Path(aside, "link").replace(link)


def _parquet(
    file: str, local: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    try:
        with parquet.ParquetFile(local) as whole:
            names = roots(file, columns, optional, schema_fields(whole.schema_arrow))
            yield from _rows(file, whole.iter_batches(BATCH, columns=names))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: can't be read as parquet: {error}; write it again") from error


def _rows(file: str, batches: Iterable[Any]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of batches; raise an ``ArrowException`` where a text is not UTF-8."""
    number = 0
    for batch in batches:
        batch.validate(full=True)
        for number, row in enumerate(batch.to_pylist(), number + 1):  # noqa: B020 - goes on counting
            yield f"{file}:{number}", row


def _jsonl(
    file: str, local: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    with local.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            row = _object(place, line)
            roots(place, columns, optional, row)
            yield place, row


def _object(place: str, line: bytes) -> dict[str, Any]:
    """Return the object of a line of JSON; a byte-order mark before it is passed over."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:  # what is written so may be half of a character
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at {error.start + 1}"
        remedy = "convert the file, as by: iconv -f latin1 -t utf-8"
        raise DataError(f"{place}: is not UTF-8 ({byte}); {remedy}") from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{place}: holds {half}, half of a surrogate pair; give both or neither") from error
    except ValueError as error:
        raise DataError(f"{place}: not JSON: {error}; each line must be one object") from error
    except RecursionError as error:
        raise DataError(f"{place}: not JSON that can be read: nested too deeply; flatten it") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__}, not an object; write {{...}} a line")
    return row


def _saved(
    file: str, folder: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a ``Dataset.save_to_disk`` folder: state.json lists its Arrow stream files."""
    name = ""

    def batches() -> Iterator[Any]:
        nonlocal name
        for name in _data_files(file, folder):
            stream = pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / name)))
            names = roots(file, columns, optional, schema_fields(stream.schema))
            yield from (batch.select(names) for batch in stream)

    try:
        yield from _rows(file, batches())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: {name} can't be read: {error}; save the data set again") from error


def _data_files(file: str, folder: Path) -> list[str]:
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = ", ".join(f"{file}/{name}" for name in json.loads(splits.read_text("utf-8"))["splits"])
        raise DataError(f"{file}: holds several splits; name one of {names}")
    if not (folder / "state.json").is_file():
        raise DataError(f"{file}: is a folder that holds no data set; give {KINDS}")
    state = json.loads((folder / "state.json").read_text("utf-8"))
    return [part["filename"] for part in state["_data_files"]]


def roots(place: str, columns: Sequence[str], optional: Sequence[str], fields: Row) -> list[str]:
    """Return the fields of a file or row, of those in ``fields``, that have some columns in them.

    Raises:
        DataError: it lacks one.
    """
    names = [*fields]
    wanted = {root_of(path, names): path for path in [*optional, *columns]}
    for path in columns:
        if root_of(path, names) not in fields:
            raise missing(place, path, fields)
    return [name for name in wanted if name in fields]


def fits(place: str, row: Row, where: Mapping[str, Any] | None) -> bool:
    """Return whether each column has the value that ``where`` gives, or one of a list of them.

    Example:
        >>> [fits("a:1", {"level": n, "of": "x"}, {"level": [4, 5], "of": "x"}) for n in (3, 4)]
        [False, True]
    """
    wanted = {name: value if isinstance(value, list) else [value] for name, value in (where or {}).items()}
    return all(given(place, row, name) in values for name, values in wanted.items())


def seen(rows: Iterable[tuple[str, Row]], where: Mapping[str, Any] | None) -> str:
    """Describe the values that ``where`` asks for, and the most frequent ones that the rows have."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in where or {}}
    for place, row in rows:
        for name, count in counts.items():
            count[repr(given(place, row, name))] += 1
    most = {name: [value for value, _ in count.most_common(SHOWN)] for name, count in counts.items()}
    wanted = (where or {}).items()
    return ", or ".join(f"{name} is {value!r}; it is {', '.join(most[name])}" for name, value in wanted)
