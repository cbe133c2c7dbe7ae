"""Ways of weights into servers' memory: shared with one on this host, broadcast to several, or by files.

Flat        a bucket in shared memory (CPU) or of CUDA IPC (GPU), for the server that this process started
Group       a process group of this process and all ranks of the servers: gloo on CPUs, nccl on GPUs
Folder      safetensors files that the servers see
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.runtime.serve.sglang.client import Client, ServerLostError
from rlgraph.runtime.serve.sglang.server import free_port

BUCKET = 2**28  # bytes of weights that travel together

Named = tuple[str, torch.Tensor]


class Flat:
    """One bucket as one flat tensor, which may be sent more than once; on a CPU it is shared memory."""

    def __init__(self, bucket: Sequence[Named]) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        names, tensors = zip(*bucket, strict=True)
        dtypes, shapes = [t.dtype for t in tensors], [t.shape for t in tensors]
        self.device = tensors[0].device
        made = FlattenedTensorBucket.empty(names, dtypes, shapes, self.device)
        self.flat, self.metadata = made.get_flattened_tensor(), made.get_metadata()
        if self.device.type == "cpu":  # a server that did not start this process may not open its descriptors
            torch.multiprocessing.set_sharing_strategy("file_system")
            self.flat.share_memory_()
        self.fill(bucket)

    def fits(self, bucket: Sequence[Named]) -> bool:
        """Whether it was made for such a bucket, and lies where that does."""
        own = [(part.name, part.shape, part.dtype, self.flat.device) for part in self.metadata]
        return own == [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in bucket]

    def fill(self, bucket: Sequence[Named]) -> None:
        """Take the tensors of a bucket that fits."""
        for part, (_, tensor) in zip(self.metadata, bucket, strict=True):
            there = self.flat[part.start_idx : part.end_idx].view(part.dtype)
            there.copy_(tensor.detach().reshape(-1))

    def send(self, client: Client, ranks: int, version: int) -> None:
        """Into the memory of a server on this host.

        Args:
            client: the server, in a session of updates.
            ranks: devices that it spans; each takes its part.
            version: of the weights.
        """
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        if self.device.type == "cuda":  # else a GPU that has another number in the server is not found there
            monkey_patch_torch_reductions()
        held = {"flattened_tensor": self.flat.to(self.device), "metadata": self.metadata}
        # one for each rank: each gives back its own hold on the memory when it has read it
        texts = [MultiprocessingSerializer.serialize(held, output_str=True) for _ in range(ranks)]
        body = {
            "serialized_named_tensors": texts,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version),
        }
        client.post("update_weights_from_tensor", body)
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def leave_device(self) -> None:
        """Keep it in the host's memory; on a CPU it is there."""
        self.flat = self.flat.cpu()


class Group:
    """A process group that servers receive weights over, from this process."""

    def __init__(self, clients: Sequence[Client], device: str) -> None:
        """Meet with all ranks of the servers.

        Raises:
            ServerLostError: one of them does not answer.
            RunError: one of them refused.
        """
        from sglang.srt.utils import init_custom_process_group

        self.clients, self.device = tuple(clients), device
        ranks = [_ranks(client) for client in clients]
        port, backend = free_port(""), "nccl" if device == "cuda" else "gloo"
        self.name = f"rlgraph-{port}"
        shared = {
            "world_size": 1 + sum(ranks),
            "group_name": self.name,
            "backend": backend,
            "master_port": port,
        }
        self.pool = ThreadPoolExecutor(len(clients))
        joined = self._all(
            "init_weights_update_group",
            [
                shared | {"master_address": client.local_address(), "rank_offset": 1 + sum(ranks[:index])}
                for index, client in enumerate(clients)
            ],
        )
        self.group = init_custom_process_group(
            backend=backend,
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=1 + sum(ranks),
            rank=0,
            group_name=self.name,
        )
        for call in joined:
            call.result()

    def send(self, bucket: Sequence[Named], version: int) -> None:
        """Into the memory of all servers, which are in a session of updates."""
        flat = Flat(bucket).flat.to(self.device)
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version),
        }
        taken = self._all("update_weights_from_distributed", [body] * len(self.clients))
        dist.broadcast(flat, 0, group=self.group)
        for call in taken:
            call.result()

    def _all(self, call: str, bodies: Iterable[dict[str, Any]]) -> list[Any]:
        calls = zip(self.clients, bodies, strict=True)
        return [self.pool.submit(client.post, call, body) for client, body in calls]

    def close(self) -> None:
        """Part from those that still answer."""
        here = [client for client in self.clients if client.version() is not None]
        parted = [
            self.pool.submit(c.post, "destroy_weights_update_group", {"group_name": self.name}) for c in here
        ]
        dist.destroy_process_group(self.group)
        for call in parted:
            call.exception()  # one that is lost has parted too
        self.pool.shutdown()


class Folder:
    """Safetensors files of one version, written bucket by bucket, then read by the servers at once."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "sglang"
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        self.index: dict[str, str] = {}

    def write(self, bucket: Sequence[Named]) -> None:
        """Add a bucket."""
        from safetensors.torch import save_file

        name = f"model-{len({*self.index.values()}):05d}.safetensors"
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in bucket}, self.path / name)
        self.index |= {key: name for key, _ in bucket}

    def send(self, clients: Sequence[Client], version: int) -> None:
        """Have all servers read what was written; then it is removed."""
        index = {"metadata": {}, "weight_map": self.index}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        body = {"model_path": str(self.path), "weight_version": str(version), "flush_cache": False}
        with ThreadPoolExecutor(len(clients)) as pool:
            read = [pool.submit(client.post, "update_weights_from_disk", body) for client in clients]
            for call in read:
                call.result()
        shutil.rmtree(self.path)


def _ranks(client: Client) -> int:
    info = client.look("server_info")
    if info is None:
        raise ServerLostError(f"the SGLang server at {client.url} does not answer")
    return int(info["tp_size"])
