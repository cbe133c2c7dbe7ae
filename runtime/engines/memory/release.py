"""Releases memory of a device that a worker shares with a server: torch's cache is given back.

torch keeps what it has freed for its next tensors. A server beside the worker can't use that memory, and ends
itself where it does not get what it takes back as it wakes (torch_memory_saver exits where CUDA has no room).
"""

from __future__ import annotations

import gc

import torch


def release(device: str) -> None:
    """Give the memory that torch keeps on a CUDA device back to the driver; a CPU has nothing to give."""
    if device == "cuda":
        gc.collect()  # frees tensors that only a cycle of references holds
        torch.cuda.empty_cache()
