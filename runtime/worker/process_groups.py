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
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import ModelPlan, Plan, TrainPlan
from rlgraph.runtime.engines.fsdp.ranks import ModelRanks
from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup
from rlgraph.runtime.engines.sequence.groups import RowGroup, SequenceGroup, row_group, sequence_group
from rlgraph.runtime.engines.weights.delta import Delta
from rlgraph.runtime.engines.weights.transfer import FOREVER, Ranks, Transport
from rlgraph.runtime.engines.weights.transports import TRANSPORTS, Handover, RemoteTransport, syncs

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl"}  # other devices have gloo


@dataclass(frozen=True)
class Groups:
    """The process groups of one worker.

    Attributes:
        mesh: all ranks of its pool.
        ranks: for each model that trains or scores there, the ranks that share it.
        links: for each model whose weights this worker sends or receives, its end of the way.
        paths: for each model whose weights are synced, the path that the plan names for them.
        store: the one at which processes have met, with a connection of its own.
    """

    mesh: DeviceMesh
    ranks: Mapping[str, ModelRanks]
    links: Mapping[str, Transport]
    paths: Mapping[str, str]
    store: dist.Store | None = None


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
    pool, index = place
    members = ranks(plan.pools)
    if mailbox is not None:  # each pool is one worker of this process
        members = {name: [0] for name in plan.pools}
    rank = members[pool][index]
    store = None
    if not dist.is_initialized():
        world = 1 + max(max(numbers) for numbers in members.values())
        store = _join_world(meeting, rank, world, device, timedelta(seconds=plan.schedule.timeout))
    # every rank makes every group, in the same order: torch asks for that
    groups = {name: dist.new_group(numbers, timeout=FOREVER) for name, numbers in members.items()}
    mesh = DeviceMesh.from_group(groups[pool], device)
    # groups inside of a pool, before links: those of torch have to follow equally many on each of their ranks
    model_ranks = _ranks_of_models(plan, pool, mesh)
    links: dict[str, Transport] = {}
    sync_steps = syncs(plan, mailbox is not None)
    _level_group_counts(rank)
    for model, sync in sync_steps.items():
        if mailbox is not None:
            links[model] = mailbox.setdefault(model, Handover())
        elif sync.action.source:
            linked = [members[sync.action.source][0], *members[sync.pool]]
            peers = Ranks(dist.new_group(linked, timeout=FOREVER), linked[0], device)
            if rank in linked:
                links[model] = _link(plan.models[model], sync.action.path, peers, rank == linked[0])
    paths = {model: sync.action.path for model, sync in sync_steps.items()}
    return Groups(mesh, model_ranks, links, paths, store)


def _join_world(meeting: str, rank: int, world: int, device: str, timeout: timedelta) -> dist.Store:
    """Wait for all workers, and return a store for what they tell each other outside of torch.

    Raises:
        RunError: not all workers came.
    """
    try:
        met_store, _, _ = next(dist.rendezvous(meeting, rank, world, timeout=timeout))
        store = dist.PrefixStore("rounds", met_store.clone())
        backend = BACKENDS.get(device, "gloo")
        dist.init_process_group(backend, timeout=timeout, world_size=world, rank=rank, store=met_store)
    except dist.DistStoreError as error:
        waited = f"{world} workers did not all meet at {meeting} in {timeout.total_seconds():.0f} s"
        raise RunError(f"{waited} (schedule.timeout)\n  {error}") from error
    return store


def _ranks_of_models(plan: Plan, pool: str, mesh: DeviceMesh) -> dict[str, ModelRanks]:
    """Return the ranks that share each model which trains or scores on a pool. Collective within the pool.

    Models with equal settings share groups. Each kind of group is made for all models before the next kind:
    all ranks of the pool make the same groups in the same order.
    """
    sections = trained_on(plan, pool)
    group = mesh.get_group()
    meshes = _meshes(plan, pool, mesh)
    sequence_groups: dict[int, SequenceGroup] = {}
    for size in sorted({section.sequence_parallel for section in sections.values()}):
        sequence_groups[size] = sequence_group(group, size)
    tensor_groups: dict[int, RowGroup] = {}
    for size in sorted({section.tensor_parallel for section in sections.values()}):
        tensor_groups[size] = row_group(group, size, "tensor_parallel")
    shapes = {name: plan.meshes[name] for name in sections}
    expert_groups: dict[Mesh, ExpertGroup] = {}
    for shape in dict.fromkeys(shapes.values()):
        expert_groups[shape] = expert_group(mesh, shape.shard, shape.experts)
    return {
        name: ModelRanks(
            meshes[name],
            group,
            sequence_groups[section.sequence_parallel],
            tensor_groups[section.tensor_parallel],
            expert_groups[shapes[name]],
        )
        for name, section in sections.items()
    }


def trained_on(plan: Plan, pool: str) -> dict[str, TrainPlan]:
    """Return the train section of each model that trains or scores on a pool, in the order of the plan."""
    sections = {name: model.train for name, model in plan.models.items() if model.train}
    return {name: section for name, section in sections.items() if section.pool == pool}


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


def _meshes(plan: Plan, pool: str, pool_mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the mesh of each model that trains on a pool: ``pool_mesh``, rows of replicas, or the ranks
    that have the same part of its layers."""
    shapes = {name: plan.meshes[name] for name in trained_on(plan, pool)}
    meshes: dict[Mesh, DeviceMesh] = {}
    for shape in dict.fromkeys(shapes.values()):
        if shape.replicate > 1:
            meshes[shape] = hybrid_mesh(pool_mesh, shape.shard)
        elif shape.tensor > 1:
            meshes[shape] = strided_mesh(pool_mesh, shape.tensor)
        else:
            meshes[shape] = pool_mesh
    return {name: meshes[shape] for name, shape in shapes.items()}


def hybrid_mesh(pool_mesh: DeviceMesh, shard: int) -> DeviceMesh:
    """Return a mesh of the same ranks, ``shard`` of them in a row. Collective among them."""
    return _rows_of(pool_mesh.mesh.view(-1, shard), pool_mesh.device_type)


def expert_group(pool_mesh: DeviceMesh, shard: int, ranks: int) -> ExpertGroup:
    """Return the ranks that each have some experts with this one, out of ``shard`` that hold a copy.
    Collective among all."""
    if ranks == 1:
        return ExpertGroup()
    rows = row_group(pool_mesh.get_group(), ranks, "expert_parallel")
    same = pool_mesh.mesh.view(-1, shard // ranks, ranks)[:, :, rows.rank]
    has_replicas = len(same) > 1
    mesh = _rows_of(same, pool_mesh.device_type) if has_replicas else strided_mesh(pool_mesh, ranks)
    return ExpertGroup(rows.group, rows.rank, rows.ranks, mesh)


def _rows_of(ranks: torch.Tensor, device: str) -> DeviceMesh:
    """Return a mesh of ranks ``[replicas, shard]``. Collective among them."""
    place = (ranks == dist.get_rank()).nonzero()[0].tolist()
    lines = [ranks[:, place[1]].tolist(), ranks[place[0]].tolist()]
    groups = [dist.new_group(line, timeout=FOREVER, use_local_synchronization=True) for line in lines]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("replicate", "shard"))


def strided_mesh(pool_mesh: DeviceMesh, stride: int) -> DeviceMesh:
    """Return a mesh of this rank and those a multiple of ``stride`` from it. Collective among them."""
    ranks = pool_mesh.mesh.view(-1, stride)
    same_part = ranks[:, int((ranks == dist.get_rank()).nonzero()[0, 1])]
    group = dist.new_group(same_part.tolist(), timeout=FOREVER, use_local_synchronization=True)
    return DeviceMesh.from_group(group, pool_mesh.device_type)


def _link(model: ModelPlan, path: str, peers: Ranks, sends: bool) -> Transport:
    """Return this worker's end of a model's link between two pools."""
    serve = model.serve
    assert serve
    folder = serve.sync_folder or ""
    if not serve.addresses:
        way = TRANSPORTS[path](peers, folder)
        return Delta(way) if serve.sync == "delta" else way
    if not sends:
        return RemoteTransport(peers, None)
    build_sender = resolve_name(serving(serve).sender)
    return RemoteTransport(peers, build_sender(serve.addresses, peers.device, path, folder))
