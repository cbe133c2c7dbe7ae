"""The serve engine ``sglang``: servers of their own, spoken to over HTTP, token ids in and token ids out.

Covers what SGLang serves, over tensor parallelism of one host or several. One engine a device: the first of
a group starts its server and looks after it (``supervisor.py``, ``hosts.py``), all of them send requests to
all servers of the pool (``servers/calls.py``, ``servers/router.py``). What a server refuses in its states is
refused here first.

Not covered: seeds. SGLang follows them only where its inference is deterministic, which needs a GPU.

One file: what sleeps or takes weights changes the state by which all other calls are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlgraph.costs.model_size import size_of
from rlgraph.engines.registry import SERVERS, SERVING
from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling
from rlgraph.runtime.engines.memory.allocator import release
from rlgraph.runtime.engines.metric_sums import of_ranks
from rlgraph.runtime.engines.model_files import ModelFiles, context_of
from rlgraph.runtime.engines.servers.calls import Calls
from rlgraph.runtime.engines.servers.endpoint import REPLY
from rlgraph.runtime.engines.servers.groups import meet
from rlgraph.runtime.engines.servers.samples import check_lengths, cut, generate
from rlgraph.runtime.engines.servers.supervisor import START
from rlgraph.runtime.engines.sglang.client import PARTS, Client, Mixture, body, generation
from rlgraph.runtime.engines.sglang.contents import Adapter, AllWeights, adapter_name, adapter_of
from rlgraph.runtime.engines.sglang.fp8 import check_device, overridden, quantized
from rlgraph.runtime.engines.sglang.hosts import Follower, Starts
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.engines.sglang.options import options_of, tokenizer_option
from rlgraph.runtime.engines.sglang.preflight import unfit
from rlgraph.runtime.engines.sglang.supervisor import Remotes, SglangSupervisor
from rlgraph.runtime.engines.sglang.weights import ServerRanks, check_names
from rlgraph.runtime.engines.weights.pretrained import weights_of
from rlgraph.runtime.engines.weights.transfer import Named, cast, noted

if TYPE_CHECKING:
    from rlgraph.runtime.engines.contract import HostedServeEngine

PATIENCE = 60.0  # seconds in which one of several servers has to be back that this run can't bring back


class SglangEngine:
    """Generates with SGLang servers whose weights arrive by ``load_weights``.

    ``generate`` may run in several threads at a time; meanwhile ``load_weights`` brings new weights to what
    is in flight, and ``abort`` ends it.

    Example:
        engine = SglangEngine("Qwen/Qwen2.5-0.5B-Instruct", logs=Path("logs"))
        engine.load_pretrained()
        engine.generate([Request(prompt=[9707], seeds=[0, 1])], Sampling(max_new_tokens=16))

    Args:
        path: a model directory or a hub name.
        device: ``cpu`` or ``cuda``.
        dtype: of weights, keys and values.
        max_rows: samples of this engine in flight on a server at a time; the others wait here.
        max_cached_tokens: positions that the cache of a server holds.
        group: devices that a server spans.
        devices: which: GPUs by number, or cores of a CPU for each member of the group, as ``0,1``.
        logs: where the server's log goes.
        restarts: how often a server that is lost is started anew.
        keeps: whether a copy of the weights stays on the host for that; else they come by the next sync.
        start_timeout: seconds in which a server has to be up.
        request_timeout: seconds in which a sample has to be answered.
        request_retries: how often one is asked for again that is not.
        options: SGLang's own settings, by its names.
        host: the address of the interface that the server answers on.
        servers: those that run already, in place of one that this engine starts.
        leads: whether this engine syncs and moves its servers; another one does where it does not.
        transport: of weights to servers that run already, as the plan says: ``broadcast`` or ``disk``;
            "" where another process sends them.
        sync_folder: of ``disk``, that those servers see.
        pool: the process group of all who do as this engine does; they wait for one another around what
            is done to servers that several of them use.
        quantization: ``fp8``: linear layers are served in 8 bits.
        ranks: the workers whose devices one server spans, the first of which leads.
        starts: of a server over several hosts, for the first worker on each of them.
        config, trust_remote_code: as ``models.NAME``.
        adapter: as ``models.NAME.train.lora``, where syncs bring the adapter alone: its server has the
            weights at ``path`` from its start, and they do not sleep.

    Raises:
        RunError: the server does not come up: with its last lines.
        ValueError: SGLang would run another model.
    """

    overlaps = True

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        max_rows: int = 1024,
        max_cached_tokens: int = SERVING[SERVERS].cached,
        group: int = 1,
        devices: Sequence[str] = ("0",),
        logs: Path = Path("logs"),
        restarts: int = 3,
        keeps: bool = True,
        start_timeout: float = START,
        request_timeout: float = REPLY,
        request_retries: int = 120,
        options: Mapping[str, str | float | bool] | None = None,
        host: str = "127.0.0.1",
        servers: Sequence[Client] = (),
        leads: bool = True,
        transport: str = "broadcast",
        sync_folder: str | None = None,
        pool: dist.ProcessGroup | None = None,
        quantization: str | None = None,
        ranks: ServerRanks | None = None,
        starts: Starts | None = None,
        config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.max_rows = max_rows
        self.pool = pool
        self.device = torch.device(device).type
        self.dtype = getattr(torch, dtype)
        self.files = files = ModelFiles(path, config or {}, trust_remote_code)
        if law := unfit(files.config()):
            raise ValueError(law)
        self.tokenizer = files.tokenizer()
        text = files.config().get_text_config()
        self.context = context_of(text)
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
        self.stops = files.stop_ids(text, self.tokenizer)
        self.version = -1
        self.sleeping = frozenset[str]()
        self.notes: Sequence[str] = ()  # what of its server is other than the plan counts
        self.supervisor: SglangSupervisor | Remotes | None = None
        self.ranks = ranks
        self.content = AllWeights() if adapter is None else adapter_of(path, adapter)
        self.active_adapter = ""  # the adapter by which it generates
        self.quantization = quantization
        if quantization and self.device == "cuda":
            check_device(torch.cuda.get_device_capability())
        settings = {**(options or {}), **options_of(files)}
        settings = overridden(settings) if quantization else settings
        self.follower: Follower | None = None
        self.group = group
        self.keeps = keeps and restarts > 0 and not servers
        self.patience = 2 * start_timeout if self.keeps else PATIENCE
        if leads and servers:
            self.supervisor = Remotes(servers, self.device, transport, sync_folder)
        elif leads or starts:
            settings = {**tokenizer_option(files, self.tokenizer, Path(logs)), **settings}
            launch = Launch(
                path, self.device, dtype, group, max_cached_tokens, max_rows, settings, self.content
            )
            if starts and not leads:
                self.follower = Follower(launch, logs, devices, host, starts)
            else:
                self.supervisor = SglangSupervisor(
                    launch, logs, devices, host, restarts, self.keeps, start_timeout, ranks, starts
                )
                servers = [self.supervisor.client]
                self.notes = self.supervisor.notes
        self.calls: Calls | None = None
        self.requests = request_timeout, request_retries
        if servers:
            self.reach(servers)

    def reach(self, servers: Sequence[Client], patience: float | None = None) -> None:
        """Generate with these servers from now on; of those with least to do the first takes a request.

        Once all are lost, one of them has to be back in ``patience`` seconds.
        """
        if self.calls:
            self.calls.close()
        patience = self.patience if patience is None else patience
        started = self.supervisor if isinstance(self.supervisor, SglangSupervisor) else None
        self.calls = Calls(servers, self.max_rows, patience, lambda: self.version, started, *self.requests)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        enough: Enough | None = None,
        stays: bool = False,
    ) -> list[list[Generation]]:
        """Continue each request's prompt once for each of its seeds; the order is that of the requests.

        Samples of one prompt go to one server, as far as all servers get as many: it reads the prompt once.
        What ``enough`` aborts depends on what the servers end first. What was aborted comes back as far as it
        is, with the finish ``abort``.

        What ``stays`` is in flight between calls too, until sleep: then it comes back as far as it is, and
        the next call asks for the rest. Its replies are streamed.

        Raises:
            RuntimeError: no weights were given yet, or components of it are asleep.
            ValueError: an empty prompt, or one that with ``max_new_tokens`` exceeds the model's context.
            RunError: a server refused, or answered with other weights than this engine was given.
            ServerLostError: no server is left.
        """
        self._check_awake()
        check_lengths(requests, sampling, self.context)
        assert self.calls

        def http_body(request: Request, seed: int) -> dict[str, Any]:
            # when the request is sent, so that it names the adapter of that moment
            return body(request, seed, sampling, self.stops, self.active_adapter, stays)

        read_reply = partial(generation, mixture=self.mixture if sampling.routing else None)
        generations = generate(
            self.calls, requests, sampling, self.version, http_body, read_reply, enough, stays
        )
        return cut(self.tokenizer, generations, sampling)

    def _check_awake(self) -> None:
        if self.sleeping:
            self._refuse(f"{', '.join(sorted(self.sleeping))} asleep; wake them before generate")
        if self.version < 0:
            self._refuse("no weights yet; call load_weights or load_pretrained before generate")

    def abort(self) -> None:
        """End what is in flight; ``generate`` gives back what there is of it. Waits until it is."""
        if self.calls:
            self.calls.abort()

    def load_weights(self, named: Iterable[Named], version: int) -> None:
        """Take every weight by its name in the checkpoint, in buckets. After an error ``version`` is -1.

        So it is, on all of the pool, where a server was lost on the way and no copy is kept: call it again.

        What is in flight goes on with them, each from the token that it has come to. Where a copy is kept,
        that happens once all have arrived, at half of the pool's servers, and then at the others; with an
        adapter at all of them, as each request names one.

        Raises:
            RuntimeError: the weights are asleep.
            RunError: a server refused them, or would leave some out for their names.
            ServerLostError: a server is lost, and may not be started anew.
        """
        if "weights" in self.sleeping:
            self._refuse("its weights are asleep; wake them before load_weights")
        assert self.calls
        collects = self._anywhere(bool(self.calls.unanswered)) and self.keeps
        self.version = -1
        sent_names = list[str]()
        parameters = cast(self._without_tied(noted(named, sent_names)), self.dtype)
        arrived = True
        if self.quantization:
            parameters = quantized(parameters)
        is_adapter = isinstance(self.content, Adapter)
        stored_names = frozenset[str]() if is_adapter else self.stored
        check = partial(check_names, self.path, stored_names, sent_names)
        if collects:
            if isinstance(self.supervisor, SglangSupervisor):
                self.supervisor.collect(parameters, version)
            else:
                deque(parameters, maxlen=0)
            check()
        for servers in self._turns(collects and not is_adapter):
            try:
                self.calls.hold(servers, version)
                meet(self.pool)
                self.active_adapter = adapter_name(version) if is_adapter else ""
                if not collects:
                    arrived = self._load(parameters, version)
                elif 0 in servers and isinstance(self.supervisor, SglangSupervisor):
                    self.supervisor.take()
                lost = self._anywhere(not arrived)
                if not collects:
                    check()
                if lost:
                    return
            finally:
                self.calls.hold((), version)
        self.version = version
        self.calls.leave_out()

    def _without_tied(self, named: Iterable[Named]) -> Iterator[Named]:
        """Yield weights; a head that shares the embedding's comes with that."""
        for name, tensor in named:
            if not self.tied or name != "lm_head.weight":
                yield name, tensor

    def _load(self, parameters: Iterable[Named], version: int) -> bool:
        """Take weights as they come; return whether the server has them."""
        if self.supervisor:
            return self.supervisor.load(parameters, version)
        if self.ranks:
            self.ranks.hand_over(self.content.buckets(parameters))
        else:
            deque(parameters, maxlen=0)  # another one sends; here they are only gathered
        return True

    def _turns(self, halves: bool) -> Iterator[Collection[int]]:
        """Yield the servers that take weights at a time, by their places in ``calls``, where the own is
        first: all of the pool, or one half after the other."""
        assert self.calls
        count = len(self.calls.clients)
        turns = 2 if halves else 1
        own_server = self.pool.rank() // self.group if self.pool else 0
        for turn in range(min(count, turns)):
            yield [server for server in range(count) if (own_server + server) % count % turns == turn]

    def _anywhere(self, is_so_here: bool) -> bool:
        """Return whether something is so for any engine of the pool, once all have come here."""
        return any(of_ranks(is_so_here, self.pool)) if self.pool else is_so_here

    @cached_property
    def stored(self) -> frozenset[str]:
        """Return the names of the weights in the safetensors files at ``path``."""
        return frozenset(weights_of(self.path))

    @cached_property
    def mixture(self) -> Mixture:
        """Return what of the model is a mixture of experts."""
        config = size_of(self.path, changed=self.files.changed).config
        mixtures = [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)]
        return Mixture(mixtures, config.num_hidden_layers, config.num_experts_per_tok)

    def load_pretrained(self) -> None:
        """Take the weights that lie at ``path``, as version 0; of a server that this engine started."""
        assert isinstance(self.supervisor, SglangSupervisor)
        assert not self.quantization, "weights in 8 bits come by a sync"
        self.settle("load_pretrained")
        self.supervisor.load_pretrained()
        self.version = 0
        self.active_adapter = ""

    def checksums(self) -> list[Any]:
        """Return for each server a checksum of every parameter on each of its ranks, as it holds it."""
        clients = self.calls.clients if self.calls else ()
        return [client.post("weights_checker", {"action": "checksum"})["ranks"] for client in clients]

    def sleep(self, components: Sequence[str]) -> None:
        """Release the memory of ``weights``, ``kv`` or both. Asleep weights come back by a sync alone.

        Raises:
            RuntimeError: a component is asleep already, or something is in flight that does not stay.
        """
        moved = self._moved(components, asleep=False)
        if "weights" in moved and isinstance(self.content, Adapter):
            self._refuse("a sync brings an adapter alone, so weights can't sleep (serve.lora)")
        self.settle("sleep")
        self._fence()
        if self.supervisor:
            self.supervisor.sleep(moved)
        meet(self.pool)
        if "weights" in moved:
            self.version = -1
        self.sleeping |= moved

    def wake(self, components: Sequence[str]) -> None:
        """Take the memory of components again: the weights first, so that they can be synced.

        Raises:
            RuntimeError: a component is awake.
        """
        moved = self._moved(components, asleep=True)
        self._fence()
        if self.supervisor:
            self.supervisor.wake(moved)
        meet(self.pool)
        self.sleeping -= moved

    def _moved(self, components: Sequence[str], asleep: bool) -> frozenset[str]:
        """Return the components to move, which must be ``asleep`` or must not be."""
        moved = frozenset(components)
        unknown = moved - PARTS.keys()
        if unknown:
            self._refuse(f"{', '.join(sorted(unknown))}: no parts of it")
        awake = moved - self.sleeping
        if asleep and awake:
            self._refuse(f"{', '.join(sorted(awake))}: awake")
        sleeping = moved & self.sleeping
        if sleeping and not asleep:
            self._refuse(f"{', '.join(sorted(sleeping))}: asleep already")
        return moved

    def settle(self, call: str) -> None:
        """End what stays in flight between calls; the next one goes on from what there is of it."""
        if self.calls:
            self.calls.abort(staying=True)
            if self.calls.unanswered:
                self._refuse(f"{len(self.calls.unanswered)} samples are in flight; abort them before {call}")

    def _refuse(self, law: str) -> None:
        raise RuntimeError(f"{self.path}: {law}")

    def _fence(self) -> None:
        """Give cached memory back, and wait until all of the pool have done so."""
        release(self.device)
        meet(self.pool)

    def close(self) -> None:
        """End the connections, and the server, if this engine started it."""
        if self.calls:
            self.calls.close()
        if process := self.supervisor or self.follower:
            process.close()


if TYPE_CHECKING:  # mypy: it has every member that a worker calls
    ENGINE: type[HostedServeEngine] = SglangEngine
