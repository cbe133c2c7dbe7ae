"""What malloc does with memory that tensors free, on a CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE, KEPT = 128 << 20, 512 << 20  # bytes


def keep_freed_memory() -> bool:
    """Have glibc keep what tensors of up to 128 MiB free, up to 512 MiB at the end of its heap.

    By its own choice it gives an activation back to the system and faults the next one in page by page: 4 to
    8 % of a training step of a small model. Larger tensors still go back at once.

    Returns:
        Whether the C library took it; only glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_THRESHOLD, LARGE) and mallopt(M_TRIM_THRESHOLD, KEPT))
