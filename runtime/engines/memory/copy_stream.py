"""Copies between a device and its host that run beside what the device computes."""

from collections.abc import Iterable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # target, source
Copied = torch.cuda.Event | None  # the end of copies; None: they are complete


class CopyStream:
    """A CUDA stream for copies, in their order; of any other device they happen at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[Pair]) -> Copied:
        """Copy once the device has computed what it was asked for so far; host memory has to be pinned."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def before_device(self, copied: Copied) -> None:
        """Have the device wait for copies before it computes anything further; the host does not wait."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


def wait(copied: Copied) -> None:
    """Have the host wait for copies."""
    if copied is not None:
        copied.synchronize()


def host_room(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return host memory ``[numbers]`` that copies of a device can run to and from."""
    return torch.empty(numbers, dtype=dtype, pin_memory=device.type == "cuda")
