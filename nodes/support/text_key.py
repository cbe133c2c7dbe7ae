"""A short key for a long text, by which an op's state knows a question or a source."""

from __future__ import annotations

import hashlib


def text_key(text: str) -> str:
    """Return 16 hexadecimal digits of a text's BLAKE2 digest."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
