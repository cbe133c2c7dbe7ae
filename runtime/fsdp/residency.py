"""Memory of tensors, given back and taken again, with the tensors left in place.

A storage is resized to nothing and back, so whatever views it stays valid: a parameter, the flat shard that
FSDP2 keeps of it, an optimizer's state. What was in it waits on the host: in pinned memory for CUDA; for the
CPU, whose own memory is to be freed, in a temporary file.
"""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import UntypedStorage
from torch.distributed.tensor import DTensor

CHUNK = 2**26  # bytes of one pinned allocation: torch rounds each up to a power of two


class HostCopy(Protocol):
    """Room on the host for the bytes of storages laid end to end."""

    def write(self, storages: list[UntypedStorage]) -> None:
        """Copy them out; what was written before is overwritten."""

    def read(self, storages: list[UntypedStorage]) -> None:
        """Copy them back in, in the same order."""


class PinnedCopy:
    """Page-locked host memory, in chunks that are kept from one use to the next."""

    def __init__(self, pin: bool = True, chunk: int = CHUNK) -> None:
        self.pin, self.chunk = pin, chunk
        self.chunks: list[torch.Tensor] = []

    def write(self, storages: list[UntypedStorage]) -> None:
        """Copy them out. It has happened when this returns."""
        for host, device in self._pairs(storages):
            host.copy_(device, non_blocking=True)
        _synchronise(storages)

    def read(self, storages: list[UntypedStorage]) -> None:
        """Copy them back in. It has happened when this returns."""
        for host, device in self._pairs(storages):
            device.copy_(host, non_blocking=True)
        _synchronise(storages)

    def _pairs(self, storages: list[UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the chunks, and the pieces of the storages that belong there."""
        at = 0
        for piece in map(_bytes, storages):
            while len(piece):
                index, start = divmod(at, self.chunk)
                if index == len(self.chunks):
                    self.chunks.append(torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self.pin))
                size = min(len(piece), self.chunk - start)
                yield self.chunks[index][start : start + size], piece[:size]
                at, piece = at + size, piece[size:]


class FileCopy:
    """A temporary file without a name, in the folder that ``TMPDIR`` says: nothing is left behind of it."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this object
        weakref.finalize(self, self.file.close)

    def write(self, storages: list[UntypedStorage]) -> None:
        """Copy them out.

        Raises:
            OSError: the disk is full; the storages are as they were.
        """
        self.file.seek(0)
        for storage in storages:
            self.file.write(_memory(storage))
        self.file.flush()

    def read(self, storages: list[UntypedStorage]) -> None:
        """Copy them back in."""
        self.file.seek(0)
        for storage in storages:
            count = self.file.readinto(_memory(storage))
            assert count == storage.nbytes(), f"read {count} of {storage.nbytes()} bytes"


class Residency:
    """Which parts of an engine are on its device, and host copies of those that are away.

    Args:
        owner: whose parts they are, for messages.
        device: where they belong.
        parts: name -> the tensors of that part as they are now.
    """

    def __init__(
        self, owner: str, device: torch.device, parts: Mapping[str, Callable[[], Iterable[torch.Tensor]]]
    ) -> None:
        self.owner, self.parts, self.away = owner, parts, frozenset[str]()
        self._room: Callable[[], HostCopy] = PinnedCopy if device.type == "cuda" else FileCopy
        self._copies: dict[str, HostCopy] = {}
        self._copied: dict[
            str, list[tuple[UntypedStorage, int]]
        ] = {}  # what each host copy holds, and its bytes

    def offload(self, parts: Iterable[str]) -> None:
        """Copy parts to the host, unless the copy there is still right, and free their memory.

        Raises:
            RuntimeError: one is away already; none of them is moved.
            OSError: the disk is full; all of them are where they were.
        """
        chosen = self._chosen(parts, "offload", self.away, "reload")
        for part in chosen:
            self._copy(part)
        free([storage for part in chosen for storage, _ in self._copied[part]])
        self.away |= frozenset(chosen)

    def reload(self, parts: Iterable[str]) -> None:
        """Bring parts back to the device, bit for bit.

        Raises:
            RuntimeError: one is not away; none of them is moved.
        """
        here = frozenset(self.parts) - self.away
        for part in self._chosen(parts, "reload", here, "offload"):
            for storage, size in self._copied[part]:
                storage.resize_(size)
            self._copies[part].read([storage for storage, _ in self._copied[part]])
            self.away -= {part}

    def need(self, parts: Iterable[str], what: str) -> None:
        """Refuse ``what`` while any of these parts is away.

        Raises:
            RuntimeError: it is.
        """
        if missing := [part for part in parts if part in self.away]:
            names = " and ".join(missing)
            raise RuntimeError(
                f"{self.owner}: {what} needs its {names}, offloaded now; call reload({missing}) first"
            )

    def changed(self, parts: Iterable[str]) -> None:
        """Say that parts, on the device, are about to change: their host copies are right no longer."""
        for part in parts:
            assert part not in self.away
            self._copied.pop(part, None)

    @contextmanager
    def back(self) -> Iterator[None]:
        """Bring back all that is away, and put it away again at the end."""
        away = sorted(self.away)
        self.reload(away)
        try:
            yield
        finally:
            self.offload(away)

    def _chosen(self, parts: Iterable[str], verb: str, refused: frozenset[str], other: str) -> list[str]:
        chosen = list(dict.fromkeys(parts))
        if unknown := [part for part in chosen if part not in self.parts]:
            known = ", ".join(self.parts)
            raise ValueError(f"{self.owner}: {verb} knows no {', '.join(unknown)}; its parts are {known}")
        if wrong := [part for part in chosen if part in refused]:
            raise RuntimeError(
                f"{self.owner}: {verb} of {' and '.join(wrong)} when away is {sorted(self.away)}; call "
                f"{other}({wrong}) first, or leave it out"
            )
        return chosen

    def _copy(self, part: str) -> None:
        """Bring the host copy of a part up to date, if it is not."""
        storages = distinct_storages(self.parts[part]())
        here = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        held = self._copied.pop(part, None)
        if held is not None and here == [(storage.data_ptr(), size) for storage, size in held]:
            self._copied[part] = held
            return
        self._copies.setdefault(part, self._room()).write(storages)
        self._copied[part] = [(storage, storage.nbytes()) for storage in storages]


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The state of an optimizer; nothing before its first step."""
    states = optimizer.state.values() if optimizer else ()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[UntypedStorage]:
    """The memory of tensors, of a sharded one this rank's: each storage once, no empty ones."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def free(storages: Iterable[UntypedStorage]) -> None:
    """Give the memory of storages back to the operating system, or to the CUDA driver."""
    devices = set()
    for storage in storages:
        devices.add(storage.device.type)
        storage.resize_(0)
    if "cuda" in devices:
        torch.cuda.empty_cache()
    # Blocks below glibc's threshold go back to its heap, which keeps them; other libraries lack the call.
    if "cpu" in devices and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    """A storage as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(storage: UntypedStorage) -> ctypes.Array[ctypes.c_char]:
    """The memory of a storage, for file operations: ``numpy`` would forbid that the storage is resized."""
    kind: type[ctypes.Array[ctypes.c_char]] = ctypes.c_char * storage.nbytes()
    return kind.from_address(storage.data_ptr())


def _synchronise(storages: list[UntypedStorage]) -> None:
    """Wait for copies of CUDA storages."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
