"""An op that writes into a column that it reads is found, and told how to copy it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.columns.chunk import Chunk, unpack
from rlgraph.runtime.columns.shared_memory import LEAST, MAPPED, SharedColumns, read
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


SHARED_WRITES: list[Callable[[Ragged], Any]] = [
    lambda value: value.values.add_(1),
    lambda value: value.values.numpy().__setitem__(LEAST - 1, 7.0),
    lambda value: value.values.data.zero_(),
]


@pytest.mark.parametrize("write", SHARED_WRITES)
def test_a_write_into_shared_memory_is_found_and_stays_in_its_process(
    write: Callable[[Ragged], Any],
) -> None:
    columns = SharedColumns(f"rlgraph-test-{os.getpid()}")
    try:
        # 1. A column in shared memory is written into.
        ones = np.ones(LEAST, np.float32)
        segment = columns.put("ones", ones, np.array([0, LEAST]))
        assert segment
        value = unpack(Chunk(read("ones", segment), segment.offsets))
        inputs = UnchangedInputs()
        inputs.add("x", "ones", value)
        inputs.check("`n` (my.py:op)")
        write(value)
        with pytest.raises(ColumnError, match=r"writes into its input `x`, the column `ones`"):
            inputs.check("`n` (my.py:op)")

        # 2. Its owner, and who maps it anew, have what they had; and see what the owner writes later.
        assert segment.name not in MAPPED
        assert (read("ones", segment) == 1).all()
        columns.drop("ones")
        again = columns.put("twos", 2 * ones, np.array([0, LEAST]))
        assert again and again.name == segment.name
        assert (read("twos", again) == 2).all()
    finally:
        columns.close()


GRAPH = """
graph: written
extends: {ones}
edits:
  - remove: [eval]
  - set:
      schedule.iterations: 1
      pools: {{gen: {{devices: 1}}, train: {{devices: 1}}}}
      models.policy.serve.pool: gen
      models.policy.train.pool: train
  - add: {{wide: {{op: '{ops}:wide', pool: gen}}}}
  - replace: {{rewards: {{op: '{ops}:writes', pool: train}}}}
"""
OPS = """
from typing import Literal
from rlgraph.ops import float32, int64, op, samples, tokens

@op
def wide(tokens: int64[samples, tokens]) -> float32[samples, tokens, Literal[8192]]:
    import torch
    return tokens.like(torch.zeros(len(tokens.values), 8192))

@op
def writes(wide: float32[samples, tokens, Literal[8192]]) -> float32[samples]:
    import torch
    wide.values[0, 0] = 1.0
    return torch.zeros(len(wide))
"""


@pytest.mark.usefixtures("in_demo")
def test_a_run_on_several_devices_ends_with_the_same_error(run_on_devices: Callable[..., str]) -> None:
    ops = Path("written_ops.py")
    ops.write_text(OPS)
    ones = Path(__file__).parent / "ones.yaml"
    Path("written.yaml").write_text(GRAPH.format(ones=ones, ops=ops))
    printed = run_on_devices("written.yaml", expect=1)
    law = "`rewards` ({}:writes) writes into its input `wide`, the column `wide`, which other steps read"
    assert law.format(ops.resolve()) in printed
    assert "change a copy: wide = wide.like(wide.values.clone())" in printed
