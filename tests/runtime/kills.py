"""A layer between a process and its files that ends it by SIGKILL at one of its writes, or cuts the power.

Every opening for writing, write, rename, removal, new folder and sync under a folder counts, in the order in
which they come; a write that the layer ends at has brought half of its bytes. A power cut takes what was not
synced, too: a file loses what came after its last sync; of a disk in a file, its state then is copied.
TensorBoard's files, which a thread of its own writes and no resume reads, are left out.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.runtime.run import run_graph

CUT = ".cut"  # behind the name of a file that holds a disk: the copy
SKIPPED = "tensorboard"
ONE = str(Path(__file__).parent / "ones.yaml")
SETTINGS = (
    "schedule={iterations: 3, save_every: 1, keep: 1, record_every: 2}",
    "prompts.batch=2",
    "prompts.files=[ten.jsonl]",
    "eval.nodes.prompts.files=[ten.jsonl]",
    "eval.every=2",
)


class FileLayer:
    """Counts what a process does to the files under a folder; ends the process before number ``at``."""

    def __init__(self, root: Path, at: int | None, power: bool | str) -> None:
        self.root, self.at, self.power, self.count = str(root.resolve()), at, power, 0
        self.synced: dict[str, int] = {}  # file -> bytes that a power cut leaves
        self.kinds: list[str] = []

    def covers(self, path: str) -> bool:
        return path.startswith(self.root) and SKIPPED not in path

    def event(self, kind: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        """Count one; end the process, after ``half`` of what it was to do, if its turn has come."""
        if not self.covers(path):
            return
        self.count += 1
        self.kinds.append(f"{kind} {path.removeprefix(self.root)}")
        if self.count == self.at:
            half()
            if self.power:
                self.cut()
            os.kill(os.getpid(), signal.SIGKILL)

    def cut(self) -> None:
        if isinstance(self.power, str):
            shutil.copyfile(self.power, f"{self.power}{CUT}")
            return
        for path, left in [*self.synced.items()]:  # a thread may add to them
            if os.path.isfile(path):
                os.truncate(path, min(left, os.path.getsize(path)))

    def written(self, path: str, before: int = 0) -> None:
        """Note that a file has bytes that are not synced, behind those that are."""
        if self.covers(path):
            self.synced.setdefault(path, before)

    def renamed(self, old: str, new: str) -> None:
        for path in [one for one in self.synced if one == old or one.startswith(f"{old}/")]:
            self.synced[new + path.removeprefix(old)] = self.synced.pop(path)

    def install(self) -> None:
        """Put the layer under this process's functions."""
        for name in ("rename", "replace"):
            setattr(os, name, partial(self._rename, getattr(os, name)))
        for name in ("unlink", "remove", "rmdir", "mkdir"):
            setattr(os, name, partial(self._named, name, getattr(os, name)))
        os.fsync = partial(self._fsync, os.fsync)
        io.open = partial(self._open, io.open)  # type: ignore[assignment]
        builtins.open = io.open
        import safetensors.torch
        import transformers.modeling_utils as modeling

        for module, name in ((safetensors.torch, "save_file"), (modeling, "safe_save_file")):
            setattr(module, name, partial(self._save_file, getattr(module, name)))

    def _rename(self, rename: Any, old: Any, new: Any, **options: Any) -> None:
        source, target = absolute(old), absolute(new)
        self.event("rename", source)
        rename(old, new, **options)
        self.renamed(source, target)

    def _named(self, kind: str, function: Any, path: Any, *args: Any, **options: Any) -> None:
        self.event(kind, absolute(path, options.get("dir_fd")))
        function(path, *args, **options)

    def _fsync(self, fsync: Any, handle: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")
        self.event("fsync", path)
        fsync(handle)
        self.synced.pop(path, None)

    def _open(self, open_file: Any, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        path = "" if isinstance(file, int) else absolute(file)
        if not set(mode) & set("wax+") or not self.covers(path):
            return open_file(file, mode, *args, **options)
        self.event("open", path)
        size = os.path.getsize(path) if "w" not in mode and os.path.isfile(path) else 0
        raw = CountedFile(self, path, mode.replace("b", "").replace("t", ""))
        self.written(path, size)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, options.get("encoding"))

    def _save_file(self, save_file: Any, tensors: Any, path: Any, *args: Any, **options: Any) -> None:
        def half() -> None:
            save_file(tensors, path, *args, **options)
            os.truncate(path, os.path.getsize(path) // 2)

        self.event("save", absolute(path), half)
        save_file(tensors, path, *args, **options)
        self.written(absolute(path))


class CountedFile(io.FileIO):
    """A file whose writes count."""

    def __init__(self, layer: FileLayer, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self.layer, self.path = layer, path

    def write(self, data: Any) -> int | None:
        put, data = super().write, bytes(data)
        self.layer.event("write", self.path, lambda: put(data[: len(data) // 2]))
        return put(data)


def absolute(path: Any, folder: int | None = None) -> str:
    """Return a path in full; ``folder`` is a file descriptor that it is relative to."""
    base = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.join(base, os.fsdecode(path))


def attempt(root: str, at: int | None, power: bool | str, log: str, work: Callable[[], object]) -> None:
    """Do some work with the layer under it, in this process; write what came, and what it did, to a file."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    layer = FileLayer(Path(root), at, power)
    layer.install()
    try:
        work()
    finally:
        os.write(output, "\n".join(["", *layer.kinds, f"events {layer.count}", ""]).encode())
        sys.stdout.flush()


def train(run_dir: str, resume: bool = False, steps: int | None = None) -> None:
    run_graph(ONE, SETTINGS, 1, steps=steps, run_dir=Path(run_dir), resume=resume, inline=True)


def go_on(run_dir: str) -> None:
    """As a user would who follows what the errors say."""
    try:
        train(run_dir, resume=True)
    except RunError as error:
        if "leave out --resume" not in str(error):
            raise
        train(run_dir)


def in_folder(
    folder: str,
    environment: dict[str, str],
    root: str,
    at: int | None,
    power: bool | str,
    work: Callable[[], object],
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    attempt(root, at, power, "said", work)
