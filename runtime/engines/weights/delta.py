"""Weights as what has changed since they were sent last: without loss, and checked.

    sent before   w  w  w  w  w  w        both ends keep it, in host memory, as it is served
    now           w  w' w  w  w  w'
    on the way    sum of all bits, places int32 [changed], bits [changed]

Few weights in bfloat16 change with an update of reinforcement learning: most steps are smaller than half of a
weight's last bit. A tensor of which so much changed that this would be more bytes goes whole, as do all at
first. Where that was most of a version, the next ones go whole without a look, and nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlgraph.errors import RunError
from rlgraph.ops.metric import Metric
from rlgraph.runtime.engines.weights.transfer import Named, Transport, Weights

CHANGES, KEPT = "#changes", "#kept"  # behind names: changes alone are sent; all of it, and both ends keep it
MOST, REST = 0.5, 8  # the share of bytes that is too much, and how many versions go whole after one like that
CHECK, PLACE = 8, 4  # bytes: of the sum of a tensor's bits, and of the place of one that changed
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Delta:
    """A transport that sends what has changed by way of another one."""

    def __init__(self, way: Transport) -> None:
        self.way = way
        self.sent_bits: dict[str, torch.Tensor] = {}  # the bits of each tensor, flat, as they were sent last
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}  # shapes and data types of what came
        self.sent_bytes, self.total_bytes = 0, 0  # bytes of the last version, and of all its weights
        self.compared = False  # whether that version was compared with one before
        self.versions_sent_whole = 0  # how many of the next ones go without a comparison

    def send(self, weights: Weights) -> None:
        """Send the changes of every tensor, or all of it."""
        self.versions_sent_whole = max(self.versions_sent_whole - 1, 0)
        if self.compared and self.sent_bytes > MOST * self.total_bytes:
            self.versions_sent_whole = REST
            self.sent_bits = {}
        self.compared = bool(self.sent_bits)
        self.sent_bytes = 0
        self.total_bytes = 0
        self.way.send(Weights(weights.version, self._changes(weights.tensors)))

    def receive(self, version: int) -> Weights:
        """Return the weights that are sent; raises as ``Transport.receive``, and where bits differ."""
        received = self.way.receive(version)
        return Weights(received.version, self._restored(received.tensors))

    def metrics(self) -> Mapping[str, Metric]:
        """Return the share of the weights' bytes that were sent last."""
        if not self.total_bytes:
            return {}
        return {"sync/sent": Metric.of("share", [self.sent_bytes], "bytes", self.total_bytes)}

    def _changes(self, named: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in named:
            self.total_bytes += tensor.nbytes
            change = None
            mark = ""
            if not self.versions_sent_whole:
                bits = _bits(tensor)
                sent_bits = self.sent_bits.get(name)
                self.sent_bits[name] = bits
                mark = KEPT
                change = None if sent_bits is None else _change(sent_bits, bits)
            if change is None:
                self.sent_bytes += tensor.nbytes
                yield name + mark, tensor
            else:
                self.sent_bytes += change.nbytes
                yield name + CHANGES, change

    def _restored(self, named: Iterable[Named]) -> Iterator[Named]:
        for wire, tensor in named:
            name, _, mark = wire.partition("#")
            if wire == name + CHANGES:
                shape, dtype = self.kinds[name]
                bits = _changed(name, self.sent_bits[name], tensor.cpu())
                yield name, bits.view(dtype).view(shape).to(tensor.device)
                continue
            self.sent_bits.pop(name, None)
            if mark:
                self.sent_bits[name] = _bits(tensor)
                self.kinds[name] = (tensor.shape, tensor.dtype)
            yield name, tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bits in host memory, flat, as integers of its width."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().flatten()
    return flat.view(BITS[tensor.element_size()])


def _change(sent_bits: torch.Tensor, now: torch.Tensor) -> torch.Tensor | None:
    """Return uint8: what makes one of the other; None where the whole takes no more bytes."""
    places = np.flatnonzero(sent_bits.numpy() != now.numpy())  # numpy's are 3 and 13 times as fast as torch's
    size = CHECK + len(places) * (PLACE + now.element_size())
    if size >= now.nbytes or now.numel() > torch.iinfo(torch.int32).max:
        return None
    sections = _sum(now), places.astype(np.int32), now.numpy()[places]
    return torch.from_numpy(np.concatenate([section.view(np.uint8) for section in sections]))


def _sum(bits: torch.Tensor) -> Any:
    """Return int64 [1]: the sum of all, which wraps around."""
    return bits.numpy().sum(dtype=np.int64).reshape(1)


def _changed(name: str, bits: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Make a tensor's bits what they are now, in place."""
    width = bits.element_size()
    count = (len(change) - CHECK) // (PLACE + width)
    check, places, new = change.split([CHECK, count * PLACE, count * width])
    bits[places.clone().view(torch.int32).long()] = new.clone().view(bits.dtype)
    if _sum(bits) != check.clone().view(torch.int64).numpy():
        law = f"the changes of weight {name} do not make of it what was sent"
        raise RunError(f"{law}\n  start the run anew: one of the two ends has other weights than was thought")
    return bits
