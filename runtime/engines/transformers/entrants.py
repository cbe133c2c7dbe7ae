"""Samples before they enter a batch: those of one request together, with what is known of each.

Shapes: rows (slots), samples (of one request).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlgraph.ops.interfaces import Request
from rlgraph.runtime.engines.transformers.sampling import streams

# What is known of each running sample, as rows of one int64 tensor [6, rows]: its newest token and where that
# stands, its random stream, where its last token may stand, what added to a position gives its place in the
# output, and behind which position an end token may stand.
TOKEN, POSITION, STREAM, END, OUTPUT, LEAST = range(6)


@dataclass(frozen=True)
class Entrants:
    """Samples of one request that enter together."""

    prompt: Sequence[int]
    state: Tensor  # int64 [6, samples]

    def parts(self, rows: int) -> list[Entrants]:
        """Return it in parts of at most ``rows`` samples."""
        return [Entrants(self.prompt, part) for part in self.state.split(rows, 1) if part.shape[1]]


def entrants_of(
    requests: Sequence[Request],
    limits: Sequence[Sequence[int]],
    least: Sequence[int],
    longest: int,
    device: torch.device,
) -> Iterator[Entrants]:
    """Yield the requests, each with the state of its samples before they enter."""
    start = 0
    for request, counts, before in zip(requests, limits, least, strict=True):
        length, samples = len(request.prompt), torch.arange(start, start + len(counts), device=device)
        start += len(counts)
        state = torch.zeros(6, len(counts), dtype=torch.int64, device=device)
        state[POSITION], state[STREAM] = length - 1, streams(request.seeds, device)
        state[END] = length - 1 + torch.tensor(counts, device=device)
        state[OUTPUT] = samples * longest - length
        state[LEAST] = length - 1 + before
        yield Entrants(request.prompt, state)


def slices(pieces: Sequence[Entrants], budget: int) -> Iterator[list[Entrants]]:
    """Yield pieces of like length together, each slice at most ``budget`` padded tokens or one piece."""
    ordered, part = deque(sorted(pieces, key=lambda piece: len(piece.prompt))), []
    while ordered:
        part.append(ordered.popleft())
        if not ordered or len(ordered[0].prompt) * (len(part) + 1) > budget:
            yield part
            part = []
