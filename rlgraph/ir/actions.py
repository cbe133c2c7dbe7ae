"""The actions of steps: a small record for each kind, with the fields of that kind alone.

Sites that treat kinds differently match on ``Step.action``. A further kind is a further record here and in
``Action``: mypy names each ``match`` that lacks it (``assert_never``), and tables of handlers (``complete``)
fail on import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal, TypeVar

from rlgraph.ir.steps import Version
from rlgraph.records import dataclass

Handler = TypeVar("Handler")


class Kind(StrEnum):
    """The kind of a step. Its text is its name in plan files."""

    RUN = "run"
    REPEAT = "repeat"
    SELECT = "select"
    COLLECT = "collect"
    MERGE = "merge"
    REPARTITION = "repartition"
    SYNC = "sync"
    LEND = "lend"
    LOAD = "load"
    OFFLOAD = "offload"
    WAKE = "wake"
    SLEEP = "sleep"


@dataclass(frozen=True)
class RunOp:
    """Call an op that the user's graph names.

    Attributes:
        op: its name in the graph.
        models: model -> the version that it reads; the first is the one that it works on.
        engine: the kind of engine that it runs on; "" where it runs on none.
        filters: whether its column says which rows stay.
        updates: whether it writes the next version of its model.
        joins: the node of the update to whose optimizer steps it adds its loss; "" where it joins none.
        on_host: whether it runs on CPUs of the hosts, so that its devices go on with other steps.
        unfinished: how many columns hold the rows that a region leaves unfinished for its next round.
    """

    op: str
    models: Mapping[str, Version]
    engine: Literal["", "train", "serve"] = ""
    filters: bool = False
    updates: bool = False
    joins: str = ""
    on_host: bool = False
    unfinished: int = 0

    @property
    def trains(self) -> bool:
        """Return whether it is an update, though its loss may join the optimizer steps of another."""
        return self.updates or bool(self.joins)

    @property
    def copied(self) -> str:
        """Return the model whose weights it copies onto its own; "" where it copies none."""
        models = [*self.models]
        return models[1] if len(models) > 1 else ""


@dataclass(frozen=True)
class OnColumns:
    """An action of a pass on columns alone: it works on no model, and its step says all else about it."""


@dataclass(frozen=True)
class Repeat(OnColumns):
    """Repeat each row of a column for the rows that are made of it, on the device that has the row."""


@dataclass(frozen=True)
class Select(OnColumns):
    """Select the rows of a column that a filter lets stay, on the device that has them."""


@dataclass(frozen=True)
class Collect(OnColumns):
    """End a region once per iteration, with rows of all of the region's rounds."""


@dataclass(frozen=True)
class Merge(OnColumns):
    """Make one column of several, each of which has some of its rows."""


@dataclass(frozen=True)
class Repartition(OnColumns):
    """Move columns to another layout or pool."""


@dataclass(frozen=True)
class Sync:
    """Hand the weights of a train engine to a serve engine.

    Attributes:
        model: whose weights.
        version: which version of them.
        path: how they travel: memory (within a process), ipc (within a device), broadcast or disk.
        source: the pool that sends, where that is another than the step's; "" where it is the same.
    """

    model: str
    version: Version
    path: str
    source: str = ""


@dataclass(frozen=True)
class Lend(Sync):
    """Hand weights to a serve engine of the pool that trains, which draws rows while it waits for others."""


@dataclass(frozen=True)
class MoveEngine:
    """Move parts of an engine off its device, or back onto it.

    Attributes:
        model: whose engine.
        engine: which of the model's engines.
        direction: ``off`` the device or ``back``.
        parts: what moves: parameters, optimizer, base, adapters, weights, kv.
    """

    model: str
    engine: Literal["train", "serve"]
    direction: Literal["off", "back"]
    parts: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """Return its name in plan files."""
        return MOVE_KINDS[self.engine, self.direction]


Action = RunOp | Repeat | Select | Collect | Merge | Repartition | Sync | Lend | MoveEngine

# Copies of rows: a replay makes them again, and records leave them out. The driver may hand such a step over
# together with the step behind it.
Copy = Repeat | Select | Repartition

# their rows are read where they lie, in the layout of the step; other kinds take rows from wherever they are
IN_PLACE = (Kind.RUN, Kind.REPEAT, Kind.SELECT)

ON_COLUMNS: Mapping[Kind, Repeat | Select | Collect | Merge | Repartition] = {
    Kind.REPEAT: Repeat(),
    Kind.SELECT: Select(),
    Kind.COLLECT: Collect(),
    Kind.MERGE: Merge(),
    Kind.REPARTITION: Repartition(),
}

MOVE_KINDS: Mapping[tuple[Literal["train", "serve"], Literal["off", "back"]], Kind] = {
    ("train", "back"): Kind.LOAD,
    ("train", "off"): Kind.OFFLOAD,
    ("serve", "back"): Kind.WAKE,
    ("serve", "off"): Kind.SLEEP,
}

MOVES = tuple(MOVE_KINDS.values())

KINDS: Mapping[type[Action], Kind] = {
    RunOp: Kind.RUN,
    **{type(action): kind for kind, action in ON_COLUMNS.items()},
    Sync: Kind.SYNC,
    Lend: Kind.LEND,
}


def kind_of(action: Action) -> Kind:
    """Return the name of an action's kind in plan files."""
    return action.kind if isinstance(action, MoveEngine) else KINDS[type(action)]


def complete(handlers: Mapping[Kind, Handler], kinds: Iterable[Kind] = Kind) -> Mapping[Kind, Handler]:
    """Return a table of handlers; where a kind has none, raise a ``TypeError``, as its module is imported."""
    missing = [kind for kind in kinds if kind not in handlers]
    if missing:
        raise TypeError(f"no handler for steps of kind {', '.join(missing)}; add one to the table")
    return handlers
