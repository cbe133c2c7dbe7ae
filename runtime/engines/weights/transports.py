"""The transports of weights by the path that a plan names, and whether its paths can be carried out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import load_file, save_file

from rlgraph.engines.registry import serving
from rlgraph.errors import RunError
from rlgraph.ir.actions import Lend, Sync
from rlgraph.ir.plan import Plan, ServePlan
from rlgraph.runtime.engines.weights import transfer

INDEX = "model.safetensors.index.json"  # the name that transformers gives it


class Handover:
    """A transport between two engines of one process: the tensors themselves are handed over."""

    def __init__(self) -> None:
        self.weights: transfer.Weights | None = None

    def send(self, weights: transfer.Weights) -> None:
        """Lay the weights down for ``receive``, which follows before they change."""
        self.weights = weights

    def receive(self, version: int) -> transfer.Weights:
        """Take the weights that were laid down, once."""
        weights = self.weights
        self.weights = None
        assert weights, "nothing was sent"
        transfer.check_version(weights.version, version)
        return weights


@dataclass(frozen=True)
class Header:
    """A note of what the next bucket holds; its tensors are of one dtype."""

    version: int
    names: list[str]
    shapes: list[torch.Size]
    dtype: torch.dtype


class Broadcast:
    """A transport from one device to all of its peers, a bucket at a time."""

    def __init__(self, peers: transfer.Peers) -> None:
        self.peers = peers

    def send(self, weights: transfer.Weights) -> None:
        for bucket in transfer.in_buckets(weights.tensors):
            names, tensors = zip(*bucket, strict=True)
            shapes = [tensor.shape for tensor in tensors]
            self.peers.tell(Header(weights.version, list(names), shapes, tensors[0].dtype))
            flat = torch.cat([tensor.flatten() for tensor in tensors]).to(self.peers.device)
            self.peers.broadcast(flat.view(torch.uint8))
        self.peers.tell(weights.version)  # the last one is over

    def receive(self, version: int) -> transfer.Weights:
        return transfer.Weights(version, self._tensors(version))

    def _tensors(self, version: int) -> Iterator[transfer.Named]:
        while isinstance(header := self.peers.tell(None), Header):
            transfer.check_version(header.version, version)
            sizes = [shape.numel() for shape in header.shapes]
            flat = torch.empty(sum(sizes), dtype=header.dtype, device=self.peers.device)
            self.peers.broadcast(flat.view(torch.uint8))
            for name, shape, flat_tensor in zip(header.names, header.shapes, flat.split(sizes), strict=True):
                yield name, flat_tensor.view(shape)
        transfer.check_version(header, version)


class Disk:
    """A transport through safetensors files, one per bucket, in a folder that the sender and its peers see.

    The peers read them at once; then they are removed.
    """

    def __init__(self, peers: transfer.Peers, folder: str) -> None:
        self.peers = peers
        self.folder = Path(folder)

    def send(self, weights: transfer.Weights) -> None:
        """Write every tensor, and wait until all have read them."""
        path = self.folder / f"weights-{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        try:
            index: dict[str, str] = {}
            for number, bucket in enumerate(transfer.in_buckets(weights.tensors)):
                name = f"model-{number:05d}.safetensors"
                save_file({key: tensor.detach().cpu().contiguous() for key, tensor in bucket}, path / name)
                index |= {key: name for key, _ in bucket}
            index_file = {"metadata": {"version": weights.version}, "weight_map": index}
            (path / INDEX).write_text(json.dumps(index_file), encoding="utf-8")
            self.peers.tell((str(path), weights.version))
            self.peers.wait()
        finally:
            shutil.rmtree(path)

    def receive(self, version: int) -> transfer.Weights:
        return transfer.Weights(version, self._tensors(version))

    def _tensors(self, version: int) -> Iterator[transfer.Named]:
        path, received = self.peers.tell(None)
        transfer.check_version(received, version)
        index = json.loads(Path(path, INDEX).read_text(encoding="utf-8"))
        transfer.check_version(index["metadata"]["version"], version)
        for name in dict.fromkeys(index["weight_map"].values()):
            yield from load_file(Path(path, name)).items()
        self.peers.wait()


class Sender(Protocol):
    """A worker's way to servers that run already, by which it brings them weights."""

    def bring(self, weights: transfer.Weights) -> None:
        """Bring them to all servers."""

    def close(self) -> None:
        """Part from the servers."""


class RemoteTransport:
    """A transport to servers that no worker started.

    The worker that trains sends to them (``sender``); its peers, who generate with them, only learn names.
    """

    def __init__(self, peers: transfer.Peers, sender: Sender | None) -> None:
        self.peers = peers
        self.sender = sender

    def send(self, weights: transfer.Weights) -> None:
        """Send every tensor to the servers, once all who use them are ready, and tell those."""
        assert self.sender
        names = list[str]()
        self.peers.wait()
        self.sender.bring(transfer.Weights(weights.version, transfer.noted(weights.tensors, names)))
        self.peers.tell((weights.version, names))

    def receive(self, version: int) -> transfer.Weights:
        """Return the names of what the servers were sent, each with an empty tensor."""
        return transfer.Weights(version, self._names(version))

    def _names(self, version: int) -> Iterator[transfer.Named]:
        self.peers.wait()
        received, names = self.peers.tell(None)
        transfer.check_version(received, version)
        yield from ((name, torch.empty(0)) for name in names)

    def close(self) -> None:
        if self.sender:
            self.sender.close()


# an engine that maps what it is given into its server gets it within the process too
HANDED = ("memory", "ipc")
TRANSPORTS: dict[str, Callable[[transfer.Peers, str], transfer.Transport]] = {
    "memory": lambda peers, folder: Handover(),
    "ipc": lambda peers, folder: Handover(),
    "broadcast": lambda peers, folder: Broadcast(peers),
    "disk": Disk,
}


class PlannedSync(NamedTuple):
    """A sync of the plan, and where it is."""

    node: str
    pool: str  # the pool that receives
    action: Sync


def syncs(plan: Plan, one_process: bool) -> Mapping[str, PlannedSync]:
    """Return a sync of each model that has one: all of a model go one way.

    Raises:
        RunError: a path can't be carried out, where all pools share ``one_process`` or do not.
    """
    chosen: dict[str, PlannedSync] = {}
    for step in (*plan.steps, *plan.eval_steps):
        sync = step.action
        if not isinstance(sync, Sync) or isinstance(sync, Lend):
            continue
        serve = plan.models[sync.model].serve
        assert serve
        remote = bool((sync.source and not one_process) or serve.addresses)
        problem = _problem(sync, chosen.get(sync.model), serve, remote)
        if problem:
            law = f"{step.node} of the plan sends the weights of {sync.model} by `{sync.path}`, but {problem}"
            raise RunError(f"{law}\n  make the plan anew: rlgraph plan GRAPH -o plan.json")
        chosen[sync.model] = PlannedSync(step.node, step.pool, sync)
    return chosen


def _problem(sync: Sync, earlier: PlannedSync | None, serve: ServePlan, remote: bool) -> str:
    """Return why a sync's path can't be carried out, or ""."""
    inside = sync.path in HANDED
    if sync.path not in TRANSPORTS or sync.path not in serving(serve).paths:
        return f"the engine {serve.engine} takes {' or '.join(serving(serve).paths)}"
    if earlier and earlier.action.path != sync.path:
        return f"{earlier.node} sends them by `{earlier.action.path}`"
    if inside and remote:
        return "its two engines are not in one process"
    if not inside and not remote:
        return "its two engines are in one process"
    if sync.path == "disk" and not serve.sync_folder:
        return f"models.{sync.model}.serve.sync_folder names no folder"
    return ""
