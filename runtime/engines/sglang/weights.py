"""Ways of weights into servers' memory: mapped by one on this host, or sent to servers that run already.

Flat         a bucket in shared memory (CPU) or of CUDA IPC (GPU), for the server that this process started
ServerRanks  the workers whose devices that server spans: each hands over its own
Servers      those that run already, as peers of a transport: a process group of all their ranks, or files
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.errors import RunError
from rlgraph.runtime.engines.memory.allocator import shareable
from rlgraph.runtime.engines.servers.ports import ServerPort
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.weights.pretrained import shortened_list
from rlgraph.runtime.engines.weights.transfer import Named
from rlgraph.runtime.engines.weights.transports import Header
from rlgraph.runtime.messages.errors import ServerLostError


class Flat:
    """One bucket as one flat tensor, which may be sent more than once; on a CPU it is shared memory."""

    def __init__(self, bucket: Sequence[Named], device: torch.device | None = None) -> None:
        """Take the tensors of a bucket, to a device of its own where one is given."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        names, tensors = zip(*bucket, strict=True)
        dtypes = [t.dtype for t in tensors]
        shapes = [t.shape for t in tensors]
        self.device = device or tensors[0].device
        with shareable(self.device):
            empty = FlattenedTensorBucket.empty(names, dtypes, shapes, self.device)
        self.flat = empty.get_flattened_tensor()
        self.metadata = empty.get_metadata()
        if self.device.type == "cpu":  # a server that did not start this process may not open its descriptors
            torch.multiprocessing.set_sharing_strategy("file_system")
            self.flat.share_memory_()
            if tensors[0].is_cuda:
                _pin(self)
        self.fill(bucket)

    def fits(self, bucket: Sequence[Named], device: torch.device) -> bool:
        """Return whether it was made for such a bucket on such a device."""
        layout = [(tensor_span.name, tensor_span.shape, tensor_span.dtype) for tensor_span in self.metadata]
        return device == self.device and layout == [(name, t.shape, t.dtype) for name, t in bucket]

    def fill(self, bucket: Sequence[Named]) -> None:
        """Take the tensors of a bucket that fits; from CUDA to the host they are still on their way then."""
        for tensor_span, (_, tensor) in zip(self.metadata, bucket, strict=True):
            target = self.flat[tensor_span.start_idx : tensor_span.end_idx].view(tensor_span.dtype)
            target.copy_(tensor.detach().reshape(-1), non_blocking=True)

    def handle(self) -> str:
        """Return what one rank of a server on this host opens it by, once."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        if self.device.type == "cuda":  # else a GPU that has another number in the server is not found there
            monkey_patch_torch_reductions()
        contents = {"flattened_tensor": self.flat, "metadata": self.metadata}
        return str(MultiprocessingSerializer.serialize(contents, output_str=True))


def flat_of(bucket: Sequence[Named], device: torch.device, earlier_buckets: Sequence[Flat]) -> Flat:
    """Return a bucket on a device, in memory of an earlier sync where it fits: new costs as much again."""
    for flat in earlier_buckets:
        if flat.fits(bucket, device):
            flat.fill(bucket)
            return flat
    return Flat(bucket, device)


def _pin(flat: Flat) -> None:
    """Lock its memory on the host, which a device then copies to at full speed, until it is given up."""
    runtime = torch.cuda.cudart()
    address = flat.flat.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, flat.flat.nbytes, 0)))
    weakref.finalize(flat, runtime.cudaHostUnregister, address)


class ServerRanks:
    """The workers whose devices one server spans: each hands its own copy of a bucket to its own rank.

    A rank that read the first worker's copy would open a context on that device, which takes half a gigabyte
    of it for good, and all ranks would read over one device's links.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Take those of a process group that carries objects between CPUs, or this worker alone."""
        self.group = group
        self.size = group.size() if group else 1
        self.leads = group is None or group.rank() == 0

    def handles(self, flat: Flat) -> list[str]:
        """Return handles of a bucket on each device, one per rank, on the first worker. Collective."""
        own_handle = flat.handle()
        if self.group is None:
            return [own_handle]
        handles = [""] * self.size if self.leads else None
        dist.gather_object(own_handle, handles, group=self.group, group_dst=0)
        return handles or []

    def hand_over(self, buckets: Iterable[Sequence[Named]]) -> None:
        """Bring weights to this worker's rank; ``SglangSupervisor.load`` runs on the first worker."""
        for bucket in buckets:
            flat = Flat(bucket)
            self.handles(flat)
            self.let_go()

    def let_go(self) -> None:
        """Wait until the server has read the bucket: until then every worker keeps its copy. Collective."""
        if self.group is not None:
            dist.barrier(self.group)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # what the server has closed


class Servers:
    """Servers that run already, as peers of this process, which sends: all of their ranks get weights.

    They must be in a session of updates while weights are sent. For a broadcast they join a process group
    with this process, gloo on CPUs and nccl on GPUs.
    """

    def __init__(self, clients: Sequence[Client], device: str) -> None:
        """Count their ranks; weights travel to them from a ``device``, ``cpu`` or ``cuda``.

        Raises:
            ServerLostError: one does not answer.
            RunError: one holds several copies of the model, or the model in stages.
        """
        self.clients = tuple(clients)
        self.device = device
        self.ranks = [ranks_of(client) for client in clients]
        self.pool = ThreadPoolExecutor(len(clients))
        self.group: dist.ProcessGroup | None = None
        self.calls: list[Future[Any]] = []

    def tell(self, note: Any) -> None:
        """Announce the bucket that is broadcast next, or the folder and version of files to read."""
        if isinstance(note, Header):
            self._join()
            body = {
                "names": note.names,
                "dtypes": [str(note.dtype).removeprefix("torch.")] * len(note.names),
                "shapes": [list(shape) for shape in note.shapes],
                "group_name": self.name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": str(note.version),
            }
            self.calls = self._all("update_weights_from_distributed", [body] * len(self.clients))
        elif isinstance(note, tuple):
            path, version = note
            # the format is not that of the start, which may be of random weights
            body = {"model_path": path, "weight_version": str(version), "load_format": "auto"}
            body |= {"flush_cache": False}
            self.calls = self._all("update_weights_from_disk", [body] * len(self.clients))

    def broadcast(self, flat: torch.Tensor) -> None:
        """Bring a bucket into the memory of all of them."""
        dist.broadcast(flat, 0, group=self.group)
        self.wait()

    def wait(self) -> None:
        """Return when all of them have what was sent, or raise what one of them answered."""
        for call in self.calls:
            call.result()

    def _join(self) -> None:
        if self.group:
            return
        from sglang.srt.utils import init_custom_process_group

        self.port = ServerPort("")
        backend = "nccl" if self.device == "cuda" else "gloo"
        port = self.port.number
        self.name = f"rlgraph-{port}"
        shared = {"world_size": 1 + sum(self.ranks), "group_name": self.name, "backend": backend}
        starts = accumulate(self.ranks, initial=1)
        bodies = [
            shared | {"master_address": client.local_address(), "master_port": port, "rank_offset": start}
            for client, start in zip(self.clients, starts, strict=False)
        ]
        self.calls = self._all("init_weights_update_group", bodies)
        self.group = init_custom_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, **shared)
        self.wait()

    def _all(self, call: str, bodies: Iterable[dict[str, Any]]) -> list[Future[Any]]:
        calls = zip(self.clients, bodies, strict=True)
        return [self.pool.submit(client.post, call, body) for client, body in calls]

    def close(self) -> None:
        """Part from those that still answer."""
        if self.group:
            worker = [client for client in self.clients if client.version() is not None]
            body = {"group_name": self.name}
            parted = [self.pool.submit(c.post, "destroy_weights_update_group", body) for c in worker]
            dist.destroy_process_group(self.group)
            for call in parted:
                call.exception()  # one that is lost has parted too
            self.port.close()
        self.pool.shutdown()


def ranks_of(client: Client) -> int:
    """Return how many ranks a server has, each of which receives weights.

    Raises:
        ServerLostError: it does not answer.
        RunError: it holds several copies of the model, or the model in stages.
    """
    info = client.look("server_info")
    if info is None:
        raise ServerLostError(f"the SGLang server at {client.url} does not answer")
    for name in ("dp_size", "pp_size"):
        if int(info.get(name, 1)) > 1:
            law = f"the SGLang server at {client.url} has {name} {info[name]}; weights reach one copy only"
            remedy = "start it with --tp-size alone, and a server for each copy (serve.sglang.addresses)"
            raise RunError(f"{law}\n  {remedy}")
    return int(info["tp_size"])


def check_names(path: str, stored: Collection[str], sent: Collection[str]) -> None:
    """Check that a checkpoint has all weights of a sync: the same on every worker, so none waits for another.

    SGLang knows the names of the checkpoint that it started from, leaves out a weight of another name without
    a word, and would go on with the one it holds. Without ``stored``, the names in safetensors files, nothing
    is checked.

    Raises:
        RunError: a name that the checkpoint lacks.
    """
    if stored and (unknown := sorted({*sent}.difference(stored))):
        raise RunError(
            f"{path}: a sync sent {shortened_list(unknown)}, but the checkpoint has no weight of that name: "
            f"the SGLang server left it out, and would generate with what it holds instead\n"
            f"  write the checkpoint anew with transformers' save_pretrained, or use the embedded engine"
        )
