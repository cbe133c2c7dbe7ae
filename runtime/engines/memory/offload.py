"""Parts of an engine that leave its device and come back, with their tensors left in place.

Whatever views a storage stays valid (``saver.py``): a parameter, the flat shard that FSDP2 keeps of it, an
optimizer's state. What was in it waits on the host: in pinned memory for CUDA; for the CPU, whose own memory
is to be freed, in a temporary file.
"""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import UntypedStorage
from torch.distributed.tensor import DTensor

from rlgraph.runtime.engines.memory.saver import SavedMemory

SHARED = "parameters"  # the part of which another engine may hold some
CHUNK = 2**26  # bytes of one pinned allocation: torch rounds each up to a power of two


class PinnedCopy:
    """Page-locked memory for storages laid end to end, in chunks that are kept from one use to the next."""

    def __init__(self, pin: bool = True, chunk: int = CHUNK) -> None:
        self.pin, self.chunk = pin, chunk
        self.chunks: list[torch.Tensor] = []

    def write(self, storages: list[UntypedStorage]) -> None:
        """Copy them out over what was written before. It has happened when this returns."""
        for host, device in self._pairs(storages):
            host.copy_(device, non_blocking=True)
        _synchronise(storages)

    def read(self, storages: list[UntypedStorage]) -> None:
        """Copy them back in. It has happened when this returns."""
        for host, device in self._pairs(storages):
            device.copy_(host, non_blocking=True)
        _synchronise(storages)

    def _pairs(self, storages: list[UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of the chunks, and the pieces of the storages that belong there."""
        at = 0
        for pinned_slice in map(_bytes, storages):
            while len(pinned_slice):
                index, start = divmod(at, self.chunk)
                if index == len(self.chunks):
                    self.chunks.append(torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self.pin))
                size = min(len(pinned_slice), self.chunk - start)
                yield self.chunks[index][start : start + size], pinned_slice[:size]
                at, pinned_slice = at + size, pinned_slice[size:]


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
    """The parts of an engine that are on its device, and host copies of those that are away.

    ``parts`` gives the tensors of each part as they are now; ``owner`` names it in messages. Parameters that
    are there only together with those of another engine are of no part; ``base`` is the residency of these.
    """

    def __init__(
        self,
        owner: str,
        device: torch.device,
        parts: Mapping[str, Callable[[], Iterable[torch.Tensor]]],
        base: Residency | None = None,
    ) -> None:
        self.owner, self.parts, self.away, self.base = owner, parts, frozenset[str](), base
        self._room: Callable[[], PinnedCopy | FileCopy] = PinnedCopy if device.type == "cuda" else FileCopy
        self._memory = {part: SavedMemory(device) for part in parts}
        self._copies: dict[str, PinnedCopy | FileCopy] = {}
        # what each host copy holds, with its bytes
        self._copied: dict[str, list[tuple[UntypedStorage, int]]] = {}

    def offload(self, parts: Iterable[str]) -> None:
        """Copy parts to the host, unless the copy there is still right, and free their memory.

        Raises:
            RuntimeError: one is away already; none of them is moved.
            OSError: the disk is full; all of them are where they were.
        """
        chosen = chosen_parts(self.owner, "offload", parts, self.parts, self.away, "reload")
        for part in chosen:
            self._copy(part)
        for part in chosen:
            self._memory[part].give([storage for storage, _ in self._copied[part]])
        self.away |= frozenset(chosen)

    def reload(self, parts: Iterable[str]) -> None:
        """Bring parts back to the device, bit for bit.

        Raises:
            RuntimeError: one is not away; none of them is moved.
        """
        on_device = frozenset(self.parts) - self.away
        for part in chosen_parts(self.owner, "reload", parts, self.parts, on_device, "offload"):
            self._memory[part].take()
            self._copies[part].read([storage for storage, _ in self._copied[part]])
            self.away -= {part}

    def need(self, parts: Iterable[str], call: str) -> None:
        """Refuse a ``call`` while any of these parts is away, with a RuntimeError."""
        if missing := [part for part in parts if part in self.away]:
            names = " and ".join(missing)
            law = f"{self.owner}: {call} needs its {names}, offloaded now"
            raise RuntimeError(f"{law}; call reload({missing}) first")
        if self.base:
            self.base.need([part for part in parts if part == SHARED], call)

    def changed(self, parts: Iterable[str]) -> None:
        """Say that parts, on the device, are about to change: their host copies are right no longer."""
        for part in parts:
            assert part not in self.away
            self._copied.pop(part, None)

    @contextmanager
    def back(self) -> Iterator[None]:
        """Bring back all that is away, and put it away again at the end."""
        away = sorted(self.away)
        with self.base.back() if self.base else nullcontext():
            self.reload(away)
            try:
                yield
            finally:
                self.offload(away)

    def _copy(self, part: str) -> None:
        """Bring the host copy of a part up to date, if it is not."""
        storages = distinct_storages(self.parts[part]())
        storage_places = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        copied = self._copied.pop(part, None)
        if copied is None or storage_places != [(storage.data_ptr(), size) for storage, size in copied]:
            self._copies.setdefault(part, self._room()).write(storages)
            copied = [(storage, storage.nbytes()) for storage in storages]
        self._copied[part] = copied


def chosen_parts(
    owner: str, verb: str, parts: Iterable[str], known: Iterable[str], refused: frozenset[str], opposite: str
) -> list[str]:
    """Return the parts that an engine is to move, each once.

    ``verb`` is what is done to them, ``refused`` are those that it was done to already, and ``opposite`` is
    what undoes it.

    Raises:
        ValueError: a part that there is not.
        RuntimeError: a part that is refused.
    """
    chosen = list(dict.fromkeys(parts))
    if unknown := [part for part in chosen if part not in known]:
        raise ValueError(f"{owner}: {verb} knows no {', '.join(unknown)}; its parts are {', '.join(known)}")
    if wrong := [part for part in chosen if part in refused]:
        law = f"{owner}: {verb} of {' and '.join(wrong)}, which is done already"
        raise RuntimeError(f"{law}; call {opposite}({wrong}) first, or leave it out")
    return chosen


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state; there are none before its first step."""
    states = optimizer.state.values() if optimizer else ()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[UntypedStorage]:
    """Return the memory of tensors, of a sharded one this rank's: each storage once, no empty ones."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    """Return a storage as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(storage: UntypedStorage) -> ctypes.Array[ctypes.c_char]:
    """Return a storage's memory, for file operations: ``numpy`` would forbid that the storage is resized."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _synchronise(storages: list[UntypedStorage]) -> None:
    """Wait for copies of CUDA storages."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
