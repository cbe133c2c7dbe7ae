"""Texts that end a sample: looked for in what is decoded, where the newest token can complete one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlgraph.nodes.rollout.stop_text import has_text, reach
from rlgraph.ops.interfaces import Tokenizer

PARTIAL = "\ufffd"  # what a part of a character decodes to


class StopTexts:
    """The texts of a call, and the tokens that can complete one.

    Attributes:
        completes: bool ``[vocabulary]``.
        reach: tokens from the end in which a text is found whole, and a character more.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], device: torch.device) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.reach = reach(texts)
        last = {text[-1] for text in texts}
        pieces = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        # alone, a token may lose the white space that it has behind another
        every = any(letter.isspace() for letter in last)
        found = [every or PARTIAL in piece or not last.isdisjoint(piece) for piece in pieces]
        self.completes = torch.tensor([*found, False], device=device)

    def candidates(self, tokens: Tensor) -> Tensor:
        """Return the rows, ascending, whose newest token, int64 ``[rows]``, can complete a text."""
        return self.completes[tokens.clamp(max=len(self.completes) - 1)].nonzero()[:, 0]

    def stand_in(self, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens of a sample have one of the texts."""
        return has_text(self.tokenizer, tokens[-self.reach :], self.texts)
