"""Activations that wait on the host between the forward and the backward pass.

Within ``ActivationOffload.saving`` what autograd saves goes to the host. As one tensor is asked for, the one
that was saved before it, which is the next to be asked for, begins to come back::

    forward     layer 0   layer 1   layer 2          backward   layer 2   layer 1   layer 0
    to host          0         1         2           to device        1         0
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager

import torch

from rlgraph.runtime.engines.memory.copy_stream import Copied, CopyStream, host_room, wait

GOING = 2  # tensors that are on their way at once: the host waits, rather than have the device hold more


class HostTensor:
    """A tensor that waits on the host."""

    def __init__(self, tensor: torch.Tensor, before: HostTensor | None, offload: ActivationOffload) -> None:
        self.host = host_room(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)
        self.device, self.offload = tensor.device, offload
        self.before = weakref.ref(before) if before else None  # gone with the graph of an earlier pass
        self.gone = offload.away.copy([(self.host, tensor.detach())])
        self.coming: tuple[torch.Tensor, Copied] | None = None

    def fetch(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self.coming is None:
            wait(self.gone)
            tensor = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.coming = tensor, self.offload.back.copy([(tensor, self.host)])

    def take(self) -> torch.Tensor:
        """Return it on the device, and begin to copy the one before."""
        self.offload.land(0)
        self.fetch()
        assert self.coming
        (tensor, copied), self.coming = self.coming, None
        self.offload.back.before_device(copied)
        if event := self.before and self.before():
            event.fetch()
        return tensor


class ActivationOffload:
    """The streams of a device to its host and back, and the tensors that were saved last."""

    def __init__(self, device: torch.device) -> None:
        self.away, self.back = CopyStream(device), CopyStream(device)
        self.last: weakref.ref[HostTensor] | None = None
        self.going = deque[tuple[torch.Tensor, Copied]]()  # memory of a tensor is free when its copy is made

    def saving(self) -> AbstractContextManager[None]:
        """Have floating-point tensors that autograd saves wait on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def land(self, going: int) -> None:
        """Wait until at most so many tensors are on their way to the host."""
        while len(self.going) > going:
            wait(self.going.popleft()[1])

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | HostTensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        self.land(GOING - 1)
        waiting = HostTensor(tensor, self.last() if self.last else None, self)
        self.going.append((tensor.detach(), waiting.gone))
        self.last = weakref.ref(waiting)
        return waiting


def _unpack(packed: torch.Tensor | HostTensor) -> torch.Tensor:
    return packed.take() if isinstance(packed, HostTensor) else packed
