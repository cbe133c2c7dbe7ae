"""The process groups of a run: one world over all workers, a part of it for each pool, and links for weights.

A link is for a model that trains on one pool and serves on another, here a policy:

    pools {train: 2, gen: 2}      world          0 1 2 3
                                  mesh of train  0 1
                                  mesh of gen        2 3
                                  link           0   2 3

A model that is held in several copies has a mesh of two dimensions over its pool, with a group for each copy
(a row) and one for each shard (a column). One whose layers are divided has a mesh over the ranks that have
the same part, and a group for those that have the same rows.

On CUDA tensors of the device travel over NCCL, and everything that is on the host over gloo: objects, counts
and barriers. Of NCCL a barrier would be a kernel that spins on the device until the last worker comes, beside
the server that generates there. torch takes gloo for them where a group has both and is bound to no device;
so groups are made without a ``device_id``.

A collective waits for as long as it takes: how long a step may be silent is for the driver to judge
(``schedule.timeout``), which then ends the workers. A rollout of an hour keeps other workers in a barrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice
from pkgutil import resolve_name

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.engines.registry import serving
from rlgraph.errors import RunError
from rlgraph.ir.plan import ModelPlan, Plan
from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup
from rlgraph.runtime.engines.sequence.groups import RowGroup, SequenceGroup, row_group, sequence_group
from rlgraph.runtime.engines.weights.delta import Delta
from rlgraph.runtime.engines.weights.transfer import FOREVER, Ranks, Transport
from rlgraph.runtime.engines.weights.transports import TRANSPORTS, Handover, RemoteTransport, syncs

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl"}  # other devices have gloo


@dataclass(frozen=True)
class Groups:
    """The process groups of one worker: its pool's mesh, those of the models that train there, and the links
    that it sends or receives over."""

    mesh: DeviceMesh
    meshes: Mapping[str, DeviceMesh]  # the keys are models
    sequences: Mapping[str, SequenceGroup]  # models -> the ranks that share the tokens of their rows
    tensors: Mapping[str, RowGroup]  # models -> the ranks that each have a part of their layers
    experts: Mapping[str, ExpertGroup]  # models -> the ranks that each have some of their experts
    links: Mapping[str, Transport]  # the keys are models
    paths: Mapping[str, str]  # model -> the path that the plan names for its weights
    store: dist.Store | None = None  # the one at which processes have met, with a connection of its own


def ranks(pools: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the global ranks of each pool's devices.

    Example:
        >>> ranks({"train": 2, "gen": 1})
        {'train': [0, 1], 'gen': [2]}
    """
    numbers = count()
    return {pool: [*islice(numbers, devices)] for pool, devices in pools.items()}


def meet(
    plan: Plan, place: tuple[str, int], meeting: str, device: str, mailbox: dict[str, Handover] | None
) -> Groups:
    """Wait for all workers at ``tcp://host:port``, and make the groups of the one at ``place``.

    Workers that share one process are one rank together, and leave weights for each other in ``mailbox``.

    Raises:
        RunError: not all workers came, or weights can't go the way that the plan says.
    """
    members = ranks(plan.pools) if mailbox is None else {pool: [0] for pool in plan.pools}
    timeout = timedelta(seconds=plan.schedule.timeout)
    rank, store = members[place[0]][place[1]], None
    if not dist.is_initialized():
        world, backend = 1 + max(max(own) for own in members.values()), BACKENDS.get(device, "gloo")
        try:
            met, _, _ = next(dist.rendezvous(meeting, rank, world, timeout=timeout))
            store = dist.PrefixStore("rounds", met.clone())
            dist.init_process_group(backend, timeout=timeout, world_size=world, rank=rank, store=met)
        except dist.DistStoreError as error:
            waited = f"{world} workers did not all meet at {meeting} in {timeout.total_seconds():.0f} s"
            raise RunError(f"{waited} (schedule.timeout)\n  {error}") from error
    # every rank makes every group, in the same order: torch asks for that
    groups = {pool: dist.new_group(own, timeout=FOREVER) for pool, own in members.items()}
    mesh = DeviceMesh.from_group(groups[place[0]], device)
    # groups inside of a pool, before links: those of torch have to follow equally many on each of their ranks
    meshes = _meshes(plan, place[0], mesh)
    sizes = {name: plan.models[name].train.sequence_parallel for name in meshes}
    made = {size: sequence_group(mesh.get_group(), size) for size in sorted({*sizes.values()})}
    sequences = {name: made[size] for name, size in sizes.items()}
    sizes = {name: plan.models[name].train.tensor_parallel for name in meshes}
    apart = {n: row_group(mesh.get_group(), n, "tensor_parallel") for n in sorted({*sizes.values()})}
    tensors = {name: apart[size] for name, size in sizes.items()}
    ways = {name: plan.meshes[name] for name in meshes}
    divided = {way: expert_group(mesh, way.shard, way.experts) for way in dict.fromkeys(ways.values())}
    experts = {name: divided[way] for name, way in ways.items()}
    links: dict[str, Transport] = {}
    chosen = syncs(plan, mailbox is not None)
    _level_group_counts(rank)
    for model, step in chosen.items():
        if mailbox is not None:
            links[model] = mailbox.setdefault(model, Handover())
        elif step.source:
            linked = [members[step.source][0], *members[step.pool]]
            peers = Ranks(dist.new_group(linked, timeout=FOREVER), linked[0], device)
            if rank in linked:
                links[model] = _link(plan.models[model], step.path, peers, rank == linked[0])
    paths = {model: step.path for model, step in chosen.items()}
    return Groups(mesh, meshes, sequences, tensors, experts, links, paths, store)


def _level_group_counts(rank: int) -> None:
    """Make groups of this rank alone, until each rank has made as many groups as any other.

    torch names a group that all ranks make by its count of groups. From torch 2.15 on that count includes
    groups that only their members make: pools that need other numbers of those would name the next group
    differently, and wait for each other. Before 2.15 counts are equal, and nothing is made here.
    """
    most = torch.tensor([dist.get_pg_count()])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    while dist.get_pg_count() < int(most):
        dist.new_group([rank], timeout=FOREVER, use_local_synchronization=True)


def _meshes(plan: Plan, pool: str, whole: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the mesh of each model that trains on a pool: the ``whole`` pool, rows of replicas, or the ranks
    that have the same part of its layers."""
    names = [name for name, model in plan.models.items() if model.train and model.train.pool == pool]
    made = {}
    for mesh in dict.fromkeys(plan.meshes[name] for name in names):
        made[mesh] = whole
        if mesh.replicate > 1:
            made[mesh] = hybrid_mesh(whole, mesh.shard)
        elif mesh.tensor > 1:
            made[mesh] = strided_mesh(whole, mesh.tensor)
    return {name: made[plan.meshes[name]] for name in names}


def hybrid_mesh(whole: DeviceMesh, shard: int) -> DeviceMesh:
    """Return a mesh of the same ranks, ``shard`` of them in a row. Collective among them."""
    return _rows_of(whole.mesh.view(-1, shard), whole.device_type)


def expert_group(whole: DeviceMesh, shard: int, ranks: int) -> ExpertGroup:
    """Return the ranks that each have some experts with this one, out of ``shard`` that hold a copy.
    Collective among all."""
    if ranks == 1:
        return ExpertGroup()
    own = row_group(whole.get_group(), ranks, "expert_parallel")
    same = whole.mesh.view(-1, shard // ranks, ranks)[:, :, own.rank]
    mesh = _rows_of(same, whole.device_type) if len(same) > 1 else strided_mesh(whole, ranks)
    return ExpertGroup(own.group, own.rank, own.ranks, mesh)


def _rows_of(ranks: torch.Tensor, device: str) -> DeviceMesh:
    """Return a mesh of ranks ``[replicas, shard]``. Collective among them."""
    own = (ranks == dist.get_rank()).nonzero()[0].tolist()
    lines = [ranks[:, own[1]].tolist(), ranks[own[0]].tolist()]
    groups = [dist.new_group(line, timeout=FOREVER, use_local_synchronization=True) for line in lines]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("replicate", "shard"))


def strided_mesh(whole: DeviceMesh, stride: int) -> DeviceMesh:
    """Return a mesh of this rank and those a multiple of ``stride`` from it. Collective among them."""
    ranks = whole.mesh.view(-1, stride)
    own = ranks[:, int((ranks == dist.get_rank()).nonzero()[0, 1])]
    group = dist.new_group(own.tolist(), timeout=FOREVER, use_local_synchronization=True)
    return DeviceMesh.from_group(group, whole.device_type)


def _link(model: ModelPlan, path: str, peers: Ranks, sends: bool) -> Transport:
    """Return this worker's end of a model's link between two pools."""
    serve = model.serve
    assert serve
    folder = serve.sync_folder or ""
    if not serve.addresses:
        way = TRANSPORTS[path](peers, folder)
        return Delta(way) if serve.sync == "delta" else way
    sender = serving(serve).sender
    return RemoteTransport(
        peers, resolve_name(sender)(serve.addresses, peers.device, path, folder) if sends else None
    )
