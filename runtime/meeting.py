"""The process groups of a run: one world over all workers, a part of it for each pool, and links for weights.

A link is for a model that trains on one pool and serves on another, here a policy:

    pools {train: 2, gen: 2}      world          0 1 2 3
                                  mesh of train  0 1
                                  mesh of gen        2 3
                                  link           0   2 3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.errors import RunError
from rlgraph.plan import Plan
from rlgraph.runtime.weights import Broadcast, Files, Handover


@dataclass(frozen=True)
class Groups:
    """What one worker takes part in: its pool's mesh, and the links that it sends or receives over."""

    mesh: DeviceMesh
    links: Mapping[str, Broadcast | Files | Handover]  # by model


def ranks(pools: Mapping[str, int]) -> dict[str, list[int]]:
    """The global ranks of each pool's devices.

    Example:
        >>> ranks({"train": 2, "gen": 1})
        {'train': [0, 1], 'gen': [2]}
    """
    found: dict[str, list[int]] = {}
    for pool, devices in pools.items():
        first = sum(map(len, found.values()))
        found[pool] = [*range(first, first + devices)]
    return found


def crossings(plan: Plan) -> dict[str, tuple[str, str]]:
    """Models that train on one pool and serve on another: the two."""
    pools = {
        name: (model.train["pool"], model.serve["pool"])
        for name, model in plan.models.items()
        if model.train and model.serve
    }
    return {name: both for name, both in pools.items() if both[0] != both[1]}


def meet(
    plan: Plan, place: tuple[str, int], meeting: str, device: str, desk: dict[str, Handover] | None
) -> Groups:
    """Wait for all workers, and make the groups.

    Args:
        plan: whose pools and models they are for.
        place: pool and device of this worker.
        meeting: where all meet, ``tcp://host:port``.
        device: ``cpu`` or ``cuda``.
        desk: of workers that share one process, where they hand over weights; they are one rank together.

    Raises:
        RunError: not all workers came.
    """
    members = ranks(plan.pools) if desk is None else {pool: [0] for pool in plan.pools}
    timeout = timedelta(seconds=plan.schedule["timeout"])
    rank = members[place[0]][place[1]]
    if not dist.is_initialized():
        world = 1 + max(max(own) for own in members.values())
        backend = "nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend, init_method=meeting, rank=rank, world_size=world, timeout=timeout
            )
        except dist.DistStoreError as error:
            waited = f"{world} workers did not all meet at {meeting} in {timeout.total_seconds():.0f} s"
            raise RunError(f"{waited} (schedule.timeout)\n  {error}") from error
    # every rank makes every group, in the same order: torch asks for that
    groups = {pool: dist.new_group(own, timeout=timeout) for pool, own in members.items()}
    mesh = DeviceMesh.from_group(groups[place[0]], device)
    if desk is not None:
        return Groups(mesh, {model: desk.setdefault(model, Handover()) for model in crossings(plan)})
    links: dict[str, Broadcast | Files | Handover] = {}
    for model, (source, target) in crossings(plan).items():
        linked = [members[source][0], *members[target]]
        group = dist.new_group(linked, timeout=timeout)
        if rank in linked:
            serve = plan.models[model].serve
            assert serve
            folder = serve["sync_folder"]
            links[model] = (
                Files(group, linked[0], folder, serve["dtype"])
                if folder
                else Broadcast(group, linked[0], device, serve["dtype"])
            )
    return Groups(mesh, links)
