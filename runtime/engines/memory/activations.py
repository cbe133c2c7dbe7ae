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

MAX_LEAVING = (
    2  # tensors that are on their way at once: the host waits, rather than have the device hold more
)


class HostTensor:
    """A tensor that waits on the host."""

    def __init__(self, tensor: torch.Tensor, previous: HostTensor | None, offload: ActivationOffload) -> None:
        self.host = host_room(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)
        self.device = tensor.device
        self.offload = offload
        self.previous = weakref.ref(previous) if previous else None  # it ends with the graph of its pass
        self.offloaded = offload.to_host.copy([(self.host, tensor.detach())])
        self.fetching: tuple[torch.Tensor, Copied] | None = None

    def fetch(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self.fetching is None:
            wait(self.offloaded)
            tensor = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self.fetching = tensor, self.offload.to_device.copy([(tensor, self.host)])

    def take(self) -> torch.Tensor:
        """Return it on the device, and begin to copy the one before."""
        self.offload.land(0)
        self.fetch()
        assert self.fetching
        tensor, copied = self.fetching
        self.fetching = None
        self.offload.to_device.before_device(copied)
        previous = self.previous() if self.previous else None
        if previous:
            previous.fetch()
        return tensor


class ActivationOffload:
    """The streams of a device to its host and back, and the tensors that were saved last."""

    def __init__(self, device: torch.device) -> None:
        self.to_host = CopyStream(device)
        self.to_device = CopyStream(device)
        self.latest: weakref.ref[HostTensor] | None = None
        # tensors on their way to the host; the memory of each is needed until its copy is complete
        self.leaving: deque[tuple[torch.Tensor, Copied]] = deque()

    def saving(self) -> AbstractContextManager[None]:
        """Have floating-point tensors that autograd saves wait on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def land(self, limit: int) -> None:
        """Wait until at most ``limit`` tensors are on their way to the host."""
        while len(self.leaving) > limit:
            _, copied = self.leaving.popleft()
            wait(copied)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | HostTensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        self.land(MAX_LEAVING - 1)
        previous = self.latest() if self.latest else None
        host_tensor = HostTensor(tensor, previous, self)
        self.leaving.append((tensor.detach(), host_tensor.offloaded))
        self.latest = weakref.ref(host_tensor)
        return host_tensor


def _unpack(packed: torch.Tensor | HostTensor) -> torch.Tensor:
    return packed.take() if isinstance(packed, HostTensor) else packed
