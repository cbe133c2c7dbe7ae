"""Gives the memory of storages back, and takes it again: tensors that view them stay valid.

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
    if device != "cuda" or user_lets_grow():
        return None
    if find_spec("torch_memory_saver") is None:
        return None
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"  # its allocator serves its regions alone: no LD_PRELOAD
    return torch_memory_saver


class SavedMemory:
    """The memory of some storages of one device.

    Invariants:
        - ``released`` has the storages between ``give`` and ``take``, and is empty at all other times.
        - With a ``_tag`` the saver has pages of this name, in which the storages at ``_paged`` are.
        - ``_pause_at_end`` is set while these pages have memory: it gives that back if this object ends.
    """

    instances: ClassVar[weakref.WeakSet[SavedMemory]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.saver = memory_saver(device.type)
        self.released: list[tuple[UntypedStorage, int]] = []  # each with its bytes
        self._tag = ""
        self._paged: list[int] = []  # addresses
        self._pause_at_end: weakref.finalize[[str], SavedMemory] | None = None
        self.instances.add(self)

    @classmethod
    def paused(cls, device: str) -> int:
        """Return the bytes of a type of device that are given back, but that torch counts as allocated."""
        paused_bytes = 0
        for memory in cls.instances:
            if memory.device.type == device and memory._tag:
                paused_bytes += sum(size for _, size in memory.released)
        return paused_bytes

    def give(self, storages: list[UntypedStorage]) -> None:
        """Give the memory of storages back to the driver, or a CPU's to the operating system."""
        self.released = [(storage, storage.nbytes()) for storage in storages]
        are_paged = bool(self._tag) and self._paged == [storage.data_ptr() for storage in storages]
        if not are_paged:
            free(storages)
        if self._pause_at_end:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._pause_at_end.detach()
            self.saver.pause(self._tag)
        if not are_paged:  # the pages that were paused hold nothing any more
            self._tag = ""
            self._pause_at_end = None

    def take(self) -> None:
        """Take memory for the storages again; its content is undefined.

        Raises:
            torch.OutOfMemoryError: a GPU has too little free memory; the storages have none still.
        """
        if self._tag:
            self._check_room()
            self.saver.resume(self._tag)
        else:
            tag = ""
            if self.saver and self.released:
                tag = f"rlgraph.{next(NUMBERS)}"
            with self.saver.region(tag=tag) if tag else nullcontext():
                for storage, size in self.released:
                    storage.resize_(size)
            self._tag = tag
            self._paged = [storage.data_ptr() for storage, _ in self.released]
        if self._tag:  # tensors that nobody holds any more leave pages that only a pause gives back
            self._pause_at_end = weakref.finalize(self, self.saver.pause, self._tag)
            self._pause_at_end.atexit = False
        self.released = []

    def _check_room(self) -> None:
        """Check that the driver has the memory to resume: without it the saver would end the process."""
        if self.device.type != "cuda":
            return
        torch.cuda.empty_cache()
        needed = sum(size for _, size in self.released)
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        if free_bytes < needed:
            law = f"{needed} bytes are to come back to {self.device}, which has {free_bytes} left"
            raise torch.OutOfMemoryError(law)


def free(storages: Iterable[UntypedStorage]) -> None:
    """Resize storages to nothing, and give their memory back to the operating system or the CUDA driver."""
    devices = set()
    for storage in storages:
        devices.add(storage.device.type)
        storage.resize_(0)
    if "cuda" in devices:
        torch.cuda.empty_cache()
    if "cpu" in devices:
        # blocks below glibc's threshold go back to its heap, which keeps them; other libraries lack the call
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim:
            trim(0)
