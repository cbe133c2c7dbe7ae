"""Checks that an op leaves the columns that it reads as they are: other steps and records read them too."""

from __future__ import annotations

from typing import Any

import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.columns.shared_memory import is_written as is_written_segment
from rlgraph.runtime.worker.outputs import ColumnError

SMALL = 64 * 1024  # bytes of a tensor on the host up to which its values are compared, too


class UnchangedInputs:
    """The columns that a call reads, as they are before it.

    A tensor counts the operations that wrote into it, which costs nothing to compare. What NumPy or ``.data``
    writes is not counted, so the values of small tensors on the host are compared as well, and of columns in
    shared memory the kernel tells. Of a list the elements are compared by identity: what is written inside an
    element is not found.
    """

    def __init__(self) -> None:
        self._before: list[tuple[str, str, Any, Any]] = []  # parameter, column, value, its state
        self._elements: list[Any] = []  # of lists, so that no new object gets the identity of an old one

    def add(self, parameter: str, column: str, value: Any) -> None:
        """Note the state of a column's value: a tensor, a ``Ragged``, or a list."""
        self._before.append((parameter, column, value, _state(value)))
        if isinstance(value, list):
            self._elements.append([*value])

    def check(self, op: str) -> None:
        """Check that no value was written into since it was added.

        Raises:
            ColumnError: one was; the message names the op, its parameter and the column.
        """
        for parameter, column, value, state in self._before:
            is_written = _is_written_in_shared_memory(value)
            if _state(value) == state and not is_written:
                continue
            law = f"{op} writes into its input `{parameter}`, the column `{column}`, which other steps read"
            raise ColumnError(f"{law}\n  change a copy: {parameter} = {_copy_text(parameter, value)}")


def _state(value: Any) -> Any:
    """Return what changes when a value is written into; None for a column that is not given."""
    if isinstance(value, Ragged):
        return _tensor_state(value.values), _tensor_state(value.offsets)
    if isinstance(value, torch.Tensor):
        return _tensor_state(value)
    return [*map(id, value)] if isinstance(value, list) else None


def _is_written_in_shared_memory(value: Any) -> bool:
    """Return whether a column in shared memory was written into."""
    tensor = value.values if isinstance(value, Ragged) else value
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        return False
    return is_written_segment(tensor.detach().numpy())


def _tensor_state(tensor: torch.Tensor) -> tuple[int, bytes]:
    version = 0 if tensor.is_inference() else tensor._version  # inference tensors count nothing
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= SMALL
    return version, tensor.detach().numpy().tobytes() if is_small else b""


def _copy_text(parameter: str, value: Any) -> str:
    """Return the expression of a copy."""
    if isinstance(value, Ragged):
        return f"{parameter}.like({parameter}.values.clone())"
    if isinstance(value, torch.Tensor):
        return f"{parameter}.clone()"
    return f"[*{parameter}]"
