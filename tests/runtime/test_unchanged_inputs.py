"""An op that writes into a column that it reads is found, and told how to copy it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.worker.outputs import ColumnError
from rlgraph.runtime.worker.unchanged_inputs import SMALL, UnchangedInputs


def write_by_numpy(value: torch.Tensor) -> None:
    value.numpy()[0] = 7.0


WRITES: list[tuple[Any, Callable[[Any], Any], str]] = [
    (torch.zeros(3), lambda value: value.add_(1), "x.clone()"),
    (torch.zeros(3), lambda value: value[1:].mul_(0), "x.clone()"),
    (torch.zeros(3), write_by_numpy, "x.clone()"),
    (torch.zeros(SMALL), lambda value: value.add_(1), "x.clone()"),
    (Ragged.of([[1.0], [2.0]]), lambda value: value.values.add_(1), "x.like(x.values.clone())"),
    (["a", "b"], lambda value: value.append("c"), "[*x]"),
    (["a", "b"], lambda value: value.__setitem__(0, "c"), "[*x]"),
]


@pytest.mark.parametrize(("value", "write", "copy"), WRITES)
def test_a_write_is_found(value: Any, write: Callable[[Any], Any], copy: str) -> None:
    inputs = UnchangedInputs()
    inputs.add("x", "rewards", value)
    write(value)
    with pytest.raises(ColumnError) as caught:
        inputs.check("`n` (my.py:op)")
    assert str(caught.value) == (
        "`n` (my.py:op) writes into its input `x`, the column `rewards`, which other steps read\n"
        f"  change a copy: x = {copy}"
    )


@pytest.mark.parametrize(
    "value", [torch.tensor([0.0, torch.nan]), Ragged.of([[1], []]), ["a", {"b": 1}], None, torch.zeros(SMALL)]
)
def test_what_is_only_read_is_fine(value: Any) -> None:
    inputs = UnchangedInputs()
    inputs.add("x", "rewards", value)
    if isinstance(value, torch.Tensor):
        assert (value + 1).shape == value.shape
    inputs.check("`n` (my.py:op)")


def test_tensors_that_count_no_writes_are_read_too() -> None:
    with torch.inference_mode():
        value = torch.zeros(3)
    inputs = UnchangedInputs()
    inputs.add("x", "rewards", value)
    inputs.check("`n` (my.py:op)")
