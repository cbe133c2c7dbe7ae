"""Texts that end a sample: looked for in what is decoded, where the newest token can complete one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlgraph.nodes.rollout.stop_text import has_text, reach
from rlgraph.ops.interfaces import Tokenizer

PARTIAL = "\ufffd"  # what a part of a character decodes to


class VocabularyTokenizer(Tokenizer, Protocol):
    """A tokenizer that says how many tokens it has, and decodes several sequences in one call."""

    def __len__(self) -> int: ...

    def batch_decode(self, sequences: Any) -> list[str]: ...


class StopTexts:
    """The texts of a call, and the tokens that can complete one.

    Attributes:
        completes: bool ``[vocabulary]``.
        reach: tokens from the end in which a text is found whole, and a character more.
    """

    def __init__(self, tokenizer: VocabularyTokenizer, texts: Sequence[str], device: torch.device) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.reach = reach(texts)
        last_letters = {text[-1] for text in texts}
        decoded = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        # alone, a token may lose the white space that it has behind another
        has_white_space = any(letter.isspace() for letter in last_letters)
        can_complete = []
        for text in decoded:
            is_partial = PARTIAL in text
            has_last_letter = not last_letters.isdisjoint(text)
            can_complete.append(has_white_space or is_partial or has_last_letter)
        self.completes = torch.tensor([*can_complete, False], device=device)

    def candidates(self, tokens: Tensor) -> Tensor:
        """Return the rows, ascending, whose newest token, int64 ``[rows]``, can complete a text."""
        return self.completes[tokens.clamp(max=len(self.completes) - 1)].nonzero()[:, 0]

    def stand_in(self, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens of a sample have one of the texts."""
        return has_text(self.tokenizer, tokens[-self.reach :], self.texts)
