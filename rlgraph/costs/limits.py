"""Limits of what engines take at once. The engines keep them, and the costs count with them."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from math import gcd
from typing import TypeVar

LOGITS = 2**26  # numbers of the logits that exist at once, or one token's if more: 256 MiB in float32
MASK = 2**26  # numbers of the mask of a micro-batch of packed rows: 256 MiB in float32
SMALL = 2**26  # parameters of a model that is gathered whole, once per mini-batch: 256 MiB in float32
BLOCK = 128  # tokens of a block: flex attention computes all scores of two blocks, or none
PREFILL = 8192  # padded prompt tokens that a serve engine reads in one forward pass
FOUR_BIT_BLOCK = 64  # numbers of a weight in 4 bits that share a scale, as in QLoRA
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
    if device != "cuda" or dtype not in ("bfloat16", "float16"):
        return True
    return head % 8 > 0 or not 16 <= head <= 256


def head_rows(tokens: int, vocabulary: int, width: int) -> tuple[int, bool]:
    """Return the tokens for which a head computes logits at a time, and whether an update keeps the logits.

    It keeps them if the logits of all the tokens may exist at once. Logits of ``width`` 4, in float32, are
    computed in pieces of 16 MiB even so, which a CPU's cache holds and C's allocator does not get from the
    system each time; but of 256 tokens at least, since products of fewer are slow.

    Example:
        >>> head_rows(16384, 150_000, 2), head_rows(4096, 8192, 2), head_rows(4096, 8192, 4)
        ((447, False), (8192, True), (512, True))
    """
    rows = max(1, LOGITS // vocabulary)
    keeps_logits = tokens <= rows
    if keeps_logits and width == 4:
        cached_rows = max(256, 2**22 // vocabulary)
        rows = min(rows, cached_rows)
    return rows, keeps_logits


def ring_ranks(key_heads: int, ranks: int) -> int:
    """Return the length of the rings in which ranks that share a row share the tokens of the same heads.

    It is as short as the number of key and value heads allows.

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
    """Group consecutive tensors of one kind, such as a data type, into buckets.

    A bucket has at most ``size`` bytes, or ``BUCKET``; a larger tensor has a bucket to itself.

    Example:
        >>> list(buckets([3, 4, 9, 1], nbytes=int, size=8))
        [[3, 4], [9], [1]]
    """
    limit = BUCKET if size is None else size
    bucket: list[T] = []
    bucket_bytes = 0
    for tensor in tensors:
        if bucket:
            is_other_kind = kind(tensor) != kind(bucket[0])
            if is_other_kind or bucket_bytes + nbytes(tensor) > limit:
                yield bucket
                bucket, bucket_bytes = [], 0
        bucket.append(tensor)
        bucket_bytes += nbytes(tensor)
    if bucket:
        yield bucket
