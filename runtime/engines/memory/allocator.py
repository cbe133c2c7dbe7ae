"""Settings of glibc's and torch's CUDA allocators: what becomes of memory that tensors free."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE, KEPT = 128 << 20, 512 << 20  # bytes
CHOSEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables by which a user settles it


def keep_freed_memory() -> bool:
    """Have glibc keep what tensors of up to 128 MiB free, up to 512 MiB at the end of its heap.

    By its own choice it gives an activation back to the system and faults the next one in page by page: 4 to
    8 % of a training step of a small model. Larger tensors still go back at once.

    Returns:
        Whether the C library took it; only glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not mallopt(M_MMAP_THRESHOLD, LARGE):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT))


def expandable_segments(device: torch.device) -> AbstractContextManager[None]:
    """Let CUDA memory taken inside the block lie in segments that grow, unless the user settled it.

    Micro-batches differ in size: in segments of fixed size each leaves holes that do not fit the next. It
    is for passes of a model alone. What is taken outside may be shared with a server (CUDA IPC), and segments
    that grow can't be: with the setting off, torch's allocator takes no block of them (``get_free_block`` in
    CUDACachingAllocator.cpp).
    """
    is_settled = any(name in os.environ for name in CHOSEN)
    if device.type != "cuda" or is_settled:
        return nullcontext()
    return _growing(True)


def shareable(device: torch.device) -> AbstractContextManager[None]:
    """Let CUDA memory taken inside the block be shared with a server, whatever the user settled.

    torch passes a segment that grows as a file descriptor, which a server can take where it may trace the
    worker: in most containers it may not.
    """
    if device.type == "cuda" and user_lets_grow():
        return _growing(False)
    return nullcontext()


def user_lets_grow() -> bool:
    """Return whether the user settled that segments grow."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in CHOSEN)


def release(device: str) -> None:
    """Give the memory that torch keeps on a CUDA device for its next tensors back to the driver.

    A server beside the worker can't use it, and ends itself where it does not get what it takes back as it
    wakes (torch_memory_saver exits where CUDA has no room). A CPU has nothing to give.
    """
    if device == "cuda":
        gc.collect()  # frees tensors that only a cycle of references holds
        torch.cuda.empty_cache()


@contextmanager
def _growing(grows: bool) -> Iterator[None]:
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{grows}")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{not grows}")
