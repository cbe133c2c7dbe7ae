"""Hashes: SplitMix64 of counters (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195), and of texts."""

from __future__ import annotations

import hashlib

from rlgraph.nodes.support.lazy import torch


def signed(number: int) -> int:
    """Return the int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


WEYL = signed(0x9E3779B97F4A7C15)  # the step from one counter to the next


def mix(counter: torch.Tensor) -> torch.Tensor:
    """Return the hash of each counter."""
    counter = (counter ^ shift(counter, 30)) * signed(0xBF58476D1CE4E5B9)
    counter = (counter ^ shift(counter, 27)) * signed(0x94D049BB133111EB)
    return counter ^ shift(counter, 31)


def shift(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros from the left; int64's own shift carries the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def text_key(text: str) -> str:
    """Return 16 hexadecimal digits of a text's BLAKE2 digest, by which an op's state knows it."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
