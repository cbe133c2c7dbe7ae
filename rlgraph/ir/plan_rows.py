"""Steps as plan files have them: one flat record for every kind, as docs/plan.schema.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, assert_never

from rlgraph.ir.actions import (
    MOVE_KINDS,
    ON_COLUMNS,
    Action,
    Kind,
    Lend,
    MoveEngine,
    OnColumns,
    RunOp,
    Sync,
    kind_of,
)
from rlgraph.ir.intervals import Cadences
from rlgraph.ir.steps import RowLayout, Version
from rlgraph.records import dataclass


@dataclass(frozen=True)
class StepRow:
    """One action. ``devices`` are numbers within the pool; ``models`` maps a model to the version read,
    or to none where it moves parts of an engine, whatever that holds.

    Steps are numbered in the order of an iteration; generation may be ``lead`` of them ahead (``Plan.slot``).
    """

    id: int
    phase: str
    kind: Kind
    node: str
    pool: str
    devices: tuple[int, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...]
    models: Mapping[str, Version | None]
    layout: RowLayout
    inserted: bool
    because: str
    after: tuple[int, ...]
    op: str = ""
    filters: bool = False
    updates: bool = False
    joins: str = ""
    beside: bool = False
    leaves: int = 0
    when: Cadences = ()
    region: str = ""
    lead: int = 0
    source: str = ""
    path: str = ""
    engine: str = ""
    parts: tuple[str, ...] = ()
    seconds: tuple[float, float] | None = None
    bytes: int | None = None


def action_fields(action: Action) -> dict[str, Any]:
    """Return the fields of a row that say what a step does; the others keep their defaults."""
    fields: dict[str, Any] = {"kind": kind_of(action), "models": {}}
    match action:
        case RunOp():
            fields |= {
                "models": action.models,
                "op": action.op,
                "filters": action.filters,
                "updates": action.updates,
                "joins": action.joins,
                "beside": action.on_host,
                "leaves": action.unfinished,
                "engine": action.engine,
            }
        case Sync():
            fields |= {
                "models": {action.model: action.version},
                "source": action.source,
                "path": action.path,
                "engine": "serve",
            }
        case MoveEngine():
            fields |= {"models": {action.model: None}, "engine": action.engine, "parts": action.parts}
        case OnColumns():
            pass
        case _:
            assert_never(action)
    return fields


def action_of(row: StepRow) -> Action:
    """Return what the step of a row does.

    Raises:
        ValueError: the row lacks what its kind needs, as the model of a sync.
    """
    match row.kind:
        case Kind.RUN:
            return _run(row)
        case Kind.SYNC:
            model, version = _synced(row)
            return Sync(model, version, row.path, row.source)
        case Kind.LEND:
            model, version = _synced(row)
            return Lend(model, version, row.path, row.source)
        case Kind.LOAD | Kind.OFFLOAD | Kind.WAKE | Kind.SLEEP:
            return _move(row)
        case _:
            return ON_COLUMNS[row.kind]


def _run(row: StepRow) -> RunOp:
    versions = {model: version for model, version in row.models.items() if version is not None}
    return RunOp(
        op=row.op,
        models=versions,
        engine=_engine(row),
        filters=row.filters,
        updates=row.updates,
        joins=row.joins,
        on_host=row.beside,
        unfinished=row.leaves,
    )


def _engine(row: StepRow) -> Literal["", "train", "serve"]:
    match row.engine:
        case "":
            return ""
        case "train":
            return "train"
        case "serve":
            return "serve"
        case _:
            raise ValueError(f"`engine` is train, serve or empty, not {row.engine!r}")


def _synced(row: StepRow) -> tuple[str, Version]:
    models = [*row.models.items()]
    if len(models) == 1:
        model, version = models[0]
        if version is not None:
            return model, version
    raise ValueError(f"a step of kind {row.kind} has one model, with the version that it reads")


def _move(row: StepRow) -> MoveEngine:
    if len(row.models) != 1:
        raise ValueError(f"a step of kind {row.kind} has one model")
    (model,) = row.models
    for (engine, direction), kind in MOVE_KINDS.items():
        if kind == row.kind:
            return MoveEngine(model, engine, direction, row.parts)
    raise ValueError(f"{row.kind} moves no engine")
