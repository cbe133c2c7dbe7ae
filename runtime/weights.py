"""Weights from the pool that trains a model to the pool that serves it, a bucket at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

BUCKET = 2**28  # bytes that travel together, and that a device holds for it; a larger tensor goes alone

Named = tuple[str, torch.Tensor]
Header = list[tuple[str, torch.Size, torch.dtype]]


class Broadcast:
    """From one device to all of a pool, over a process group of them."""

    def __init__(self, group: dist.ProcessGroup, sender: int, device: str, dtype: str) -> None:
        """A link; collective.

        Args:
            group: the sender and the receivers.
            sender: its global rank.
            device: where the tensors travel from and to, ``cpu`` or ``cuda``.
            dtype: that floating-point weights travel in, the serve engine's.
        """
        self.group, self.sender, self.device = group, sender, device
        self.dtype: torch.dtype = getattr(torch, dtype)

    def send(self, named: Iterable[Named], bucket_bytes: int = BUCKET) -> None:
        """Send every tensor; ``receive`` runs on all the others at the same time."""
        cast = ((name, t.to(self.dtype) if t.is_floating_point() else t) for name, t in named)
        for bucket in buckets(cast, bucket_bytes):
            self._announce([(name, tensor.shape, tensor.dtype) for name, tensor in bucket])
            flat = torch.cat([tensor.flatten() for _, tensor in bucket]).to(self.device)
            dist.broadcast(flat, self.sender, self.group)
        self._announce([])

    def receive(self) -> Iterator[Named]:
        """The tensors that are sent; each is good until the next is asked for."""
        while header := self._announce([]):
            sizes = [shape.numel() for _, shape, _ in header]
            flat = torch.empty(sum(sizes), dtype=header[0][2], device=self.device)
            dist.broadcast(flat, self.sender, self.group)
            for (name, shape, _), part in zip(header, flat.split(sizes), strict=True):
                yield name, part.view(shape)

    def _announce(self, header: Header) -> Header:
        """The sender's header, on all: what the next bucket holds, nothing after the last."""
        held = [header]
        dist.broadcast_object_list(held, self.sender, self.group)
        return held[0]


class Files:
    """As ``Broadcast``, but the tensors lie in files of a folder that all see; only their names travel."""

    def __init__(self, group: dist.ProcessGroup, sender: int, folder: str, dtype: str) -> None:
        """A link; collective.

        Args:
            group: the sender and the receivers.
            sender: its global rank.
            folder: where the files lie while weights are under way.
            dtype: that floating-point weights travel in, the serve engine's.
        """
        self.group, self.sender, self.folder = group, sender, Path(folder)
        self.dtype: torch.dtype = getattr(torch, dtype)

    def send(self, named: Iterable[Named], bucket_bytes: int = BUCKET) -> None:
        """Write every tensor; ``receive`` runs on all the others at the same time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cast = ((name, t.to(self.dtype) if t.is_floating_point() else t) for name, t in named)
        for number, bucket in enumerate(buckets(cast, bucket_bytes)):
            path = self.folder / f"weights-{os.getpid()}-{number}.safetensors"
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket}, path)
            self._announce(str(path))
            dist.barrier(self.group)  # all have read it
            path.unlink()
        self._announce("")

    def receive(self) -> Iterator[Named]:
        """The tensors that are sent, bucket by bucket."""
        while path := self._announce(""):
            tensors = load_file(path)
            dist.barrier(self.group)
            yield from tensors.items()

    def _announce(self, path: str) -> str:
        """The sender's next file, on all; nothing after the last."""
        held = [path]
        dist.broadcast_object_list(held, self.sender, self.group)
        return held[0]


class Handover:
    """Between two pools in one process: the tensors themselves."""

    def __init__(self) -> None:
        self.tensors: list[Named] = []

    def send(self, named: Iterable[Named]) -> None:
        """Lay the tensors down for ``receive``, which follows before they change."""
        self.tensors = list(named)

    def receive(self) -> Iterator[Named]:
        """The tensors that were laid down, each once."""
        while self.tensors:
            yield self.tensors.pop(0)


def buckets(named: Iterable[Named], size: int) -> Iterator[list[Named]]:
    """Tensors of one dtype, together of at most ``size`` bytes; a larger one alone."""
    bucket: list[Named] = []
    held = 0
    for name, tensor in named:
        mixed = bool(bucket) and tensor.dtype != bucket[0][1].dtype
        if bucket and (mixed or held + tensor.nbytes > size):
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
