"""The engines of one worker: those of its pool, their versions, and where their parts are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from rlgraph.costs.lora_size import served_alone
from rlgraph.engines.registry import TRAINING, serving
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan, TrainPlan
from rlgraph.ir.steps import MOVES, Kind, complete
from rlgraph.ops.interfaces import Session
from rlgraph.ops.metric import Metric
from rlgraph.runtime.engines.memory.allocator import release
from rlgraph.runtime.engines.weights.delta import Delta
from rlgraph.runtime.engines.weights.transfer import Named, Weights, cast
from rlgraph.runtime.engines.weights.transports import HANDED, RemoteTransport
from rlgraph.runtime.worker.process_groups import Groups
from rlgraph.runtime.worker.round_end import RoundEnd

METHODS = complete(  # each kind of step that moves an engine's parts has a method of it
    {Kind.OFFLOAD: "offload", Kind.LOAD: "reload", Kind.SLEEP: "sleep", Kind.WAKE: "wake"}, MOVES
)


class EngineHost:
    """The train and serve engines that a plan puts on a pool. Collective within the pool."""

    def __init__(self, plan: Plan, pool: str, device: str, groups: Groups, logs: Path) -> None:
        """Load them one after the other, each into the state in which an iteration begins.

        Train engines come first, and what of them leaves the device at some time is away while servers start:
        a server takes its cache at once, and less of it where it finds less memory than while it generates.
        """
        self.plan, self.pool, self.device, self.groups, self.logs = plan, pool, device, groups, logs
        self.train: dict[str, Any] = {}
        self.serve: dict[str, Any] = {}
        self.versions: dict[str, int] = {}  # those of train engines
        self.round_end = RoundEnd(groups.store, pool)
        self.sessions: dict[tuple[str, str], dict[str, Session]] = {}  # of (phase, node): ``Context.session``
        self._load_trainers()
        room = self._make_room()
        for name, model in plan.models.items():
            self._load_server(name, model)
        for name, parts in room.items():
            self.move(Kind.LOAD, name, parts)

    def _load_trainers(self) -> None:
        """Load those that hold weights, each with those that share them, which need them there for it."""
        here = {n: m.shares for n, m in self.plan.models.items() if m.train and m.train.pool == self.pool}
        for owner in [name for name, shares in here.items() if not shares]:
            together = [owner, *(name for name, shares in here.items() if shares == owner)]
            for name in together:
                model = self.plan.models[name]
                self.versions[name], self.train[name] = 0, self._trainer(name, model, model.train)
            for name in together:
                self._put_away(Kind.OFFLOAD, name)

    def _make_room(self) -> dict[str, tuple[str, ...]]:
        """Put away what the plan ever puts away, where servers are to start; return what is to come back."""
        serves = [m.serve for name, m in self.plan.models.items() if self.plan.serves(name, self.pool)]
        if not any(serving(serve).own_servers for serve in serves):
            return {}
        steps = [step for step in (*self.plan.steps, *self.plan.eval_steps) if step.kind is Kind.OFFLOAD]
        room = {}
        for name in self.train:
            parts = {part for step in steps if name in step.models for part in step.parts}
            stays = tuple(sorted(parts - {*self.plan.away.get(f"{name}.train", ())}))
            if stays:
                self.move(Kind.OFFLOAD, name, stays)
                room[name] = stays
        return room

    def _load_server(self, name: str, model: ModelPlan) -> None:
        if self.plan.serves(name, self.pool):
            self.serve[name] = self._served(name, model, model.serve)
            self._put_away(Kind.SLEEP, name)

    def _trainer(self, name: str, model: ModelPlan, spec: TrainPlan) -> Any:
        """Return the train engine of one model."""
        engine = TRAINING[spec.engine]
        return resolve_name(engine.builder)(
            model.path,
            head=model.head,
            frozen=model.optimizer is None,
            optimizer=model.optimizer and model.optimizer.model_dump(),
            seed=self.plan.seed,
            device=self.device,
            mesh=self.groups.meshes[name],
            group=self.groups.mesh.get_group(),
            sequence=self.groups.sequences[name],
            tensor=self.groups.tensors[name],
            experts=self.groups.experts[name],
            config=model.config,
            trust_remote_code=model.trust_remote_code,
            base=self.train.get(model.shares),
            **spec.model_dump(include={*engine.options}),
        )

    def _served(self, name: str, model: ModelPlan, spec: ServePlan) -> Any:
        """Return the serve engine of one model."""
        engine, is_remote = serving(spec), isinstance(self.groups.links.get(name), RemoteTransport)
        offered = {
            "device": self.device,
            "pool": self.groups.mesh.get_group(),
            "logs": self.logs,
            "keeps": not (self.device == "cuda" and name in self.train),  # else the train engine has them
            "transport": "" if is_remote else self.groups.paths.get(name, ""),
            "adapter": self._adapter(name),
        }
        settings = spec.model_dump(include={*engine.options}, exclude_none=True)
        own = {engine.options[key]: value for key, value in settings.items()}
        own |= {"config": model.config, "trust_remote_code": model.trust_remote_code}
        offers = {key: offered[key] for key in engine.offered}
        return resolve_name(engine.builder)(model.path, **offers, **own)

    def _adapter(self, name: str) -> dict[str, Any] | None:
        """Return the settings of the adapter that syncs of a model bring alone; None: of all weights."""
        lora = served_alone(self.plan.models[name])
        return lora.model_dump() if lora else None

    def _put_away(self, kind: Kind, model: str) -> None:
        """Move off the device what the plan says is off it between iterations."""
        if parts := self.plan.away.get(self.plan.held(model, kind.facts.engines[0], self.pool)):
            self.move(kind, model, parts)

    def move(self, kind: Kind, model: str, parts: Sequence[str]) -> None:
        """Carry out an offload, load, sleep or wake."""
        self._settle()
        held = self.train if "train" in kind.facts.engines else self.serve
        getattr(held[model], METHODS[kind])(tuple(parts))

    def at(self, model: str, engine: str, promised: int, reader: str) -> Any:
        """Return a train or serve engine, which must be at the version that the plan promised a reader."""
        held = self.versions[model] if engine == "train" else self.serve[model].version
        assert held == promised, f"{reader} would read {model}@{held}; the plan promised {model}@{promised}"
        if engine == "train" and (lend := self.plan.lenders.get(self.pool)):
            for lent in lend.models:
                self.serve[lent].settle("training")  # the pool is given back
        return self.train[model] if engine == "train" else self.serve[model]

    def sync(self, model: str, version: int) -> None:
        """Bring a serve engine to the weights of the train engine beside it, unless it holds them."""
        self.at(model, "train", version, "the sync")
        while self.serve[model].version != version:  # again where a server was lost meanwhile
            self._settle()
            self.serve[model].load_weights(self._outgoing(model, version), version)
        self.release()

    def release(self) -> None:
        """Give cached memory back where servers share the device: they can't use it."""
        if any(serving(self.plan.models[name].serve).own_servers for name in self.serve):
            release(self.device)

    def send(self, model: str, version: int) -> Mapping[str, Metric]:
        """Gather a train engine's weights and send them to the pool that serves the model; return metrics."""
        weights = self._outgoing(model, version)
        if link := self.groups.links.get(model):
            if (pool := self.plan.models[model].serve.pool) != self.pool:
                self.round_end.sends(pool)
            link.send(Weights(version, weights))
        else:
            deque(weights, maxlen=0)  # the pool's first device sends; the rest only gather
        return link.metrics() if isinstance(link, Delta) else {}

    def _outgoing(self, model: str, version: int) -> Iterable[Named]:
        """Return a train engine's weights, gathered one after the other, as its serve engine takes them."""
        source = self.at(model, "train", version, "the sync")
        precision = self.plan.models[model].serve.dtype
        weights: Iterable[Named] = (source.adapter if self._adapter(model) else source.weights)(precision)
        if self.groups.paths[model] in HANDED:  # who takes them casts them
            return weights
        return cast(weights, getattr(torch, precision))

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
        files = [(name, engine.finish_save()) for name, engine in self._changing()]
        return {f"{name}/{file}": digest for name, sums in files for file, digest in sums.items()}

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
        return tuple(note for engine in self.serve.values() for note in getattr(engine, "notes", ()))

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
        return [session for kept in self.sessions.values() for session in kept.values()]

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, engine) for name, engine in self.train.items() if self.plan.models[name].optimizer]

    def _changing(self) -> list[tuple[str, Any]]:
        """Return those that train, and frozen ones that weights are copied onto."""
        copied = {step.updated for step in self.plan.steps if step.copied}
        return [*self._trained(), *((name, self.train[name]) for name in copied & self.train.keys())]
