"""A reward for the words that a response shares with the answer."""

from __future__ import annotations

import re
import string
from collections import Counter

from rlgraph.nodes.support.lazy import torch
from rlgraph.ops import Context, float32, op, samples, text

PUNCTUATION = str.maketrans("", "", string.punctuation)


@op()
def f1(ctx: Context, responses: text[samples], answer: text[samples]) -> float32[samples]:
    """Token F1 of the response and the answer, 0 to 1, as SQuAD measures it (arXiv 1606.05250).

    2 c / (r + a), c the words that both have, counted as often as both have them, r and a the words of
    each. Words are what white space parts once letters are lower case, ASCII punctuation is taken out and the
    words a, an and the are dropped. 1 where neither has a word left, 0 where one of them has none. Records
    ``reward/mean``.

    Example:
        rewards: {op: reward.f1}
    """
    scores = [overlap(response, wanted) for response, wanted in zip(responses, answer, strict=True)]
    ctx.record("reward/mean", scores)
    return torch.tensor(scores, dtype=torch.float32)


def overlap(response: str, wanted: str) -> float:
    """Return the F1 of two texts.

    Example:
        >>> overlap("The cat sat.", "a cat")
        0.6666666666666666
    """
    ours, theirs = Counter(words(response)), Counter(words(wanted))
    if not ours and not theirs:
        return 1.0
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def words(response: str) -> list[str]:
    """Return the words of a text that count.

    Example:
        >>> words("It's  the U.S.A., an\\nEXAMPLE")
        ['its', 'usa', 'example']
    """
    return re.sub(r"\b(a|an|the)\b", " ", response.lower().translate(PUNCTUATION)).split()
