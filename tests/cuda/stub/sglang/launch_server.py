"""``python -m sglang.launch_server``: a server with memory of its own that keeps SGLang's rules.

On a GPU it runs under torch_memory_saver in the regions ``weights`` and ``kv_cache``, as SGLang does: what
is released is given back to the driver; where there is no room to take it again, the process ends at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from contextlib import nullcontext
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[3] / folder) for folder in ("sglang", "helpers"))

import fake
import torch

from sglang.srt.utils import MultiprocessingSerializer

CACHE = "RLGRAPH_STUB_CACHE"  # bytes of the cache of keys and values


class Server(fake.Fake):
    """Weights that arrive are kept and can be summed up; parts are released and taken again."""

    def __init__(self, device: str, cache: int, tokens: int) -> None:
        self.device, self.cache, self.saver = torch.device(device), cache, _saver(device)
        self.tokens = tokens  # of the cache, as it says
        self.weights: dict[str, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}
        self._take("kv_cache")
        super().__init__()

    def region(self, tag: str) -> Any:
        """Where tensors of a part are made."""
        return self.saver.region(tag=tag) if self.saver else nullcontext()

    def _take(self, tag: str) -> None:
        with self.region(tag):
            self.held[tag] = torch.full((self.cache,), 1, dtype=torch.uint8, device=self.device)

    def _server_info(self, body: dict[str, Any]) -> Any:
        held = sum(tensor.nbytes for tensor in (*self.weights.values(), *self.held.values()))
        return {**super()._server_info(body), "bytes": held, "max_total_num_tokens": self.tokens}

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        reply = super()._update_weights_from_tensor(body)
        if not self.dead and isinstance(reply, dict):
            self._copy(MultiprocessingSerializer.deserialize(body["serialized_named_tensors"][0]))
        return reply

    def _copy(self, sent: dict[str, Any]) -> None:
        for part in sent["metadata"]:
            new = sent["flattened_tensor"][part.start_idx : part.end_idx].view(part.dtype).view(part.shape)
            if part.name not in self.weights:
                with self.region("weights"):
                    self.weights[part.name] = torch.empty_like(new, device=self.device)
            self.weights[part.name].copy_(new)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _release_memory_occupation(self, body: dict[str, Any]) -> Any:
        reply = super()._release_memory_occupation(body)
        for tag in () if self.dead else {*body["tags"]} - {"cuda_graph"}:
            self._pause(tag)
        return reply

    def _resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        reply = super()._resume_memory_occupation(body)
        for tag in () if self.dead else {*body["tags"]} - {"cuda_graph"}:
            self._resume(tag)
        return reply

    def _pause(self, tag: str) -> None:
        if self.saver:
            self.saver.pause(tag)
        elif tag == "weights":
            self.weights = {name: tensor[:0] for name, tensor in self.weights.items()}
        else:
            self.held[tag] = self.held[tag][:0].clone()

    def _resume(self, tag: str) -> None:
        if self.saver:
            self.saver.resume(tag)
        elif tag == "weights":
            self.weights = {}  # what stood there is lost
        else:
            self._take(tag)

    def _die(self, why: str) -> None:
        """End at once, as the real one does."""
        print(f"dead: {why}", flush=True)
        os._exit(1)

    def _weights_checker(self, body: dict[str, Any]) -> Any:
        sums = {name: _checksum(tensor) for name, tensor in self.weights.items()}
        return {"success": True, "ranks": [{"checksums": sums}]}


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _saver(device: str) -> Any:
    """torch_memory_saver, where it is installed and there is memory that it can give back."""
    if device != "cuda" or find_spec("torch_memory_saver") is None:
        return None
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver


def _preload() -> None:
    """Begin anew with torch_memory_saver's library before all others: it stands in for CUDA's allocator."""
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ)


def main() -> None:
    """Answer until the process is ended."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--device", "--max-total-tokens"):
        parser.add_argument(name)
    options, _ = parser.parse_known_args()
    settings = json.loads(Path(options.config).read_text())
    vars(options).update({name.replace("-", "_"): value for name, value in settings.items()})
    saved = options.device == "cuda" and find_spec("torch_memory_saver") is not None
    if saved and "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        _preload()
    fake.KEY = options.api_key
    cache = int(os.environ.get(CACHE, "1048576"))
    server = Server(options.device, cache, int(options.max_total_tokens))
    handler = type("Handler", (fake._Handler,), {"fake": server})
    ThreadingHTTPServer((options.host, int(options.port)), handler).serve_forever()


if __name__ == "__main__":
    main()
