"""AdamW on the host: masters and averages in its memory, weights as they are computed with on the device.

Gradients, clipped on the device, come bucket by bucket. Each is stepped while the next one comes and the
weights of the one before go back (ZeRO-Offload, arXiv 2101.06840)::

    gradients come    0  1  2  3
    a step               0  1  2  3
    weights go              0  1  2  3
"""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import torch
from torch.optim.adamw import adamw

from rlgraph.costs.limits import buckets
from rlgraph.runtime.engines.fsdp.shards import gradient_shards, local
from rlgraph.runtime.engines.memory.copy_stream import Copied, CopyStream, host_room, wait

WIDE = torch.float32
AVERAGES = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """AdamW over masters on the host; a step takes a device's gradients, and writes the weights there.

    It computes what ``torch.optim.AdamW`` does, fused, on the CPU. Its own parameters are the masters, in
    float32 and sharded as the device's are.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], **options: Any) -> None:
        """Copy the parameters, which may be narrowed from then on."""
        self.masters = {p: torch.nn.Parameter(p.detach().to("cpu", WIDE, copy=True)) for p in parameters}
        super().__init__(self.masters.values(), **options, fused=True)
        for master in self.masters.values():
            averages = {key: torch.zeros_like(master.detach()) for key in AVERAGES}
            self.state[master] = {"step": torch.zeros((), dtype=WIDE), **averages}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; the device has the weights before it computes further."""
        stepped = [p for p in self.masters if p.grad is not None]
        together = [*buckets(stepped, lambda p: local(p).numel() * WIDE.itemsize)]
        if not together:
            return
        device = stepped[0].device
        dtype = stepped[0].dtype
        arrivals = CopyStream(device)
        departures = CopyStream(device)
        # of each two: one is worked on while the other's copy runs
        gradients = _rooms(together, WIDE, device)
        weights = _rooms(together, dtype, device)
        arrived = list[Copied]()
        departed = list[Copied]()
        for number, (bucket, room, narrow) in enumerate(zip(together, gradients, weights, strict=True)):
            for ahead in range(len(arrived), min(number + 2, len(together))):
                shards = gradient_shards(together[ahead])
                arrived.append(arrivals.copy(zip(gradients[ahead], shards, strict=True)))
            wait(arrived[number])
            self._step(bucket, room)
            if number > 1:
                wait(departed[number - 2])
            for narrow_weight, parameter in zip(narrow, bucket, strict=True):
                narrow_weight.copy_(local(self.masters[parameter]))
            departed.append(departures.copy(zip(map(local, bucket), narrow, strict=True)))
        departures.before_device(departed[-1])

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters, which something else than a step has changed, to the device."""
        for parameter, master in self.masters.items():
            local(parameter).copy_(local(master))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the device's parameters."""
        for parameter in self.masters:
            parameter.grad = None

    def _step(self, bucket: list[torch.nn.Parameter], gradients: list[torch.Tensor]) -> None:
        masters = [self.masters[parameter] for parameter in bucket]
        states = [self.state[master] for master in masters]
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        adamw(
            params=[local(master) for master in masters],
            grads=gradients,
            exp_avgs=[local(state["exp_avg"]) for state in states],
            exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def exact(optimizer: torch.optim.Optimizer | None, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter as its optimizer holds it: where that is on the host, the float32 master."""
    return optimizer.masters[parameter] if isinstance(optimizer, HostAdamW) else parameter


def _rooms(
    together: list[list[torch.nn.Parameter]], dtype: torch.dtype, device: torch.device
) -> list[list[torch.Tensor]]:
    """Return host memory for each bucket's shards; every other bucket has the same."""
    sizes = [[local(p).numel() for p in bucket] for bucket in together]
    pair = [host_room(max(map(sum, sizes)), dtype, device) for _ in range(2)]
    rooms = []
    for room, shard_sizes, bucket in zip(cycle(pair), sizes, together, strict=False):
        views = zip(room[: sum(shard_sizes)].split(shard_sizes), bucket, strict=True)
        rooms.append([view.view(local(p).shape) for view, p in views])
    return rooms
