"""Files that are whole at any moment, a power cut included: written aside, synced to disk, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlgraph.errors import RlgraphError, RunError

SUMS = "SHA256SUMS"  # a file in a folder: what `sha256sum --check` reads
ASIDE = ".writing"  # the end of a name: the file or folder is not complete
DROPPED = ".dropped"  # the end of a name: the folder is being removed


DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "the disk takes no more ({}); make room"),
    errno.EROFS: "the disk is read-only ({}); make it writable",
    errno.EIO: "the disk fails ({}); see to it",
}


def of_disk(error: BaseException) -> str:
    """Return a line about a disk that is full or can't be written if the error is of that kind, else ""."""
    for code, law in DISK.items():
        if f"[Errno {code}]" in str(error) or os.strerror(code) in str(error):
            problem = os.strerror(code).lower()
            if isinstance(error, OSError) and error.filename:
                problem += f": {error.filename}"
            return law.format(problem)
    return ""


def unusable_file(error: OSError) -> str:
    """Return the text of an error with a file that a user has named, and its remedy; "" for other errors."""
    disk_problem = of_disk(error)
    if disk_problem:
        return disk_problem
    if not error.filename or isinstance(error, ConnectionError):
        return ""
    name = os.fsdecode(error.filename)
    return f"{name} can't be used: {str(error.strerror).lower()}\n  {_remedy(error, name)}"


def failure(error: Exception) -> tuple[str, int] | None:
    """Return what a command prints in place of a traceback, and its exit code; None if a traceback is due."""
    if isinstance(error, RlgraphError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        text = unusable_file(error)
        return (text, 1) if text else None
    return None


def _remedy(error: OSError, name: str) -> str:
    folder = os.path.dirname(name)
    if isinstance(error, FileNotFoundError) and folder and not os.path.isdir(folder):
        return f"make its folder first: mkdir -p {shlex.quote(folder)}"
    if isinstance(error, NotADirectoryError | FileExistsError):
        return "a file is in the place of a folder: name another place, or move it"
    if isinstance(error, IsADirectoryError):
        return "that is a folder: name a file in it"
    return "name another place, or make this one accessible"


def write(path: Path, text: str) -> None:
    """Replace a file by one that is on disk as a whole; one that was there stays until then."""
    aside = path.with_name(path.name + ASIDE)
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Return once a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        RunError: it can't be read; the message names the file and why.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(
            f"{path} can't be read: {reason}\n  bring it back from a copy, or start anew"
        ) from error


def replace(folder: Path, written: Path) -> None:
    """Put a folder that is written in the place of another, once all of it is on disk."""
    for path in (*written.rglob("*"), written):
        sync(path)
    discard(folder)
    written.rename(folder)
    sync(folder.parent)


def discard(folder: Path) -> None:
    """Remove a folder; a name that it loses first says that it is not whole any more."""
    dropped = folder.with_name(folder.name + DROPPED)
    shutil.rmtree(dropped, ignore_errors=True)
    if folder.exists():
        folder.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)  # what others hold open there goes with the run's end


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the digests of a folder's files, by their names in it."""
    write(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digests that ``write_sums`` wrote.

    Raises:
        RunError: they can't be read, or a file of the folder, but for hidden ones, has none.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / SUMS} can't be read: {error}") from error
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        sums[name] = digest
    files = set()
    for path in folder.rglob("*"):
        is_hidden = path.name.startswith(".")
        if path.is_file() and not is_hidden:
            files.add(str(path.relative_to(folder)))
    without_digest = files - sums.keys() - {SUMS}
    if without_digest:
        raise RunError(f"{folder / SUMS} has no digest of {min(without_digest)}")
    return sums


def damaged(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return those of some of a folder's files that are missing, or are not what was written."""
    return [name for name in names if not _is_whole(folder / name, sums[name])]


def _is_whole(path: Path, digest: str) -> bool:
    try:
        return sha256(path) == digest
    except OSError:
        return False


def cache_root() -> Path:
    """Return the folder of what is kept between runs: ``$RLGRAPH_CACHE``, or ``rlgraph`` in the user's cache.

    That is ``$XDG_CACHE_HOME``, or ``~/.cache``.
    """
    named = os.environ.get("RLGRAPH_CACHE")
    if named:
        return Path(named)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "rlgraph"


def cache_folder() -> Path:
    """Return the folder of what is kept of data, ``data`` in that of the cache."""
    return cache_root() / "data"


def copy_of(url: str) -> Path:
    """Return the link in the cache to the newest copy of what is at a URL; it is there once a copy is."""
    return cache_folder() / "urls" / hashlib.sha256(url.encode()).hexdigest()[:32]
