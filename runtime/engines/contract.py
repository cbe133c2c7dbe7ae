"""The contracts of engines: every member that a worker calls, and the check that an engine has them all.

What an op may use of an engine is in ``rlgraph.ops.interfaces``; the protocols here add what the worker does
with it: loading weights, moving its components off the device and back, saving. An engine is loaded by its
name in the registry (``rlgraph.engines.registry``), which refuses one that lacks a member. Each engine's own
file has a line by which mypy checks the types of its members, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, overload

import torch

from rlgraph.engines.registry import Serving, Training
from rlgraph.errors import RunError
from rlgraph.ops import interfaces
from rlgraph.runtime.engines.term import Term


class EngineContractError(RunError):
    """An engine lacks members that a worker calls."""


@dataclass(frozen=True)
class LentWeights:
    """The frozen weights of a train engine, for an engine that generates in the same process.

    Attributes:
        weights: whole plain tensors on the device, persistent buffers too, by the weights of the checkpoint
            that they hold. They keep their storages while the train engine is off the device, where these
            have no memory.
        layers: the modules of linear layers whose weights lie in 4 bits, by their weights likewise.
        need: called with the name of a call that reads them; raises RuntimeError while they are off the
            device.
    """

    weights: Mapping[tuple[Any, ...], torch.Tensor]
    layers: Mapping[tuple[Any, ...], Any]
    need: Callable[[str], None]


class HostedTrainEngine(interfaces.TrainEngine, Protocol):
    """A model that trains or scores, on one rank of its pool. All methods but ``join`` are collective.

    Its components are ``parameters`` and ``optimizer``.
    """

    def set_rate(self, rate: float) -> None:
        """Change the learning rate, at its peak."""

    def join(self, name: str, term: Term) -> None:
        """Add a node's loss to the optimizer steps of the next ``update``."""

    def offload(self, components: Sequence[str]) -> None:
        """Move components from the device to the host.

        Raises:
            RuntimeError: one is there already.
        """

    def reload(self, components: Sequence[str]) -> None:
        """Bring back what ``offload`` moved, bit for bit.

        Raises:
            RuntimeError: a component is on the device.
        """

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return every weight in full, by its name in the checkpoint.

        Those wider than ``dtype``, in which the reader holds them, may come in it.
        """

    def adapter(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the adapters in full, by their names in peft's files; ``dtype`` as of ``weights``."""

    def lend(self) -> LentWeights:
        """Return the weights that do not train, for an engine that generates on the same device."""

    def checkpoint_bytes(self) -> int:
        """Return how many bytes this rank writes of a checkpoint."""

    def begin_save(self, directory: str) -> None:
        """Copy what trains, and write it in the background."""

    def finish_save(self) -> dict[str, str]:
        """Wait until it is written; return the digests of this rank's files by name."""

    def load(self, directory: str) -> None:
        """Read what was saved, on any number of ranks."""

    def export(self, directory: str) -> None:
        """Write a Hugging Face directory."""


class HostedServeEngine(interfaces.ServeEngine, Protocol):
    """A model that generates, on one device of its pool; ``version`` is -1 without usable weights.

    Its components are the engine's own, such as ``weights`` and ``kv``.
    """

    @property
    def version(self) -> int:
        """Return the version of its weights."""

    @property
    def notes(self) -> Sequence[str]:
        """Return sentences on what of it differs from the plan, as a smaller cache."""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take every weight by its name in the checkpoint, or an adapter's by their names in peft's files.

        ``version`` stays -1 where a server was lost meanwhile: the caller brings them once more.
        """

    def sleep(self, components: Sequence[str]) -> None:
        """Free the memory of components on the device.

        Raises:
            RuntimeError: one sleeps already.
        """

    def wake(self, components: Sequence[str]) -> None:
        """Take the memory of components again; weights that slept come by ``load_weights``.

        Raises:
            RuntimeError: one is awake.
        """

    def settle(self, call: str) -> None:
        """End what stays in flight between calls, since ``call`` follows."""

    def close(self) -> None:
        """End what it started."""


@overload
def load_engine(record: Training, name: str, path: str, **options: Any) -> HostedTrainEngine: ...


@overload
def load_engine(record: Serving, name: str, path: str, **options: Any) -> HostedServeEngine: ...


def load_engine(record: Training | Serving, name: str, path: str, **options: Any) -> Any:
    """Return the engine of a record in the registry, whose ``name`` errors give, for the model at ``path``.

    Raises:
        EngineContractError: it lacks members of ``HostedTrainEngine`` or ``HostedServeEngine``.
    """
    contract = HostedTrainEngine if isinstance(record, Training) else HostedServeEngine
    engine = resolve_name(record.builder)(path, **options)
    check_members(engine, contract, name, record.builder)
    return engine


def check_members(engine: object, contract: type, name: str, builder: str) -> None:
    """Check that an engine has every member of its contract.

    Raises:
        EngineContractError: some are missing, with the names of the engine and of these.
    """
    missing = [member for member in members_of(contract) if not hasattr(engine, member)]
    if missing:
        law = f"the engine `{name}` ({builder}) has no {', '.join(missing)}, which a worker calls"
        raise EngineContractError(
            f"{law}\n  give it every member of {contract.__module__}.{contract.__name__}"
        )


def members_of(contract: type) -> list[str]:
    """Return the names of a protocol's members, those of the protocols that it extends first."""
    names = dict[str, None]()
    for protocol in reversed(contract.__mro__):
        if protocol in (object, Protocol):
            continue
        declared = [*inspect.get_annotations(protocol), *vars(protocol)]
        names |= dict.fromkeys(member for member in declared if not member.startswith("_"))
    return [*names]
