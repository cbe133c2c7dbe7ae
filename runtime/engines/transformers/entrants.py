"""Samples before they enter a batch: those of one request together, with the state of each.

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

    @property
    def samples(self) -> int:
        """Return how many there are."""
        return self.state.shape[1]

    def split(self, rows: int) -> list[Entrants]:
        """Return them in groups of at most ``rows`` samples."""
        return [Entrants(self.prompt, state) for state in self.state.split(rows, 1) if state.shape[1]]


def entrants_of(
    requests: Sequence[Request],
    limits: Sequence[Sequence[int]],
    fewest_new: Sequence[int],
    most_new: int,
    device: torch.device,
) -> Iterator[Entrants]:
    """Yield the requests, each with the state of its samples before they enter."""
    start = 0
    for request, counts, minimum in zip(requests, limits, fewest_new, strict=True):
        length = len(request.prompt)
        samples = torch.arange(start, start + len(counts), device=device)
        start += len(counts)
        state = torch.zeros(6, len(counts), dtype=torch.int64, device=device)
        state[POSITION] = length - 1
        state[STREAM] = streams(request.seeds, device)
        state[END] = length - 1 + torch.tensor(counts, device=device)
        state[OUTPUT] = samples * most_new - length
        state[LEAST] = length - 1 + minimum
        yield Entrants(request.prompt, state)


def slices(entrants: Sequence[Entrants], budget: int) -> Iterator[list[Entrants]]:
    """Yield entrants of similar length together: at most ``budget`` padded tokens, or one request."""
    ordered = deque(sorted(entrants, key=lambda group: len(group.prompt)))
    together: list[Entrants] = []
    while ordered:
        together.append(ordered.popleft())
        if not ordered:
            yield together
            return
        padded_tokens = len(ordered[0].prompt) * (len(together) + 1)
        if padded_tokens > budget:
            yield together
            together = []
