"""The engines of one worker: those of its pool, their versions, and where their parts are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.plan import ModelPlan, Plan
from rlgraph.runtime.fsdp.engine import FsdpEngine
from rlgraph.runtime.fsdp.lora import Unadapted
from rlgraph.runtime.meeting import Groups
from rlgraph.runtime.serve.transformers import TransformersEngine

TRAIN_ENGINES: dict[str, Callable[..., Any]] = {"fsdp": FsdpEngine}
PLACEMENT = ("engine", "pool", "tensor_parallel", "sync_folder")  # an engine here is on one device
SERVERS = ("restarts", "addresses")  # options of engines that run in servers
# a step's kind -> the engine that it moves parts of, and that engine's method
MOVES = {
    "offload": ("train", "offload"),
    "load": ("train", "reload"),
    "sleep": ("serve", "sleep"),
    "wake": ("serve", "wake"),
}


class Engines:
    """The train and serve engines that a plan puts on a pool. Collective within the pool."""

    def __init__(self, plan: Plan, pool: str, device: str, groups: Groups, logs: Path) -> None:
        """Load them one after the other, each into the state in which an iteration begins."""
        self.plan, self.pool, self.device, self.groups, self.logs = plan, pool, device, groups, logs
        self.train: dict[str, Any] = {}
        self.serve: dict[str, Any] = {}
        self.versions: dict[str, int] = {}  # of train engines
        for name, model in plan.models.items():
            self._load(name, model)

        for name, model in plan.models.items():
            if model.shares in self.train:
                held = self.train[model.shares]
                self.train[name] = held if plan.models[model.shares].frozen else Unadapted(held)

    def _load(self, name: str, model: ModelPlan) -> None:
        if model.train and model.train["pool"] in (None, self.pool):
            self.versions[name] = 0
            if not model.shares:
                self.train[name] = self._trainer(model, model.train)
                self._put_away("offload", name)
        if model.serve and model.serve["pool"] in (None, self.pool):
            self.serve[name] = self._served(model.path, model.serve)
            self._put_away("sleep", name)

    def _trainer(self, model: ModelPlan, spec: Mapping[str, Any]) -> Any:
        """The train engine of one model."""
        engine, options = _engine(spec, TRAIN_ENGINES)
        return engine(
            model.path,
            head=model.head,
            frozen=model.optimizer is None,
            optimizer=model.optimizer,
            seed=self.plan.seed,
            device=self.device,
            mesh=self.groups.mesh,
            **options,
        )

    def _served(self, path: str, spec: Mapping[str, Any]) -> Any:
        """The serve engine of one model."""
        options = {name: value for name, value in spec.items() if name not in (*PLACEMENT, "cache_tokens")}
        if spec["cache_tokens"]:
            options["max_cached_tokens"] = spec["cache_tokens"]
        if spec["engine"] == "transformers":
            own = {name: value for name, value in options.items() if name not in SERVERS}
            return TransformersEngine(path, device=self.device, **own)
        from rlgraph.runtime.serve.sglang.groups import (
            sglang_engine,
        )  # what it needs is not installed everywhere

        group = self.groups.mesh.get_group()
        return sglang_engine(
            path,
            device=self.device,
            group=spec["tensor_parallel"],
            pool=group,
            logs=self.logs,
            sync_folder=spec["sync_folder"],
            **options,
        )

    def _put_away(self, kind: str, model: str) -> None:
        """Move off the device what the plan says is off it between iterations."""
        if parts := self.plan.away.get(f"{model}.{MOVES[kind][0]}"):
            self.move(kind, model, parts)

    def move(self, kind: str, model: str, parts: Sequence[str]) -> None:
        """Carry out an offload, load, sleep or wake."""
        engine, method = MOVES[kind]
        held = self.train if engine == "train" else self.serve
        getattr(held[model], method)(tuple(parts))

    def at(self, model: str, engine: str, promised: int, reader: str) -> Any:
        """A model's train or serve engine, which must be at the version that the plan promised a reader."""
        held = self.versions[model] if engine == "train" else self.serve[model].version
        assert held == promised, f"{reader} would read {model}@{held}; the plan promised {model}@{promised}"
        return self.train[model] if engine == "train" else self.serve[model]

    def sync(self, model: str, version: int) -> None:
        """Bring a serve engine to the weights of the train engine beside it, unless it holds them."""
        source = self.at(model, "train", version, "the sync")
        if self.serve[model].version != version:
            self.serve[model].load_weights(source.weights(), version)

    def send(self, model: str, version: int) -> None:
        """Gather a train engine's weights and send them to the pool that serves the model."""
        source = self.at(model, "train", version, "the sync")
        link = self.groups.links.get(model)
        if link:
            link.send(source.weights())
        else:
            deque(source.weights(), maxlen=0)  # the pool's first device sends; the rest only gather

    def receive(self, model: str, version: int) -> None:
        """Load the weights that ``send`` sends on another pool."""
        self.serve[model].load_weights(self.groups.links[model].receive(), version)

    def begin_save(self, folder: str) -> None:
        """Copy this rank's shards of every model that changes, and write them in the background."""
        for name, engine in self._changing():
            engine.begin_save(f"{folder}/{name}")

    def finish_save(self) -> None:
        """Wait until they are written."""
        for _, engine in self._changing():
            engine.finish_save()

    def load(self, folder: str, versions: Mapping[str, int]) -> None:
        """Read what ``save`` wrote, on any number of ranks."""
        for name, engine in self._changing():
            engine.load(f"{folder}/{name}")
            self.versions[name] = versions[name]

    def export(self, folder: str) -> None:
        """Write every trained model as a Hugging Face directory."""
        for name, engine in self._trained():
            engine.export(f"{folder}/{name}")

    def close(self) -> None:
        """End what serve engines started."""
        for engine in self.serve.values():
            engine.close()

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, engine) for name, engine in self.train.items() if self.plan.models[name].optimizer]

    def _changing(self) -> list[tuple[str, Any]]:
        """Those that train, and frozen ones that weights are copied onto."""
        copied = {step.updated for step in self.plan.steps if step.copied}
        return [*self._trained(), *((name, self.train[name]) for name in copied & self.train.keys())]


def _engine(spec: Mapping[str, Any], known: Mapping[str, Callable[..., Any]]) -> tuple[Any, dict[str, Any]]:
    """The class of an engine and its options, without those that say where it is."""
    return known[spec["engine"]], {name: value for name, value in spec.items() if name not in PLACEMENT}
