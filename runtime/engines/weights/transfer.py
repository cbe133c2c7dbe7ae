"""Weights on their way from a train engine to a serve engine: their version, their buckets, and peers.

A transport has two ends, ``send`` on the worker that trains and ``receive`` on each one that serves; which
one carries a model's weights is the plan's choice (``transports.TRANSPORTS``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlgraph.costs.limits import buckets
from rlgraph.errors import RunError

# corrections of a router (arXiv 2408.15664) stay in float32: rounded, they would choose other experts
WIDE = ("e_score_correction_bias", "expert_bias")
FOREVER = timedelta(days=7)

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The weights of one version of a model; each tensor is good until the next is asked for."""

    version: int
    tensors: Iterable[Named]


class Transport(Protocol):
    """One end of a way for weights."""

    def send(self, weights: Weights) -> None:
        """Send every tensor; ``receive`` runs on all others at the same time."""

    def receive(self, version: int) -> Weights:
        """Return the weights that are sent, as they come.

        Raises:
            RunError: they are of another version than this one.
        """


class Peers(Protocol):
    """Those between whom weights travel, as the one that sends sees them."""

    device: str  # tensors travel from it and to it

    def tell(self, note: Any) -> Any:
        """Return the sender's note, on all of them."""

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill a tensor with the sender's, on all of them."""

    def wait(self) -> None:
        """Return when all of them have what was sent."""


class Ranks:
    """``Peers`` that are workers of a process group, one of which sends: ``sender`` is its global rank."""

    def __init__(self, group: dist.ProcessGroup, sender: int, device: str) -> None:
        self.group = group
        self.sender = sender
        self.device = device

    def tell(self, note: Any) -> Any:
        message = [note]
        dist.broadcast_object_list(message, self.sender, self.group)
        return message[0]

    def broadcast(self, flat: torch.Tensor) -> None:
        dist.broadcast(flat, self.sender, self.group)

    def wait(self) -> None:
        dist.barrier(self.group)


def check_version(received: int, wanted: int) -> None:
    """Check that weights came with the version that their reader was promised; RunError otherwise."""
    if received != wanted:
        raise RunError(
            f"weights of version {received} came where version {wanted} was promised\n"
            f"  the workers do not run one plan: start the run anew"
        )


def cast(named: Iterable[Named], dtype: torch.dtype) -> Iterator[Named]:
    """Yield weights, floating-point ones in the data type that they are served in, but for ``WIDE``."""
    for name, tensor in named:
        keeps = not tensor.is_floating_point() or name.endswith(WIDE)
        yield name, tensor if keeps else tensor.to(dtype)


def noted(named: Iterable[Named], names: list[str]) -> Iterator[Named]:
    """Yield the same weights; their names are added to ``names`` as they pass."""
    for name, tensor in named:
        names.append(name)
        yield name, tensor


def in_buckets(named: Iterable[Named]) -> Iterator[list[Named]]:
    """Yield tensors of one dtype together, in the buckets that the plan counts."""
    return buckets(named, lambda one: one[1].nbytes, lambda one: one[1].dtype)
