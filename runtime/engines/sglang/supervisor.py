"""Supervision of SGLang servers: of the one that this process started, or of several that run already.

Both bring servers to what an engine wants of them: weights, components asleep or awake. A server that this
process started and that is lost is started anew and brought there again, whatever it was doing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlgraph.runtime.engines.servers.process import Server
from rlgraph.runtime.engines.servers.supervisor import Supervisor
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.hosts import FirstServer, Starts
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.engines.sglang.weights import Flat, ServerRanks, Servers, flat_of
from rlgraph.runtime.engines.weights.transfer import Named, Weights
from rlgraph.runtime.engines.weights.transports import TRANSPORTS
from rlgraph.runtime.messages.errors import ServerLostError

LIKE = 0.05  # part of the planned tokens by which those of a server may differ without a word
HOST = torch.device("cpu")


class Moves(ABC):
    """The moves that an engine asks of its servers, and what it wants of them: components that sleep."""

    sleeping = frozenset[str]()
    lock: AbstractContextManager[Any] = nullcontext()

    @abstractmethod
    def do(self, action: Callable[[Client], None]) -> None:
        """Carry out an action on the servers."""

    def sleep(self, components: frozenset[str]) -> None:
        """Release the memory of components."""
        self._want(lambda client: client.release(components), self.sleeping | components)

    def wake(self, components: frozenset[str]) -> None:
        """Take the memory of components again."""
        self._want(lambda client: client.retake(components), self.sleeping - components)

    def _want(self, action: Callable[[Client], None], sleeping: frozenset[str]) -> None:
        with self.lock:
            self.sleeping = sleeping
            self.do(action)


class SglangSupervisor(Moves, Supervisor[Client]):
    """Keeps the SGLang server that it started."""

    def __init__(
        self,
        launch: Launch,
        logs: Path,
        devices: Sequence[str],
        host: str,
        restarts: int,
        keeps: bool,
        start: float,
        ranks: ServerRanks | None,
        starts: Starts | None = None,
    ) -> None:
        """Start it as ``Supervisor`` does; other arguments are as of ``Server`` and ``SglangEngine``."""
        self.launch = launch
        self.logs = logs
        self.devices = devices
        self.host = host
        self.keeps = keeps
        self.ranks = ranks or ServerRanks()
        self.starts = starts
        self.content = launch.content
        self.weight_copies: list[Flat] = []
        self.bring: Callable[[], None] | None = None  # gives a new server the weights that it should have
        super().__init__(restarts, start)

    def begin(self, predecessor: Server[Client] | None = None) -> Server[Client]:
        if self.starts is None:
            return Server(self.launch, self.logs, self.devices, self.host, predecessor)
        return FirstServer(self.launch, self.logs, self.devices, self.host, predecessor, self.starts)

    def shortage(self) -> str:
        """Return that the server's cache is not of the size that the plan counts, or ""."""
        counted = self.launch.tokens
        cached_tokens = (self.server.client.look("server_info") or {}).get("max_total_num_tokens", counted)
        if abs(cached_tokens - counted) <= LIKE * counted:
            return ""
        law = f"the SGLang server of {self.launch.path} holds keys and values of {cached_tokens:,} tokens"
        reason = "others held memory as it started" if cached_tokens < counted else "see its log"
        return f"{law}; the plan counts {counted:,} ({reason}): set serve.cache_tokens={cached_tokens}"

    def collect(self, parameters: Iterable[Named], version: int) -> None:
        """Keep a copy of weights on the host, while the server generates with those before; see ``take``."""
        with self.lock:
            earlier_copies = self.weight_copies
            self.weight_copies = []
            for index, bucket in enumerate(self.content.buckets(parameters)):
                self.weight_copies.append(flat_of(bucket, HOST, earlier_copies[index : index + 1]))
            self._has_copy(version)

    def take(self) -> None:
        """Bring the server to the weights of the copy."""
        bring = self.bring
        assert bring
        with self.lock:
            self.do(lambda _: bring())

    def load(self, parameters: Iterable[Named], version: int) -> bool:
        """Bring weights to the server, bucket by bucket, as long as they come; see ``SglangEngine``.

        Returns:
            Whether it has them: not, where it was lost and is started anew without a copy of them.
        """
        with self.lock:
            earlier_copies = self.weight_copies
            self.weight_copies = []
            self.bring = None
            lost = not self.tried(lambda: self.content.begin(self.client))
            for index, bucket in enumerate(self.content.buckets(parameters)):
                earlier = earlier_copies[index : index + 1]
                flat = flat_of(bucket, bucket[0][1].device, earlier)
                handles = self.ranks.handles(flat)
                lost = lost or not self.tried(partial(self.content.send, self.client, handles, version))
                self.ranks.let_go()
                if self.keeps:
                    self.weight_copies.append(flat if flat.device == HOST else flat_of(bucket, HOST, earlier))
            if self.keeps:
                self._has_copy(version)
            if lost or not self.tried(partial(self._end_update, version)):
                self.renew()
                return self.keeps
            return True

    def load_pretrained(self) -> None:
        """Bring the server to the weights at its path, as version 0."""
        with self.lock:
            self.bring = self._load_from_disk
            self.do(lambda _: self._load_from_disk())

    def do(self, action: Callable[[Client], None]) -> None:
        """Carry out an action; a new server, in place of a lost one, is brought to all that is wanted."""
        if not self.tried(lambda: action(self.client)):
            self.renew()

    def sleep(self, components: frozenset[str]) -> None:
        """Release the memory of components, and the copy of weights that sleep."""
        with self.lock:
            if "weights" in components:
                self.weight_copies = []
                self.bring = None
            super().sleep(components)

    def _load_from_disk(self) -> None:
        self.client.begin_update()
        body = {"model_path": self.launch.path, "weight_version": "0", "load_format": "auto"}
        self.client.post("update_weights_from_disk", body)
        self.client.end_update()
        self._forget()

    def _end_update(self, version: int) -> None:
        self.content.end(self.client, version)
        self._forget()

    def _forget(self) -> None:
        if "kv" not in self.sleeping:  # else there is no cache of older weights
            self.client.flush()

    def _has_copy(self, version: int) -> None:
        self.bring = partial(self._replay, version)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # it has arrived

    def _replay(self, version: int) -> None:
        self.content.begin(self.client)
        for flat in self.weight_copies:  # all ranks can read it on the host
            self.content.send(self.client, [flat.handle() for _ in range(self.ranks.size)], version)
        self._end_update(version)

    def restore(self) -> None:
        """Bring a new server to the weights and the sleep that were wanted of the one before."""
        self.client.hold()  # so that nobody gets tokens of the weights that it started with, or of a mixture
        if self.bring:
            self.bring()
        self.client.resume()
        if self.sleeping:
            self.client.release(self.sleeping)


class Remotes(Moves):
    """Looks after servers that run already; they are never started or ended here."""

    def __init__(
        self, clients: Sequence[Client], device: str, transport: str, folder: str | None = None
    ) -> None:
        """Ask nothing of them yet.

        Weights travel from a ``device``, ``cpu`` or ``cuda``, by a ``transport`` as the plan says:
        ``broadcast``, or ``disk`` by a folder that all of them see; "": another process sends.
        """
        self.clients = clients
        self.device = device
        self.transport = transport
        self.folder = folder or ""
        self.peers: Servers | None = None

    def load(self, parameters: Iterable[Named], version: int) -> bool:
        """Bring weights to all that answer, unless another process does, and forget what older ones made."""
        if self.transport:
            self.bring(Weights(version, parameters))
        else:
            deque(parameters, maxlen=0)
        if "kv" not in self.sleeping:
            self.do(Client.flush)
        return True

    def bring(self, weights: Weights) -> None:
        """Bring weights to all that answer, bucket by bucket.

        Raises:
            ServerLostError: none answers, or one was lost on the way.
            RunError: one holds several copies of the model, or the model in stages.
        """
        reachable = self._reachable()
        peers = self._peers(reachable)
        for client in reachable:
            client.begin_update()
        TRANSPORTS[self.transport](peers, self.folder).send(weights)
        for client in reachable:
            client.end_update()

    def do(self, action: Callable[[Client], None]) -> None:
        """Carry out an action on all that answer."""
        for client in self._reachable():
            action(client)

    def close(self) -> None:
        """Part from the servers; they run on."""
        if self.peers:
            self.peers.close()
            self.peers = None

    def _reachable(self) -> list[Client]:
        reachable = [client for client in self.clients if client.version() is not None]
        if not reachable:
            urls = ", ".join(client.url for client in self.clients)
            raise ServerLostError(f"no SGLang server answers at {urls}")
        return reachable

    def _peers(self, reachable: Sequence[Client]) -> Servers:
        """Return exactly those servers, as peers."""
        if self.peers is None or self.peers.clients != tuple(reachable):
            self.close()
            self.peers = Servers(reachable, self.device)
        return self.peers
