"""Cuts a sample behind the token with which a text is whole, as ``Sampling.stop`` asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlgraph.ops import Generation


def reach(texts: Sequence[str]) -> int:
    """Return in how many of the last tokens a text is found whole, each a byte at least."""
    return max(len(text.encode()) for text in texts) + 4


def has_text(tokenizer: Any, tokens: Sequence[int], texts: Sequence[str]) -> bool:
    """Return whether tokens, decoded together, have one of the texts."""
    decoded = tokenizer.decode(list(tokens))
    return any(text in decoded for text in texts)


def cut_at_text(tokenizer: Any, sample: Generation, texts: Sequence[str], checked: int = 0) -> Generation:
    """Return a sample up to the first token with which one of the texts is whole; itself where none is.

    For engines that may pass over a text: SGLang 0.5.23 looks into as many tokens as its tokenizer makes of
    the text, and a model may write it in more. The first ``checked`` tokens are known to have none.
    """
    tokens = list(sample.tokens)
    search_start = max(checked - reach(texts), 0)

    def stands_in(end: int) -> bool:
        return has_text(tokenizer, tokens[search_start:end], texts)

    if len(tokens) == checked or not stands_in(len(tokens)):
        return sample
    ends = range(checked + 1, len(tokens) + 1)
    end = ends[bisect_left(ends, True, key=stands_in)]
    if end == len(tokens):
        return sample if sample.finish == "stop" else replace(sample, finish="text")
    routing = sample.routing
    if routing is not None:
        routing = routing[: end - len(tokens)]
    return Generation(tokens[:end], sample.logprobs[:end], "text", sample.versions[:end], routing)
