"""Rows of columns that lie in several parts."""

import numpy as np
import pytest
import torch

from rlgraph.runtime.columns.chunk import LONG_ROW, Chunk, concat, gather
from rlgraph.runtime.worker.worker import Worker


def ragged(rows):
    return Chunk(np.concatenate([*rows, np.zeros(0)]), np.cumsum([0, *map(len, rows)]))


@pytest.mark.parametrize("longest", [4, 4 * LONG_ROW])  # by index, and row by row
def test_rows_of_several_parts_come_in_the_order_asked_for(longest):
    random = np.random.default_rng(0)
    held = [random.normal(size=size) for size in random.integers(0, longest, 12)]
    parts = [ragged(held[:5]), ragged([]), ragged(held[5:9]), ragged(held[9:])]
    picks = np.array([11, 0, 5, 4, 5, 9])

    found = gather(parts, picks)

    assert [row.tolist() for row in np.split(found.values, found.offsets[1:-1])] == [
        held[pick].tolist() for pick in picks
    ]
    assert len(gather(parts, [])) == 0
    assert len(concat(parts)) == 12


def test_a_mean_is_over_all_values_wherever_they_are():
    on_device = torch.full((2, 3), 0.5)  # as a tensor that no host has
    assert Worker.mean(None, Chunk(on_device), Chunk(np.array([1.0, 2.0]))) == (6.0, 8)
