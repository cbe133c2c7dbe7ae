"""Memory of storages, given back and taken again: what views them stays valid.

A storage is resized to nothing, and back. Where torch-memory-saver is installed, a GPU's storages come back
to pages of their own and keep their addresses from then on: giving memory back unmaps the pages, and captured
graphs, compiled kernels and NCCL's buffers that hold addresses need not be made again::

    give      take              give            take
    resize    resize, paged     pause           resume

What was in the memory is gone either way. The saver's own copy on the host is not used: it is made at every
pause, and ``offload.py`` copies only what has changed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import count
from typing import Any, ClassVar

import torch
from torch import UntypedStorage

from rlgraph.runtime.engines.memory.allocator import user_lets_grow

NUMBERS = count()


@cache
def memory_saver(device: str) -> Any:
    """Return torch_memory_saver for a type of device; None where there is none or a setting excludes it."""
    if device != "cuda" or user_lets_grow() or find_spec("torch_memory_saver") is None:
        return None
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"  # its allocator serves its regions alone: no LD_PRELOAD
    return torch_memory_saver


class SavedMemory:
    """The memory of some storages of one device."""

    every: ClassVar[weakref.WeakSet[SavedMemory]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device, self.saver = device, memory_saver(device.type)
        self.away: list[tuple[UntypedStorage, int]] = []  # each with its bytes
        self._tag, self._paged = "", list[int]()  # the saver's name of the pages, and the addresses in them
        self._unreleased: weakref.finalize[[str], SavedMemory] | None = None
        self.every.add(self)

    @classmethod
    def paused(cls, device: str) -> int:
        """Return the bytes of a type of device that are given back, but that torch counts as allocated."""
        parts = [part for part in cls.every if part.device.type == device and part._tag]
        return sum(size for part in parts for _, size in part.away)

    def give(self, storages: list[UntypedStorage]) -> None:
        """Give the memory of storages back to the driver, or a CPU's to the operating system."""
        self.away = [(storage, storage.nbytes()) for storage in storages]
        same = bool(self._tag) and self._paged == [storage.data_ptr() for storage in storages]
        if not same:
            free(storages)
        if self._unreleased:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._unreleased.detach()
            self.saver.pause(self._tag)
        if not same:  # nothing is left in the pages that were paused
            self._tag, self._unreleased = "", None

    def take(self) -> None:
        """Take memory for the storages again. What stands in it is undefined.

        Raises:
            torch.OutOfMemoryError: a GPU has too little left; the storages stay away.
        """
        if self._tag:
            self._check_room()
            self.saver.resume(self._tag)
        else:
            tag = f"rlgraph.{next(NUMBERS)}" if self.saver and self.away else ""
            with self.saver.region(tag=tag) if tag else nullcontext():
                for storage, size in self.away:
                    storage.resize_(size)
            self._tag, self._paged = tag, [storage.data_ptr() for storage, _ in self.away]
        if self._tag:  # tensors that nobody holds any more leave pages that only a pause gives back
            self._unreleased = weakref.finalize(self, self.saver.pause, self._tag)
            self._unreleased.atexit = False
        self.away = []

    def _check_room(self) -> None:
        """Refuse what the driver lacks memory for: the saver would end the process."""
        if self.device.type != "cuda":
            return
        torch.cuda.empty_cache()
        size, (room, _) = sum(size for _, size in self.away), torch.cuda.mem_get_info(self.device)
        if room < size:
            law = f"{size} bytes are to come back to {self.device}, which has {room} left"
            raise torch.OutOfMemoryError(law)


def free(storages: Iterable[UntypedStorage]) -> None:
    """Resize storages to nothing, and give their memory back to the operating system or the CUDA driver."""
    devices = set()
    for storage in storages:
        devices.add(storage.device.type)
        storage.resize_(0)
    if "cuda" in devices:
        torch.cuda.empty_cache()
    # Blocks below glibc's threshold go back to its heap, which keeps them; other libraries lack the call.
    if "cpu" in devices and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
