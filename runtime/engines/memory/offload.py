"""Moves parts of an engine off its device and back, with their tensors left in place.

Whatever views a storage stays valid (``saver.py``): a parameter, the flat shard that FSDP2 keeps of it, an
optimizer's state. Its content waits on the host: for CUDA in pinned memory; for the CPU, whose memory is what
has to be freed, in a temporary file.
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
        self.pin = pin
        self.chunk = chunk
        self.chunks: list[torch.Tensor] = []

    def write(self, storages: list[UntypedStorage]) -> None:
        """Copy storages out, over the last ones; the copies are complete when this returns."""
        for host, device in self._pairs(storages):
            host.copy_(device, non_blocking=True)
        _synchronise(storages)

    def read(self, storages: list[UntypedStorage]) -> None:
        """Copy storages back in; the copies are complete when this returns."""
        for host, device in self._pairs(storages):
            device.copy_(host, non_blocking=True)
        _synchronise(storages)

    def _pairs(self, storages: list[UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield slices of the chunks, each with the slice of a storage that belongs there."""
        position = 0
        for storage in storages:
            remaining = _bytes(storage)
            while len(remaining):
                index, start = divmod(position, self.chunk)
                if index == len(self.chunks):
                    self.chunks.append(torch.empty(self.chunk, dtype=torch.uint8, pin_memory=self.pin))
                size = min(len(remaining), self.chunk - start)
                yield self.chunks[index][start : start + size], remaining[:size]
                position += size
                remaining = remaining[size:]


class FileCopy:
    """A temporary file without a name, in the folder that ``TMPDIR`` says: it ends with the process."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this object
        weakref.finalize(self, self.file.close)

    def write(self, storages: list[UntypedStorage]) -> None:
        """Copy storages out.

        Raises:
            OSError: the disk is full; the storages are as they were.
        """
        self.file.seek(0)
        for storage in storages:
            self.file.write(_memory(storage))
        self.file.flush()

    def read(self, storages: list[UntypedStorage]) -> None:
        """Copy storages back in."""
        self.file.seek(0)
        for storage in storages:
            count = self.file.readinto(_memory(storage))
            assert count == storage.nbytes(), f"read {count} of {storage.nbytes()} bytes"


class Residency:
    """The groups of an engine's tensors that are on its device, and host copies of those that are not.

    Invariants:
        - Tensors of a group in ``offloaded`` have no memory; their content is in the group's host copy.
        - A host copy of a group in ``_copied`` has its content as it is; of any other it may be out of date.
        - Parameters that an engine shares with another one, which has them, are in none of its groups;
          ``base`` is the residency of the other engine.
    """

    def __init__(
        self,
        owner: str,
        device: torch.device,
        groups: Mapping[str, Callable[[], Iterable[torch.Tensor]]],
        base: Residency | None = None,
    ) -> None:
        """Start with everything on the device.

        Args:
            owner: the engine's name in messages.
            device: where its tensors are.
            groups: for each group of tensors a function that returns these as they are now.
            base: the residency of the engine that has the parameters, where this one has not.
        """
        self.owner = owner
        self.groups = groups
        self.offloaded = frozenset[str]()
        self.base = base
        self._new_copy: Callable[[], PinnedCopy | FileCopy] = FileCopy
        if device.type == "cuda":
            self._new_copy = PinnedCopy
        self._memory = {group: SavedMemory(device) for group in groups}
        self._copies: dict[str, PinnedCopy | FileCopy] = {}
        self._copied: dict[str, list[tuple[UntypedStorage, int]]] = {}  # group -> storages, with their bytes

    def offload(self, groups: Iterable[str]) -> None:
        """Copy groups to the host, unless the copy there is up to date, and free their memory.

        Raises:
            RuntimeError: one is offloaded already; none of them is moved.
            OSError: the disk is full; all of them are where they were.
        """
        chosen = chosen_parts(self.owner, "offload", groups, self.groups, self.offloaded, "reload")
        for group in chosen:  # all copies first: where one fails, nothing was freed
            self._copy(group)
        for group in chosen:
            self._memory[group].give([storage for storage, _ in self._copied[group]])
        self.offloaded |= frozenset(chosen)

    def reload(self, groups: Iterable[str]) -> None:
        """Bring groups back to the device, bit for bit.

        Raises:
            RuntimeError: one is on the device already; none of them is moved.
        """
        on_device = frozenset(self.groups) - self.offloaded
        for group in chosen_parts(self.owner, "reload", groups, self.groups, on_device, "offload"):
            self._memory[group].take()
            self._copies[group].read([storage for storage, _ in self._copied[group]])
            self.offloaded -= {group}

    def need(self, groups: Iterable[str], call: str) -> None:
        """Refuse a ``call`` while any of these groups is offloaded, with a RuntimeError."""
        missing = [group for group in groups if group in self.offloaded]
        if missing:
            names = " and ".join(missing)
            law = f"{self.owner}: {call} needs its {names}, offloaded now"
            raise RuntimeError(f"{law}; call reload({missing}) first")
        if self.base:
            self.base.need([group for group in groups if group == SHARED], call)

    def changed(self, groups: Iterable[str]) -> None:
        """Note that groups, on the device, are about to change: their host copies go out of date."""
        for group in groups:
            assert group not in self.offloaded
            self._copied.pop(group, None)

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have all groups on the device during a block, and offload again what was offloaded."""
        groups = sorted(self.offloaded)
        with self.base.back() if self.base else nullcontext():
            self.reload(groups)
            try:
                yield
            finally:
                self.offload(groups)

    def _copy(self, group: str) -> None:
        """Bring the host copy of a group up to date."""
        storages = distinct_storages(self.groups[group]())
        copied = self._copied.pop(group, None)
        if copied is None or not _are_same(storages, copied):
            self._copies.setdefault(group, self._new_copy()).write(storages)
            copied = [(storage, storage.nbytes()) for storage in storages]
        self._copied[group] = copied


def _are_same(storages: list[UntypedStorage], copied: list[tuple[UntypedStorage, int]]) -> bool:
    """Return whether storages are those that were copied: at the same addresses, of the same sizes."""
    now = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    return now == [(storage.data_ptr(), size) for storage, size in copied]


def chosen_parts(
    owner: str, verb: str, names: Iterable[str], known: Iterable[str], refused: frozenset[str], opposite: str
) -> list[str]:
    """Return the parts that an engine is to move, each once.

    Args:
        owner: the engine, for errors.
        verb: what is to be done to the parts.
        names: of the parts.
        known: the names of all parts.
        refused: parts to which it was done already.
        opposite: what undoes it.

    Raises:
        ValueError: there is no such part.
        RuntimeError: a part is refused.
    """
    chosen = list(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"{owner}: {verb} knows no {', '.join(unknown)}; its parts are {', '.join(known)}")
    repeated = [name for name in chosen if name in refused]
    if repeated:
        law = f"{owner}: {verb} of {' and '.join(repeated)}, which is done already"
        raise RuntimeError(f"{law}; call {opposite}({repeated}) first, or leave it out")
    return chosen


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state; there are none before its first step."""
    tensors: list[torch.Tensor] = []
    if optimizer is None:
        return tensors
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[UntypedStorage]:
    """Return the memory of tensors, of a sharded one this rank's: each storage once, no empty ones."""
    storages: dict[int, UntypedStorage] = {}  # address -> storage
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    """Return a storage as uint8 ``[bytes]``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(storage: UntypedStorage) -> ctypes.Array[ctypes.c_char]:
    """Return a storage's memory, for file operations: ``numpy`` would forbid that the storage is resized."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _synchronise(storages: list[UntypedStorage]) -> None:
    """Wait for copies of CUDA storages."""
    devices = {storage.device for storage in storages}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
