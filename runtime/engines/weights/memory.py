"""Weights that stay within a process: the tensors themselves are handed over."""

from __future__ import annotations

from rlgraph.runtime.engines.weights.transfer import Weights, check_version


class Handover:
    """Between two engines of one process."""

    def __init__(self) -> None:
        self.weights: Weights | None = None

    def send(self, weights: Weights) -> None:
        """Lay the weights down for ``receive``, which follows before they change."""
        self.weights = weights

    def receive(self, version: int) -> Weights:
        """Take the weights that were laid down, once."""
        weights, self.weights = self.weights, None
        assert weights, "nothing was sent"
        check_version(weights.version, version)
        return weights
