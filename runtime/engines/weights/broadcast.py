"""Weights that are broadcast from one device to others, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlgraph.runtime.engines.weights.transfer import Named, Peers, Weights, check_version, in_buckets


@dataclass(frozen=True)
class Header:
    """What the next bucket holds, of tensors of one dtype."""

    version: int
    names: list[str]
    shapes: list[torch.Size]
    dtype: torch.dtype


class Broadcast:
    """From one device to all of its peers."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def send(self, weights: Weights) -> None:
        """Send every tensor; ``receive`` runs on all the others at the same time."""
        for bucket in in_buckets(weights.tensors):
            names, tensors = zip(*bucket, strict=True)
            shapes = [tensor.shape for tensor in tensors]
            self.peers.tell(Header(weights.version, list(names), shapes, tensors[0].dtype))
            flat = torch.cat([tensor.flatten() for tensor in tensors]).to(self.peers.device)
            self.peers.broadcast(flat.view(torch.uint8))
        self.peers.tell(weights.version)  # the last one is over

    def receive(self, version: int) -> Weights:
        """Return the weights that are sent; each tensor is good until the next is asked for."""
        return Weights(version, self._tensors(version))

    def _tensors(self, version: int) -> Iterator[Named]:
        while isinstance(header := self.peers.tell(None), Header):
            check_version(header.version, version)
            sizes = [shape.numel() for shape in header.shapes]
            flat = torch.empty(sum(sizes), dtype=header.dtype, device=self.peers.device)
            self.peers.broadcast(flat.view(torch.uint8))
            for name, shape, part in zip(header.names, header.shapes, flat.split(sizes), strict=True):
                yield name, part.view(shape)
        check_version(header, version)
