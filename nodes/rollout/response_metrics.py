"""The metrics that every rollout records of its responses."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from rlgraph.ops import Context

LENGTH_KINDS = ("std", "min", "max", "p10", "p50", "p90", "p99")  # beside the mean
EXAMINED = 10_000  # characters at the end of a response that are examined for repetition
COMPRESSION = 10  # how much shorter zlib makes a text that repeats itself


def record_responses(
    ctx: Context,
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    truncated: Sequence[bool],
    responses: Sequence[str],
) -> None:
    """Record, per sample, how long response and prompt are, and which shares are cut off or repetitive."""
    ctx.record("rollout/length", lengths)
    ctx.record("rollout/length_", lengths, kind=LENGTH_KINDS)
    ctx.record("rollout/prompt_length", prompt_lengths)
    ctx.record("rollout/truncated", truncated, kind="share")
    ctx.record("rollout/repetitive", [is_repetitive(text) for text in responses], kind="share")


def is_repetitive(text: str) -> bool:
    """Return whether a text repeats itself: zlib makes a tenth of its end or less. Prose comes to a half.

    Example:
        >>> is_repetitive("It is 4. " * 80), is_repetitive("It is 4.")
        (True, False)
        >>> is_repetitive("".join(map(str, range(999))))
        False
    """
    end = text[-EXAMINED:].encode(errors="replace")
    return len(end) >= COMPRESSION * len(zlib.compress(end))
