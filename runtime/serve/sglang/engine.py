"""The serve engine ``sglang``: a server of its own, spoken to over HTTP, token ids in and token ids out.

Covers what SGLang serves, over tensor parallelism of one host. The server is a process of the worker that
leads its group (``server.py``); weights come from its memory, in buckets: through shared memory on a
CPU, through CUDA IPC on a GPU. What the server refuses in its states is refused here first.

Not covered: seeds. SGLang follows them only where its inference is deterministic, which needs a GPU.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from rlgraph.engines import Generation, Request, Sampling
from rlgraph.errors import RunError
from rlgraph.runtime.serve.sglang.server import Address, Launch, Server
from rlgraph.runtime.serve.stops import stop_ids
from rlgraph.runtime.weights import buckets

PARTS = {"weights": ["weights"], "kv": ["kv_cache", "cuda_graph"]}  # ours -> SGLang's tags
BUCKET = 2**28  # bytes of weights that travel together
START, REPLY = 600.0, 3600.0  # seconds in which a server has to be up, and to answer a call

Named = tuple[str, torch.Tensor]


class SglangEngine:
    """Generates with an SGLang server whose weights arrive by ``load_weights``.

    Example:
        engine = SglangEngine("Qwen/Qwen2.5-0.5B-Instruct", logs=Path("logs"))
        engine.load_pretrained()
        engine.generate([Request(prompt=[9707], seeds=[0, 1])], Sampling(max_new_tokens=16))

    Args:
        path: a model directory or a hub name.
        device: ``cpu`` or ``cuda``.
        dtype: of weights, keys and values.
        max_rows: samples in flight at a time; the others wait here.
        max_cached_tokens: positions that the server's cache holds.
        group: devices that the server spans.
        devices: which: GPUs by number, or cores of a CPU for each member of the group, as ``0-1``.
        logs: where the server's log goes.
        leader: the server of another process that this engine speaks to; it syncs and moves nothing itself.
        pool: the process group of all who do as this engine does; they wait for one another around what the
            leaders do to the servers.

    Raises:
        RunError: the server does not come up: with its last lines.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        max_rows: int = 1024,
        max_cached_tokens: int = 1 << 16,
        group: int = 1,
        devices: Sequence[str] = ("0",),
        logs: Path = Path("logs"),
        leader: Address | None = None,
        pool: dist.ProcessGroup | None = None,
    ) -> None:
        self.path, self.max_rows, self.group, self.pool = path, max_rows, group, pool
        self.device, self.dtype = torch.device(device).type, getattr(torch, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path).get_text_config()
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.stops = stop_ids(path, config, self.tokenizer)
        self.version, self.away = -1, frozenset[str]()
        self.launch = Launch(path, self.device, dtype, group, max_cached_tokens, max_rows)
        self.log, self.devices = logs / f"sglang-{devices[0]}.log", devices
        self.server: Server | None = None
        self.address = leader or self._start()

    def _start(self) -> Address:
        self.server = Server(self.launch, self.log, self.devices)
        self.server.wait(START)
        return self.server.address

    def restart(self) -> None:
        """A new server in the place of one that is gone: awake, and without weights until the next sync."""
        self.close()
        self.version, self.away = -1, frozenset[str]()
        self.address = self._start()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation]]:
        """Continue each request's prompt once for each of its seeds; the order is that of the requests.

        Raises:
            RuntimeError: no weights were given yet, or parts of the engine are asleep.
            ValueError: an empty prompt, or one that with ``max_new_tokens`` exceeds the model's context.
            RunError: the server is gone, or answered with other weights than this engine was given.
        """
        self._check(requests, sampling)
        return asyncio.run(self._generate(requests, sampling))

    async def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation]]:
        import aiohttp

        free = asyncio.Semaphore(self.max_rows)
        headers = {"Authorization": f"Bearer {self.address.key}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=REPLY)
        connector = aiohttp.TCPConnector(limit=self.max_rows)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

            async def one(prompt: Sequence[int], seed: int) -> Generation:
                async with (
                    free,
                    session.post(
                        f"{self.address.url}/generate", json=self._body(prompt, seed, sampling)
                    ) as reply,
                ):
                    return self._generation(reply.status, await reply.json())

            made = [asyncio.ensure_future(one(r.prompt, seed)) for r in requests for seed in r.seeds]
            try:
                flat = iter(await asyncio.gather(*made))
            except aiohttp.ClientError as error:
                raise RunError(
                    f"the SGLang server of {self.path} broke off: {error}{self._last_lines()}"
                ) from error
        return [[next(flat) for _ in request.seeds] for request in requests]

    def _body(self, prompt: Sequence[int], seed: int, sampling: Sampling) -> dict[str, Any]:
        settings = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": self.stops,
            "sampling_seed": seed & 0x7FFFFFFF,
        }
        return {"input_ids": list(prompt), "sampling_params": settings, "return_logprob": True}

    def _generation(self, status: int, reply: dict[str, Any]) -> Generation:
        if status != 200:
            raise RunError(f"the SGLang server of {self.path} answered {status}: {json.dumps(reply)[:500]}")
        meta = reply["meta_info"]
        versions = {part["version"] for part in meta["weight_versions"]}
        if versions != {str(self.version)}:
            raise RunError(f"the SGLang server generated with weights {versions}, not with {self.version}")
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        tokens = reply["output_ids"]
        assert len(tokens) == len(logprobs), f"{len(tokens)} tokens and {len(logprobs)} log-probs"
        return Generation(tokens, logprobs, meta["finish_reason"]["type"])

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self.away:
            raise RuntimeError(
                f"{self.path}: {', '.join(sorted(self.away))} asleep; wake them before generate"
            )
        if self.version < 0:
            raise RuntimeError(
                f"{self.path}: no weights yet; call load_weights or load_pretrained before generate"
            )
        for index, request in enumerate(requests):
            whole = len(request.prompt) + sampling.max_new_tokens
            if not request.prompt:
                raise ValueError(f"request {index}: 0 prompt tokens; it must be at least 1")
            if self.context is not None and whole > self.context:
                raise ValueError(
                    f"request {index}: {whole} tokens are more than the model's context of {self.context}"
                )

    def load_weights(self, named: Iterable[Named], version: int) -> None:
        """Take every weight by its Hugging Face name, bucket by bucket. After an error ``version`` is -1.

        Raises:
            RuntimeError: the weights are asleep.
            RunError: the server refused them.
        """
        if "weights" in self.away:
            raise RuntimeError(f"{self.path}: its weights are asleep; wake them before load_weights")
        self.version = -1
        kept = ((name, t) for name, t in named if not (self.tied and name == "lm_head.weight"))
        parameters = ((name, t.to(self.dtype) if t.is_floating_point() else t) for name, t in kept)
        if self.server:
            self._update(parameters, version)
        else:
            deque(parameters, maxlen=0)  # the leader sends; here they are only gathered
        self._meet()
        self.version = version

    def _update(self, parameters: Iterable[Named], version: int) -> None:
        self._post("begin_weight_update", {})
        for bucket in buckets(parameters, BUCKET):
            self._send(bucket, version)
        self._post("end_weight_update", {})
        if "kv" not in self.away:
            self._post("flush_cache", {})

    def _meet(self) -> None:
        """Wait for all of the pool: nobody uses a server while its leader changes it."""
        if self.pool is not None and self.group > 1:
            dist.barrier(self.pool)

    def load_pretrained(self) -> None:
        """Take the weights that lie at ``path``, as version 0."""
        self._post("begin_weight_update", {})
        self._post("update_weights_from_disk", {"model_path": self.path, "weight_version": "0"})
        self._post("end_weight_update", {})
        self.version = 0

    def _send(self, bucket: list[Named], version: int) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if self.device == "cpu":  # a server that did not start this process may not open its file descriptors
            torch.multiprocessing.set_sharing_strategy("file_system")
        flat = FlattenedTensorBucket(named_tensors=[(name, t.detach().contiguous()) for name, t in bucket])
        held = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        text = MultiprocessingSerializer.serialize(held, output_str=True)
        body = {
            "serialized_named_tensors": [text] * self.group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version),
        }
        self._post("update_weights_from_tensor", body)

    def checksums(self) -> Any:
        """A checksum of every parameter, as the server holds it."""
        return self._post("weights_checker", {"action": "checksum"})

    def sleep(self, parts: Sequence[str]) -> None:
        """Release the memory of ``weights``, ``kv`` or both. Asleep weights come back by a sync alone.

        Raises:
            RuntimeError: a part is asleep already.
        """
        moved = self._moved(parts, asleep=False)
        self._meet()
        for part in sorted(moved) if self.server else ():  # the cache before the weights
            self._post("flush_cache", {})
            self._post("release_memory_occupation", {"tags": PARTS[part]})
        if "weights" in moved:
            self.version = -1
        self.away |= moved

    def wake(self, parts: Sequence[str]) -> None:
        """Take the memory of parts again: the weights first, so that they can be synced.

        Raises:
            RuntimeError: a part is awake.
        """
        moved = self._moved(parts, asleep=True)
        for part in sorted(moved, reverse=True) if self.server else ():
            self._post("resume_memory_occupation", {"tags": PARTS[part]})
        self._meet()
        self.away -= moved

    def _moved(self, parts: Sequence[str], asleep: bool) -> frozenset[str]:
        moved = frozenset(parts)
        unknown = moved - PARTS.keys()
        wrong = moved - self.away if asleep else moved & self.away
        if unknown or wrong:
            state = "no parts of it" if unknown else "awake" if asleep else "asleep already"
            raise RuntimeError(f"{self.path}: {', '.join(sorted(unknown or wrong))}: {state}")
        return moved

    def _post(self, call: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.address.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address.url}/{call}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=REPLY) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise RunError(
                f"the SGLang server of {self.path} refused {call}: {error.read().decode()[:500]}"
            ) from error
        except (urllib.error.URLError, OSError) as error:
            law = f"the SGLang server of {self.path} did not answer {call}: {error}"
            raise RunError(f"{law}{self._last_lines()}") from error
        answer = json.loads(text) if text.startswith(("{", "[")) else text
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RunError(
                f"the SGLang server of {self.path} refused {call}: {answer.get('message', answer)}"
            )
        return answer

    def _last_lines(self) -> str:
        return self.server.last_lines() if self.server else ""

    def close(self) -> None:
        """End the server, if this engine started it."""
        if self.server:
            self.server.close()
