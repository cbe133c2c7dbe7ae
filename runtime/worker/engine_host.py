"""The engines of one worker: those of its pool, their versions, and where their components are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rlgraph.costs.lora_size import served_alone, shares_base
from rlgraph.engines.registry import TRAINING, serving
from rlgraph.ir.actions import MOVES, Kind, MoveEngine, complete
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan, TrainPlan
from rlgraph.ops.interfaces import Session
from rlgraph.ops.metric import Metric
from rlgraph.runtime.engines.contract import (
    HostedServeEngine,
    HostedTrainEngine,
    load_engine,
)
from rlgraph.runtime.engines.memory.allocator import release
from rlgraph.runtime.engines.weights.delta import Delta
from rlgraph.runtime.engines.weights.transfer import Named, Weights, cast
from rlgraph.runtime.engines.weights.transports import HANDED, RemoteTransport
from rlgraph.runtime.worker.process_groups import Groups, trained_on
from rlgraph.runtime.worker.round_end import RoundEnd


class EngineHost:
    """The train and serve engines that a plan puts on a pool. Collective within the pool.

    Invariants:

    - ``train`` and ``serve`` have an engine for each model that trains, or generates, on this pool.
    - Between iterations each engine's components lie where ``Plan.away`` says.
    - ``versions`` counts the updates of each train engine; a serve engine knows its own version.
    - Sessions of ops use serve engines only until ``_settle``: nothing is in flight while one moves or takes
      weights.
    """

    def __init__(self, plan: Plan, pool: str, device: str, groups: Groups, logs: Path) -> None:
        """Load them one after the other, each into the state in which an iteration begins.

        Train engines come first, and what of them leaves the device at some time is away while servers start:
        a server takes its cache at once, and less of it where it finds less memory than while it generates.
        """
        self.plan = plan
        self.pool = pool
        self.device = device
        self.groups = groups
        self.logs = logs
        self.train: dict[str, HostedTrainEngine] = {}
        self.serve: dict[str, HostedServeEngine] = {}
        self.versions: dict[str, int] = {}  # those of train engines
        self.serve_sections = {name: model.serve for name, model in plan.models.items() if model.serve}
        self.round_end = RoundEnd(groups.store, pool)
        self.sessions: dict[tuple[str, str], dict[str, Session]] = {}  # of (phase, node): ``Context.session``
        self._load_trainers()
        offloaded = self._make_room_for_servers()
        for name, model in plan.models.items():
            self._load_server(name, model)
        for name, components in offloaded.items():
            self.move(MoveEngine(name, "train", "back", components))

    def _load_trainers(self) -> None:
        """Load models that own their weights, each followed by those that share them.

        The weights have to be on the device while others begin to share them; only then they may leave.
        """
        sections = trained_on(self.plan, self.pool)
        for owner in sections:
            if self.plan.models[owner].shares:
                continue
            sharing = [name for name in sections if self.plan.models[name].shares == owner]
            together = [owner, *sharing]
            for name in together:
                self.versions[name] = 0
                self.train[name] = self._trainer(name, self.plan.models[name], sections[name])
            for name in together:
                self._put_away(name, "train")

    def _make_room_for_servers(self) -> dict[str, tuple[str, ...]]:
        """Offload what the plan ever offloads, where servers are to start; return what is to come back."""
        served_here = [name for name in self.plan.models if self.plan.serves(name, self.pool)]
        if not any(serving(self.serve_sections[name]).own_servers for name in served_here):
            return {}
        steps = (*self.plan.steps, *self.plan.eval_steps)
        moves = [step.action for step in steps if isinstance(step.action, MoveEngine)]
        offloads = [move for move in moves if move.kind is Kind.OFFLOAD]
        offloaded = {}
        for name in self.train:
            ever_offloaded = set[str]()
            for move in offloads:
                if move.model == name:
                    ever_offloaded |= {*move.parts}
            between_iterations = {*self.plan.away.get(f"{name}.train", ())}
            components = tuple(sorted(ever_offloaded - between_iterations))
            if components:
                self.move(MoveEngine(name, "train", "off", components))
                offloaded[name] = components
        return offloaded

    def _load_server(self, name: str, model: ModelPlan) -> None:
        if self.plan.serves(name, self.pool):
            self.serve[name] = self._served(name, model, self.serve_sections[name])
            self._put_away(name, "serve")

    def _trainer(self, name: str, model: ModelPlan, section: TrainPlan) -> HostedTrainEngine:
        """Return the train engine of one model."""
        record = TRAINING[section.engine]
        return load_engine(
            record,
            section.engine,
            model.path,
            head=model.head,
            frozen=model.optimizer is None,
            optimizer=model.optimizer and model.optimizer.model_dump(),
            seed=self.plan.seed,
            ranks=self.groups.ranks[name],
            config=model.config,
            trust_remote_code=model.trust_remote_code,
            base=self.train.get(model.shares),
            **section.model_dump(include={*record.options}),
        )

    def _served(self, name: str, model: ModelPlan, section: ServePlan) -> HostedServeEngine:
        """Return the serve engine of one model."""
        record = serving(section)
        sends_remotely = isinstance(self.groups.links.get(name), RemoteTransport)
        train_engine_has_copy = self.device == "cuda" and name in self.train
        offered = {
            "device": self.device,
            "pool": self.groups.mesh.get_group(),
            "logs": self.logs,
            "keeps": not train_engine_has_copy,
            "transport": "" if sends_remotely else self.groups.paths.get(name, ""),
            "adapter": self._adapter(name),
            "base": self.train[name].lend() if shares_base(self.plan, name, self.pool) else None,
        }
        options = {key: offered[key] for key in record.offered}
        for key, value in section.model_dump(include={*record.options}, exclude_none=True).items():
            options[record.options[key]] = value
        options |= {"config": model.config, "trust_remote_code": model.trust_remote_code}
        return load_engine(record, section.engine, model.path, **options)

    def _adapter(self, name: str) -> dict[str, Any] | None:
        """Return the settings of the adapter that syncs of a model bring alone; None: of all weights."""
        lora = served_alone(self.plan.models[name])
        return lora.model_dump() if lora else None

    def _put_away(self, model: str, engine: Literal["train", "serve"]) -> None:
        """Move off the device what the plan says is off it between iterations."""
        components = self.plan.away.get(self.plan.engine_key(model, engine, self.pool))
        if components:
            self.move(MoveEngine(model, engine, "off", components))

    def move(self, move: MoveEngine) -> None:
        """Carry out an offload, load, sleep or wake."""
        self._settle()
        MOVERS[move.kind](self, move.model, move.parts)

    def train_engine(self, model: str, promised: int, reader: str) -> HostedTrainEngine:
        """Return a train engine, which must be at the version that the plan promised a reader."""
        _check_version(model, self.versions[model], promised, reader)
        lending = self.plan.lenders.get(self.pool)
        for lent_model in lending.models if lending else ():
            self.serve[lent_model].settle("training")  # the pool is given back
        return self.train[model]

    def serve_engine(self, model: str, promised: int, reader: str) -> HostedServeEngine:
        """Return a serve engine, which must be at the version that the plan promised a reader."""
        engine = self.serve[model]
        _check_version(model, engine.version, promised, reader)
        return engine

    def sync(self, model: str, version: int) -> None:
        """Bring a serve engine to the weights of the train engine on the same devices, unless it has them."""
        self.train_engine(model, version, "the sync")
        while self.serve[model].version != version:  # again where a server was lost meanwhile
            self._settle()
            self.serve[model].load_weights(self._outgoing(model, version), version)
        self.release()

    def release(self) -> None:
        """Give cached memory back where servers share the device: they can't use it."""
        if any(serving(self.serve_sections[name]).own_servers for name in self.serve):
            release(self.device)

    def send(self, model: str, version: int) -> Mapping[str, Metric]:
        """Gather a train engine's weights and send them to the pool that serves the model; return metrics."""
        weights = self._outgoing(model, version)
        link = self.groups.links.get(model)
        receiving_pool = self.serve_sections[model].pool
        if link is None:
            deque(weights, maxlen=0)  # the pool's first device sends; the others only gather
        else:
            if receiving_pool != self.pool:
                self.round_end.sends(receiving_pool)
            link.send(Weights(version, weights))
        return link.metrics() if isinstance(link, Delta) else {}

    def _outgoing(self, model: str, version: int) -> Iterable[Named]:
        """Return a train engine's weights, gathered one after the other, as its serve engine takes them."""
        source = self.train_engine(model, version, "the sync")
        dtype = self.serve_sections[model].dtype
        weights = source.adapter(dtype) if self._adapter(model) else source.weights(dtype)
        if self.groups.paths[model] in HANDED:  # who takes them casts them
            return weights
        return cast(weights, getattr(torch, dtype))

    def receive(self, model: str, version: int) -> None:
        """Load the weights that are sent, which must be of this version."""
        self.round_end.receives()
        self._settle()
        weights = self.groups.links[model].receive(version)
        self.serve[model].load_weights(weights.tensors, weights.version)
        self.release()

    def checkpoint_bytes(self) -> int:
        """Return how many bytes this rank writes of a checkpoint."""
        return sum(engine.checkpoint_bytes() for _, engine in self._changing())

    def begin_save(self, folder: str) -> None:
        """Copy this rank's shards of every model that changes, and write them in the background."""
        for name, engine in self._changing():
            engine.begin_save(f"{folder}/{name}")

    def finish_save(self) -> dict[str, str]:
        """Wait until they are written; return the digests of this rank's files, by name in the folder."""
        digests: dict[str, str] = {}
        for name, engine in self._changing():
            for file, digest in engine.finish_save().items():
                digests[f"{name}/{file}"] = digest
        return digests

    def load(self, folder: str, versions: Mapping[str, int]) -> None:
        """Read what ``save`` wrote, on any number of ranks."""
        for name, engine in self._changing():
            engine.load(f"{folder}/{name}")
            self.versions[name] = versions[name]

    def export(self, folder: str) -> None:
        """Write every trained model as a Hugging Face directory."""
        for name, engine in self._trained():
            engine.export(f"{folder}/{name}")

    def notes(self) -> tuple[str, ...]:
        """Return what of the serve engines is other than the plan counts."""
        notes = list[str]()
        for engine in self.serve.values():
            notes += engine.notes
        return tuple(notes)

    def close(self) -> None:
        """End what serve engines started, and what ops keep here."""
        for session in self._sessions():
            session.close()
        for link in self.groups.links.values():
            if isinstance(link, RemoteTransport):
                link.close()
        for engine in self.serve.values():
            engine.close()

    def _settle(self) -> None:
        for session in self._sessions():
            session.settle()

    def _sessions(self) -> list[Session]:
        sessions = list[Session]()
        for sessions_of_node in self.sessions.values():
            sessions += sessions_of_node.values()
        return sessions

    def _trained(self) -> list[tuple[str, HostedTrainEngine]]:
        return [(name, engine) for name, engine in self.train.items() if self.plan.models[name].optimizer]

    def _changing(self) -> list[tuple[str, HostedTrainEngine]]:
        """Return those that train, and frozen ones that weights are copied onto."""
        targets = {step.updated for step in self.plan.steps if step.copied}
        return [*self._trained(), *((name, self.train[name]) for name in targets & self.train.keys())]


def _check_version(model: str, version: int, promised: int, reader: str) -> None:
    law = f"{reader} would read {model}@{version}; the plan promised {model}@{promised}"
    assert version == promised, law


def _offload(host: EngineHost, model: str, components: Sequence[str]) -> None:
    host.train[model].offload(components)


def _reload(host: EngineHost, model: str, components: Sequence[str]) -> None:
    host.train[model].reload(components)


def _sleep(host: EngineHost, model: str, components: Sequence[str]) -> None:
    host.serve[model].sleep(components)


def _wake(host: EngineHost, model: str, components: Sequence[str]) -> None:
    host.serve[model].wake(components)


# what carries out each kind of step that moves an engine's components
Mover = Callable[[EngineHost, str, Sequence[str]], None]
MOVERS: Mapping[Kind, Mover] = complete(
    {Kind.OFFLOAD: _offload, Kind.LOAD: _reload, Kind.SLEEP: _sleep, Kind.WAKE: _wake}, MOVES
)
