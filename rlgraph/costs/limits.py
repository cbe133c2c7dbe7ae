"""Engines take no more at once than these limits, and the costs count with them."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from math import gcd
from typing import TypeVar

LOGITS = 2**26  # numbers of the logits that exist at once, or one token's if more: 256 MiB in float32
MASK = 2**26  # numbers of the mask of a micro-batch of packed rows: 256 MiB in float32
SMALL = 2**26  # parameters of a model that is gathered whole, once per mini-batch: 256 MiB in float32
BLOCK = 128  # tokens of a block: flex attention computes all scores of two blocks, or none
PREFILL = 8192  # padded prompt tokens that a serve engine reads in one forward pass
BUCKET = 2**28  # bytes of the tensors in a bucket, in which weights travel; a larger tensor travels alone

T = TypeVar("T")


def needs_mask(device: str, dtype: str, head: int) -> bool:
    """Return whether packed rows need a dense mask: where neither flash nor flex attention computes.

    Args:
        device: ``cuda`` or another kind.
        dtype: the name of the type that is computed in; flash attention takes 16 bits.
        head: numbers of an attention head.

    Example:
        >>> needs_mask("cuda", "bfloat16", 128), needs_mask("cuda", "float32", 128)
        (False, True)
    """
    return device != "cuda" or dtype not in ("bfloat16", "float16") or head % 8 > 0 or not 16 <= head <= 256


def head_rows(tokens: int, vocabulary: int, width: int) -> tuple[int, bool]:
    """Return of how many tokens a head computes logits at a time, and whether an update keeps what it made.

    It does where logits of all the tokens may exist at once. Those of ``width`` 4, in float32, are computed
    in pieces of 16 MiB even so, which a CPU's cache holds and C's allocator does not get from the system each
    time, but of 256 tokens at least: products of fewer are slow.

    Example:
        >>> head_rows(16384, 150_000, 2), head_rows(4096, 8192, 2), head_rows(4096, 8192, 4)
        ((447, False), (8192, True), (512, True))
    """
    most = max(1, LOGITS // vocabulary)
    kept = tokens <= most
    return min(most, max(256, 2**22 // vocabulary)) if kept and width == 4 else most, kept


def ring_ranks(key_heads: int, ranks: int) -> int:
    """Return how many of the ranks that share a row share the tokens of the same heads, a ring: as few as the
    key and value heads allow.

    Example:
        >>> ring_ranks(8, 4), ring_ranks(8, 16)
        (1, 2)
    """
    return ranks // gcd(key_heads, ranks)


def buckets(
    tensors: Iterable[T],
    nbytes: Callable[[T], int],
    kind: Callable[[T], Hashable] = lambda tensor: None,
    size: int | None = None,
) -> Iterator[list[T]]:
    """Group consecutive tensors of one kind, such as a data type, into buckets of at most ``size`` bytes,
    or ``BUCKET``.

    Example:
        >>> list(buckets([3, 4, 9, 1], nbytes=int, size=8))
        [[3, 4], [9], [1]]
    """
    bucket: list[T] = []
    held, most = 0, BUCKET if size is None else size
    for tensor in tensors:
        if bucket and (kind(tensor) != kind(bucket[0]) or held + nbytes(tensor) > most):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += nbytes(tensor)
    if bucket:
        yield bucket
