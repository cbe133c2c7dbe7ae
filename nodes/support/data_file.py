"""Rows of files, on this machine or by URL, in the order in which they stand there.

Places are written ``FILE:N``, N from 1: the line of a file of JSON lines, the row of any other.
"""

import fcntl
import functools
import glob
import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from rlgraph.files import cache_folder, copy_of
from rlgraph.nodes.support.arrow_rows import arrow_rows, parquet_rows, saved_rows
from rlgraph.nodes.support.row_field import DataError as DataError
from rlgraph.nodes.support.row_field import Row, Written, given, parsed
from rlgraph.nodes.support.text_rows import OPENERS, csv_rows, json_line_rows, json_rows, tsv_rows
from rlgraph.nodes.support.user_call import DaemonThreads

RowReader = Callable[[str, Path, Sequence[str], Sequence[str]], Iterator[tuple[str, Row]]]
ARROW: Mapping[str, RowReader] = {".parquet": parquet_rows, ".arrow": arrow_rows}
TEXT: Mapping[str, RowReader] = {
    ".jsonl": json_line_rows,
    ".ndjson": json_line_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": tsv_rows,
}
SUFFIXES = [*ARROW, *TEXT]
KINDS = "a file of " + ", ".join(SUFFIXES) + ", or a folder that datasets' save_to_disk wrote"
SHOWN = 8  # values of a column that an error names
# a copy that grows by less than so many bytes in so many seconds is given up: no limit of time for the whole
# would fit a file of a kilobyte and a model of a terabyte
FETCH_SECONDS, FETCH_BYTES = 300.0, 2**20
LOOK = 0.5  # seconds between two looks at what has come
PARTIAL = ".part"  # the end of a folder's name: a copy is being made in it
T = TypeVar("T")
NO_LISTING = ("http", "https", "data")  # protocols whose addresses may have ? and [ and no list of names


def read_rows(file: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """Yield the place and some columns, or more, of each row of a file: a path, or a URL that fsspec knows.

    Columns are paths of fields; those that are ``optional`` may be missing.

    Raises:
        DataError: it is not there, is of no kind that is read, lacks a column, or a column holds what has no
            value in JSON.
    """
    local = Path(local_path(file))
    if local.is_dir():
        _refuse_other_folders(file, local)
        return saved_rows(file, local, columns, optional)
    return _reader(file, local)(file, local, columns, optional)


def _reader(file: str, local: Path) -> RowReader:
    """Return what reads a file, by its suffixes."""
    suffix = local.suffix
    is_packed = suffix in OPENERS
    if is_packed:
        suffix = Path(local.stem).suffix
    if suffix in TEXT:
        return TEXT[suffix]
    if suffix not in ARROW:
        known = f"{', '.join(SUFFIXES)} ({', '.join(OPENERS)} may follow those of text)"
        law = f"{file}: is not of a kind that is read"
        raise DataError(f"{law}; convert it, or rename it if it is one of {known}")
    if is_packed:
        raise DataError(f"{file}: is compressed as a whole, and {suffix} can't be read so; decompress it")
    return ARROW[suffix]


def _refuse_other_folders(file: str, folder: Path) -> None:
    """Raise if a folder is not one data set of ``save_to_disk``."""
    description = folder / "dataset_dict.json"
    if description.is_file():
        splits = json.loads(description.read_text("utf-8"))["splits"]
        names = ", ".join(f"{file}/{split}" for split in splits)
        raise DataError(f"{file}: holds several splits; name one of {names}")
    if (folder / "state.json").is_file():
        return
    suffixes = {path.suffix for path in folder.iterdir()} & {*SUFFIXES}
    remedy = f"give {KINDS}"
    if suffixes:
        remedy = f"name its files, as {file}/*{min(suffixes)}"
    raise DataError(f"{file}: is a folder that holds no data set; {remedy}")


def matching(file: str) -> list[str]:
    """Return the files that a pattern with ``*``, ``?`` or ``[...]`` means, by name; a path alone is itself.

    Raises:
        DataError: there is none.
    """
    protocol, is_url, _ = file.partition("://")
    if is_url:
        has_pattern = protocol not in NO_LISTING and glob.has_magic(file.partition("::")[0])
    else:
        has_pattern = glob.has_magic(file) and not Path(file).exists()
    if not has_pattern:
        return [file]
    files = _matching_urls(file) if is_url else sorted(glob.glob(file, recursive=True))
    if not files:
        raise DataError(f"{file}: no file has such a name; give {KINDS}")
    return files


def _matching_urls(url: str) -> list[str]:
    system, path = _system(url)
    try:
        urls = _awaited(lambda: sorted(system.unstrip_protocol(name) for name in system.glob(path)))
    except Exception as error:  # file systems of many authors raise what they like
        law = f"{url}: can't be listed: {type(error).__name__}: {error}"
        raise DataError(f"{law}; correct the URL, or name each file") from error
    _, chained, inner = url.partition("::")  # as zip://*.jsonl::https://HOST/all.zip
    return [f"{name}{chained}{inner}" for name in urls]


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
    written_at = changed(file)
    local = Path(local_path(file))
    paths = local.iterdir() if local.is_dir() else [local]
    return written_at, sum(path.stat().st_size for path in paths)


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
    from fsspec.implementations.local import LocalFileSystem

    system, path = _system(url)
    if isinstance(system, LocalFileSystem):
        return str(path)
    try:
        copy = _awaited(lambda: _copied(url, system, path), cache_folder())
        _link(copy_of(url), copy)
    except DataError:
        raise
    except FileNotFoundError as error:  # of the web also where there is no connection
        reason = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(f"{url}: there is no such file{reason}; give {KINDS}") from error
    except Exception as error:
        law = f"{url}: can't be fetched: {type(error).__name__}: {error}"
        raise DataError(f"{law}; correct the URL, or copy the file here and give its path") from error
    return str(copy)


def _name(url: str, path: str) -> str:
    """Return the name of the file at a URL, without the query of a web address; its suffix says its kind."""
    is_address = url.partition("://")[0] in NO_LISTING
    return Path(unquote(urlsplit(path).path) if is_address else path).name


def _system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises:
        DataError: the protocol is not known, or needs a package.
    """
    import fsspec

    protocol = url.partition("://")[0]
    try:
        system, path = fsspec.url_to_fs(url, **_options(protocol))
    except ImportError as error:
        raise DataError(f"{url}: reading {protocol}:// needs a package that is not here: {error}") from error
    except Exception as error:  # file systems of many authors raise what they like
        law = f"{url}: fsspec can't read such a URL: {type(error).__name__}: {error}"
        raise DataError(f"{law}; correct it, or copy the file here and give its path") from error
    return system, path


def _options(protocol: str) -> dict[str, Any]:
    """Return what fsspec's file system of a protocol is made with."""
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    # by default a whole download may take five minutes, however well it gets on
    return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_read=FETCH_SECONDS)}}


def _copied(url: str, system: Any, path: str) -> Path:
    """Return the copy of what a URL names, which is made where there is none of its present state.

    Raises:
        DataError: nothing is there, or the URL names no file.
    """
    is_file = system.isfile(path)  # find() would return the links of a web page
    files = [path] if is_file else sorted(system.find(path))
    if not files and url.partition("://")[0] in NO_LISTING:
        system.info(path)  # says what is wrong: it may be the connection
    if not files:
        raise DataError(f"{url}: there is no such file; give {KINDS}")
    states = [f"{file} {system.ukey(file)}" for file in files]
    name = _name(url, path)
    if not name:
        raise DataError(f"{url}: names no file; give {KINDS}")
    key = hashlib.sha256("\n".join([url, *states]).encode()).hexdigest()[:32]
    copy = cache_folder() / key / name
    if not copy.exists():
        _copy(system, path, not is_file, copy)
    return copy


def _copy(system: Any, path: str, is_folder: bool, copy: Path) -> None:
    """Fetch under another name and rename, so that a copy is whole; one process of a host does it for all."""
    cache = copy.parent.parent
    cache.mkdir(parents=True, exist_ok=True)
    with copy.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if copy.exists():
            return
        with tempfile.TemporaryDirectory(PARTIAL, dir=cache, ignore_cleanup_errors=True) as partial_folder:
            target = f"{partial_folder}/{copy.name}"
            if is_folder:
                system.get(path, target, recursive=True)
            else:  # get() takes a ? in an address for a pattern, and reads a page twice, for its links
                system.get_file(path, target)
            Path(partial_folder).rename(copy.parent)


def _awaited(job: Callable[[], T], folder: Path | None = None) -> T:
    """Return what a job over a network gives, while it gets on.

    It gets on as long as copies in ``folder``, its own or that of another process which it waits for, grow by
    ``FETCH_BYTES`` in ``FETCH_SECONDS``. A file system may have limits of its own, per read or none.

    Raises:
        TimeoutError: it does not get on; its thread is left behind. Any other error is the job's.
    """
    threads = DaemonThreads(1)
    running: Future[T] = threads.submit(job)
    threads.shutdown()  # once the job is done
    size = _partial_bytes(folder)
    since = time.monotonic()
    while not wait([running], LOOK).done:
        waited = time.monotonic() - since
        new_size = _partial_bytes(folder)
        is_other_copy = new_size < size
        if is_other_copy or new_size - size >= FETCH_BYTES:
            size = new_size
            since = time.monotonic()
        elif waited > FETCH_SECONDS:
            raise TimeoutError(f"{new_size - size} bytes came in {waited:.0f} s")
    return running.result()


def _partial_bytes(folder: Path | None) -> int:
    """Return the bytes of the copies that are being made in a folder."""
    if folder is None:
        return 0
    total = 0
    for partial_folder in folder.glob(f"*{PARTIAL}"):
        for path, _, files in os.walk(partial_folder):
            for name in files:
                with suppress(FileNotFoundError):  # renamed, or gone with its folder
                    total += os.stat(f"{path}/{name}").st_size
    return total


def _link(link: Path, copy: Path) -> None:
    """Have a link lead to a copy, at any moment to a whole one."""
    if link.exists() and link.samefile(copy):
        return
    link.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=link.parent) as folder:
        new_link = Path(folder, "link")
        new_link.symlink_to(copy.absolute())
        new_link.replace(link)


def fits(place: str, row: Row, where: Mapping[str, Any] | None) -> bool:
    """Return whether each column has the value that ``where`` gives, or one of a list of them.

    Example:
        >>> [fits("a:1", {"level": n, "of": "x"}, {"level": [4, 5], "of": "x"}) for n in (3, 4)]
        [False, True]
    """
    for name, wanted in (where or {}).items():
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if not _is_one_of(given(place, row, name), allowed):
            return False
    return True


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """Return whether a value is one of some; what a file has as text alone is read as each of them is."""
    if not isinstance(value, Written):
        return value in allowed
    kinds = {bool: "boolean", int: "int64", float: "float32"}
    for allowed_value in allowed:
        kind = kinds.get(type(allowed_value), "text")
        if parsed(value, kind) == allowed_value:
            return True
    return False


def frequent_values(rows: Iterable[tuple[str, Row]], where: Mapping[str, Any] | None) -> str:
    """Describe the values that ``where`` asks for, and the most frequent ones that the rows have."""
    wanted = where or {}
    counts: dict[str, Counter[str]] = {name: Counter() for name in wanted}
    for place, row in rows:
        for name, count in counts.items():
            count[repr(given(place, row, name))] += 1
    descriptions = []
    for name, value in wanted.items():
        frequent = [text for text, _ in counts[name].most_common(SHOWN)]
        descriptions.append(f"{name} is {value!r}; it is {', '.join(frequent)}")
    return ", or ".join(descriptions)
