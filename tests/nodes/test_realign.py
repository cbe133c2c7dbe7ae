"""Numbers of the same text within other tokens."""

from __future__ import annotations

import pytest
import torch

from rlgraph.nodes.score.realign import realign
from rlgraph.nodes.support.ragged import Ragged

SCORED = Ragged.of([[0.0, 0.0, 0.0, 1.5, 2.5], [0.0, 3.5]])
SCORED_MASK = Ragged.of([[False, False, False, True, True], [False, True]])
SCORED_TOKENS = Ragged.of([[9, 8, 7, 21, 22], [9, 23]])
TOKENS = Ragged.of([[1, 21, 22], [1, 2, 23, 4]])
MASK = Ragged.of([[False, True, True], [False, False, True, False]])


def test_the_response_s_numbers_come_to_the_response() -> None:
    here = realign(SCORED, SCORED_MASK, SCORED_TOKENS, TOKENS, MASK)
    assert here.tolist() == [[0.0, 1.5, 2.5], [0.0, 0.0, 3.5, 0.0]]
    assert realign(here, MASK, TOKENS, SCORED_TOKENS, SCORED_MASK).tolist() == SCORED.tolist()


def test_other_tokens_and_other_counts_are_refused_by_their_row() -> None:
    with pytest.raises(ValueError, match="row 1: the tokens that are realigned are not the same"):
        realign(SCORED, SCORED_MASK, SCORED_TOKENS.like(torch.tensor([9, 8, 7, 21, 22, 9, 24])), TOKENS, MASK)
    with pytest.raises(ValueError, match="row 1: 1 tokens are realigned to 2"):
        realign(
            SCORED, SCORED_MASK, None, TOKENS, Ragged.of([[False, True, True], [True, True, False, False]])
        )
