"""Collects the experts that routers chose while samples were generated, sample by sample.

Shapes: layers and k are those of the model's routers; rows, live and samples as in ``continuous_batching``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlgraph.runtime.engines.routing import OWN, Routing


class RoutingLog:
    """The choices of routers for the tokens of each sample; ``OWN`` for a token that no pass has read."""

    def __init__(self, routing: Routing, samples: int, longest: int) -> None:
        self.routing = routing
        self.prompts: list[Tensor | None] = [None] * samples
        self.answers = torch.full((samples, longest, *routing.shape), OWN, dtype=torch.int16)

    def prompt(self, lengths: Sequence[int], source: Tensor, samples: Tensor) -> None:
        """Note the prefill of prompts, padded to the longest; ``source [rows]`` is that of each sample."""
        chosen = self.routing.take().unflatten(0, (len(lengths), -1))
        for piece, sample in zip(source.tolist(), samples.tolist(), strict=True):
            self.prompts[sample] = chosen[piece, : lengths[piece]]

    def token(self, places: Tensor) -> None:
        """Note a step of decoding; ``places [live]`` say which tokens of all answers it read."""
        self.answers.flatten(0, 1)[places.cpu()] = self.routing.take()

    def of(self, sample: int, tokens: int) -> Tensor:
        """Return a sample's choices with so many new tokens: int16 ``[prompt + tokens, layers, k]``."""
        prompt = self.prompts[sample]
        prompt = self.answers[sample, :0] if prompt is None else prompt
        return torch.cat([prompt, self.answers[sample, :tokens]])
