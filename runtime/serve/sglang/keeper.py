"""Who looks after servers: the one that this process started, or several that run already.

Both bring servers to what an engine wants of them: weights, parts asleep or awake, paused or not. A server
that this process started and that is lost is started anew and brought there again, whatever it was doing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from rlgraph.errors import RunError
from rlgraph.runtime.serve.sglang.client import Client, ServerLostError
from rlgraph.runtime.serve.sglang.server import Launch, Server
from rlgraph.runtime.serve.sglang.weights import BUCKET, Flat, Folder, Group, Named
from rlgraph.runtime.weights import buckets

START, BLINK = 600.0, 0.5  # seconds in which a server has to be up, and between looks at whether it runs


class Keeper:
    """Keeps the server that it started."""

    def __init__(self, launch: Launch, logs: Path, devices: Sequence[str], host: str, restarts: int) -> None:
        """Start it and wait until it answers.

        Args:
            launch: how it runs.
            logs: the folder of its log.
            devices: see ``Server``.
            host: the address of the interface that it answers on.
            restarts: how often one that is lost is started anew; above 0 its weights are kept on the host.

        Raises:
            RunError: it does not come up: with its last lines.
        """
        self.launch, self.logs, self.devices, self.host = launch, logs, devices, host
        self.left = self.restarts = restarts
        self.lock, self.closing = threading.RLock(), threading.Event()
        self.kept: list[Flat] = []
        self.bring: Callable[[], None] | None = None  # gives a new server the weights that it should have
        self.away, self.paused = frozenset[str](), False
        self.failed: RunError | None = None
        self.server = Server(launch, logs, devices, host)
        self.server.wait(START)
        self.client = self.server.client
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def load(self, parameters: Iterable[Named], version: int) -> None:
        """Bring weights to the server, bucket by bucket, as long as they come; see ``SglangEngine``."""
        with self.lock:
            before, self.kept, self.bring = self.kept, [], None
            lost = not self._tried(self.client.begin_update)
            for index, bucket in enumerate(buckets(parameters, BUCKET)):
                flat = _flat(bucket, before[index : index + 1])
                if not lost:
                    lost = not self._tried(partial(self._send, flat, version))
                if self.restarts:
                    flat.leave_device()
                    self.kept.append(flat)
            self.bring = partial(self._replay, version) if self.restarts else None
            if lost or not self._tried(self._end_update):
                self._renew()

    def load_pretrained(self) -> None:
        """Bring the server to the weights at its path, as version 0."""

        def bring() -> None:
            self.client.begin_update()
            body = {"model_path": self.launch.path, "weight_version": "0"}
            self.client.post("update_weights_from_disk", body)
            self._end_update()

        with self.lock:
            self.bring = bring
            self._do(bring)

    def sleep(self, parts: frozenset[str]) -> None:
        """Release the memory of parts."""
        with self.lock:
            self.away |= parts
            if "weights" in parts:
                self.kept, self.bring = [], None
            self._do(lambda: self.client.release(parts))

    def wake(self, parts: frozenset[str]) -> None:
        """Take the memory of parts again."""
        with self.lock:
            self.away -= parts
            self._do(lambda: self.client.retake(parts))

    def pause(self) -> None:
        """Stop generating."""
        with self.lock:
            self.paused = True
            self._do(self.client.pause)

    def resume(self) -> None:
        """Generate again."""
        with self.lock:
            self.paused = False
            self._do(self.client.resume)

    def close(self) -> None:
        """End the server."""
        self.closing.set()
        with self.lock:
            self.server.close()
        self.watch.join()

    def _end_update(self) -> None:
        self.client.end_update()
        if "kv" not in self.away:  # else there is no cache of older weights
            self.client.flush(self.paused)

    def _replay(self, version: int) -> None:
        self.client.begin_update()
        for flat in self.kept:
            self._send(flat, version)
        self._end_update()

    def _send(self, flat: Flat, version: int) -> None:
        flat.send(self.client, self.launch.group, version)

    def _tried(self, action: Callable[[], None]) -> bool:
        """Whether an action was carried out; not, where the server is lost."""
        try:
            action()
        except ServerLostError:
            return False
        return True

    def _do(self, action: Callable[[], None]) -> None:
        """Carry out what was noted as wanted before; a new server is brought to all of that."""
        if not self._tried(action):
            self._renew()

    def _watch(self) -> None:
        """Start a server anew that ends while nothing is asked of it but to generate.

        One that sleeps is started when it is woken: until then others have its memory.
        """
        while not self.closing.wait(BLINK):
            with self.lock:
                if self.closing.is_set() or self.away or self.server.is_alive():
                    continue
                try:
                    self._renew()
                except RunError as error:
                    self.failed = error
                    return

    def _renew(self) -> None:
        """A new server in the place of one that is lost, in the state that was wanted of it.

        Raises:
            ServerLostError: it was lost more often than it may be.
            RunError: the new one does not come up.
        """
        done = False
        while not done:
            law = self.server.obituary()
            self.server.close()
            if not self.left:
                used = f"{self.restarts} restarts were used up" if self.restarts else "it is not started anew"
                raise ServerLostError(f"{law}; {used} (serve.restarts){self.server.last_lines()}")
            self.left -= 1
            with self.server.log.open("a", encoding="utf-8") as log:
                log.write(f"rlgraph: {law}; started anew, which may happen {self.left} times more\n")
            self.server = Server(self.launch, self.logs, self.devices, self.host, self.client)
            self.server.wait(START)
            done = self._tried(self._restore)

    def _restore(self) -> None:
        self.client.hold()  # so that nobody gets tokens of the weights that it started with, or of a mixture
        paused, self.paused = self.paused, False  # until it has its weights
        try:
            if self.bring:
                self.bring()
        finally:
            self.paused = paused
        self.client.resume()
        if self.away:
            self.client.release(self.away)
        if self.paused:
            self.client.pause()


def _flat(bucket: Sequence[Named], before: Sequence[Flat]) -> Flat:
    """A bucket in the memory of the one before it where it fits: new memory costs as much again."""
    for flat in before:
        if flat.fits(bucket):
            flat.fill(bucket)
            return flat
    return Flat(bucket)


class Remotes:
    """Looks after servers that run already; they are never started or ended here."""

    def __init__(self, clients: Sequence[Client], device: str, folder: str | None) -> None:
        """Nothing is asked of them yet.

        Args:
            clients: the servers.
            device: where weights travel from, ``cpu`` or ``cuda``.
            folder: that all of them see, for weights to travel by; None: they are broadcast.
        """
        self.clients, self.device, self.folder = clients, device, folder
        self.away, self.paused = frozenset[str](), False
        self.group: Group | None = None
        self.failed: RunError | None = None

    def load(self, parameters: Iterable[Named], version: int) -> None:
        """Bring weights to all that answer, bucket by bucket.

        Raises:
            ServerLostError: none answers, or one was lost on the way.
        """
        here = self._here()
        for client in here:
            client.begin_update()
        if self.folder:
            files = Folder(self.folder)
            for bucket in buckets(parameters, BUCKET):
                files.write(bucket)
            files.send(here, version)
        else:
            group = self._group(here)
            for bucket in buckets(parameters, BUCKET):
                group.send(bucket, version)
        for client in here:
            client.end_update()
            if "kv" not in self.away:
                client.flush(self.paused)

    def sleep(self, parts: frozenset[str]) -> None:
        """Release the memory of parts, of all that answer."""
        for client in self._here():
            client.release(parts)
        self.away |= parts

    def wake(self, parts: frozenset[str]) -> None:
        """Take the memory of parts again."""
        for client in self._here():
            client.retake(parts)
        self.away -= parts

    def pause(self) -> None:
        """Stop generating."""
        for client in self._here():
            client.pause()
        self.paused = True

    def resume(self) -> None:
        """Generate again."""
        for client in self._here():
            client.resume()
        self.paused = False

    def close(self) -> None:
        """Part from the servers; they run on."""
        if self.group:
            self.group.close()
            self.group = None

    def _here(self) -> list[Client]:
        found = [client for client in self.clients if client.version() is not None]
        if not found:
            urls = ", ".join(client.url for client in self.clients)
            raise ServerLostError(f"no SGLang server answers at {urls}")
        return found

    def _group(self, here: Sequence[Client]) -> Group:
        """The process group with exactly those servers."""
        if self.group is None or self.group.clients != tuple(here):
            self.close()
            self.group = Group(here, self.device)
        return self.group
