"""Weights for servers that no worker started: the worker that trains sends to them, and none between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from rlgraph.runtime.engines.weights.transfer import Named, Peers, Weights, check_version, noted


class Sender(Protocol):
    """What brings weights to servers."""

    def bring(self, weights: Weights) -> None:
        """Bring them to all servers."""

    def close(self) -> None:
        """Part from the servers."""


class Afar:
    """Between the worker that sends to servers and those that generate with them, who only learn names."""

    def __init__(self, peers: Peers, sender: Sender | None) -> None:
        """Nothing is sent yet.

        Args:
            peers: the worker that sends, and those that use the servers.
            sender: of the former.
        """
        self.peers, self.sender = peers, sender

    def send(self, weights: Weights) -> None:
        """Send every tensor to the servers, once all who use them are ready, and tell those."""
        assert self.sender
        names = list[str]()
        self.peers.wait()
        self.sender.bring(Weights(weights.version, noted(weights.tensors, names)))
        self.peers.tell((weights.version, names))

    def receive(self, version: int) -> Weights:
        """Return the names of what the servers were sent, each with an empty tensor."""
        return Weights(version, self._names(version))

    def _names(self, version: int) -> Iterator[Named]:
        self.peers.wait()
        came, names = self.peers.tell(None)
        check_version(came, version)
        yield from ((name, torch.empty(0)) for name in names)

    def close(self) -> None:
        """Part from the servers."""
        if self.sender:
            self.sender.close()
