"""Columns in the memory of the worker that made them, read there by others of its host: each byte once.

The object store would have it copied in by the one and out by the other. Linux lets a process read another
one's memory (``process_vm_readv(2)``), where both are one user's and nothing forbids it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlgraph.errors import RunError

LEAST = 1 << 20  # bytes of a part from which on it is lent
SPANS, BYTES = 1024, 1 << 30  # of one call: at most as many spans, and about as many bytes
PR_SET_PTRACER, ANYBODY = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h: where Yama asks for it


class AwayError(RunError):
    """A worker's memory can't be read: that worker is gone."""


@dataclass(frozen=True)
class Lent:
    """A ``Part`` with a token axis, whose values lie in another process.

    Attributes:
        process: its number.
        name: that the part stays by there.
        address: of the first value.
        values: none, in a type and number.
        offsets: as of ``Part``.
    """

    process: int
    name: str
    address: int
    dtype: str
    count: int
    offsets: Any

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Any:
        """int64 ``[rows]``: tokens of each row."""
        return np.diff(self.offsets)

    def copy(self, spans: Any, target: Any) -> None:
        """Copy some of the values into an array of their type: int64 ``[spans, 3]``, from, to, and where.

        Raises:
            AwayError: the process does not let them be read any more.
        """
        starts, ends, places = spans.T * target.itemsize
        lengths = ends - starts
        there = np.stack([self.address + starts, lengths], 1)
        here = np.stack([target.ctypes.data + places, lengths], 1)
        step = int(min(SPANS, max(1, BYTES // max(1, lengths.max(initial=0)))))
        for at in range(0, len(lengths), step):
            self._read(here[at : at + step], there[at : at + step])

    def _read(self, here: Any, there: Any) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        pointers = [ctypes.c_void_p(spans.ctypes.data) for spans in (here, there)]
        count = ctypes.c_ulong(len(here))
        library.process_vm_readv.restype = ctypes.c_ssize_t
        got = library.process_vm_readv(
            self.process, pointers[0], count, pointers[1], count, ctypes.c_ulong(0)
        )
        if got != here[:, 1].sum():
            said = os.strerror(ctypes.get_errno()) if got < 0 else "it ends too early"
            raise AwayError(f"the column {self.name} in process {self.process} can't be read: {said}")


def lend(name: str, values: Any, offsets: Any) -> Lent:
    """What others read the values of a part by, as long as this process keeps them."""
    return Lent(os.getpid(), name, values.ctypes.data, values.dtype.str, len(values), offsets)


def may_be_read() -> bool:
    """Let others of the same user read this process's memory; whether this system has such a call."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "process_vm_readv"):
        return False
    library.prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)  # without Yama there is nothing to ask for
    return True
