"""Draws of the rows that a replay holds."""

from __future__ import annotations

import torch

from rlgraph.nodes.select.replay import _uniform
from rlgraph.ops import Context


def test_numbers_by_which_rows_are_drawn_are_apart_and_between_0_and_1() -> None:
    drawn = _uniform(Context("replayed", 1, 3), torch.arange(2**16))
    assert len(drawn.unique()) == len(drawn)
    assert drawn.min() > 0 and drawn.max() < 1
