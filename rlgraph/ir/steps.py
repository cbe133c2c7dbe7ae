"""A step's kind with the facts of that, how its rows lie, and the version of weights that it reads.

Passes, costs, texts, pictures and the driver ask a kind's facts. What only code can say of a kind stands in
tables of handlers (``complete``): which calls it is (``runtime/driver/step_calls.py``), and, for kinds that
move parts of engines, by which method (``runtime/worker/engine_host.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self, TypeVar

from rlgraph.text_value import TextValue

Handler = TypeVar("Handler")


@dataclass(frozen=True)
class Facts:
    """Facts that hold for every step of a kind. A kind that copies columns on the spot needs no others.

    Attributes:
        says: the step as a sentence, with the fields of ``rlgraph.printing.plan_text.sentence``.
        work: what it works on, as a picture colours it; "" of a run, where its op says it.
        rate: the calibrated rate that prices it, a field of ``Calibration``; "" of a run.
        engines: those that it works on, in the order in which weights pass them; () of a run.
        copies: whether its columns are copies of rows, so that replay makes them again and records leave
            them out; the driver may hand it over with the step behind it.
        in_place: whether each device reads the rows that lie on it, in the step's layout.
        layout: how its rows lie: ``even``, as its ``filter``'s, or "" where that is decided otherwise.
        at_filter: whether it runs on the pool of the filter that it waits for.
        moves: whether it moves parts of an engine ``off`` the device or ``back``.
        syncs: whether it hands weights of a train engine to a serve engine.
        lends: whether that is one that its pool holds to draw rows with while it waits for others.
        collects: whether it ends a region, once an iteration, with rows of all the region's rounds.
        merges: whether it makes a column of several, each of which has some of its rows.
        keeps_types: whether each column that it writes has the type of the one that it reads.
    """

    says: str
    work: Literal["", "columns", "weights"] = "columns"
    rate: Literal["", "sync", "move", "repartition", "host"] = "host"
    engines: tuple[Literal["train", "serve"], ...] = ()
    copies: bool = False
    in_place: bool = False
    layout: Literal["", "even", "filter"] = ""
    at_filter: bool = False
    moves: Literal["", "off", "back"] = ""
    syncs: bool = False
    lends: bool = False
    collects: bool = False
    merges: bool = False
    keeps_types: bool = False

    @property
    def verb(self) -> str:
        """Return its word in short titles: the first of the sentence."""
        return self.says.partition(" ")[0]


def _move(verb: str, engine: Literal["train", "serve"], way: Literal["off", "back"], place: str) -> Facts:
    says = f"{verb} {{parts}} of {{holders}} {place} {{where}}"
    return Facts(says, work="weights", rate="move", engines=(engine,), moves=way)


class Kind(StrEnum):
    """The kind of a step. Its text is its name in plan files."""

    facts: Facts

    RUN = "run", Facts("run {node} ({op}){with_model} on {where}", work="", rate="", in_place=True)
    REPEAT = (
        "repeat",
        Facts("repeat {reads} for each {row} on {where}", copies=True, in_place=True, layout="even"),
    )
    SELECT = (
        "select",
        Facts(
            "select the rows of {reads} that stay on {where}",
            copies=True,
            in_place=True,
            layout="filter",
            at_filter=True,
        ),
    )
    COLLECT = (
        "collect",
        Facts(
            "collect the rows that {region} keeps on {where}", layout="even", at_filter=True, collects=True
        ),
    )
    MERGE = (
        "merge",
        Facts("merge the rows of {reads} on {where}", rate="repartition", layout="even", merges=True),
    )
    REPARTITION = (
        "repartition",
        Facts("move {reads} to {where}", rate="repartition", copies=True, keeps_types=True),
    )
    SYNC = (
        "sync",
        Facts(
            "sync {models} from the train engine{source} to the serve engine on {where}, {path}",
            work="weights",
            rate="sync",
            engines=("train", "serve"),
            syncs=True,
        ),
    )
    LEND = (
        "lend",
        Facts(
            "lend {where} to generation with {models}, while it waits for rows",
            work="weights",
            rate="sync",
            engines=("train", "serve"),
            syncs=True,
            lends=True,
        ),
    )
    LOAD = "load", _move("load", "train", "back", "to")
    OFFLOAD = "offload", _move("offload", "train", "off", "from")
    WAKE = "wake", _move("wake", "serve", "back", "on")
    SLEEP = "sleep", _move("sleep", "serve", "off", "on")

    def __new__(cls, name: str, facts: Facts) -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.facts = name, facts
        return kind


MOVES = tuple(kind for kind in Kind if kind.facts.moves)


def mover(engine: str, way: Literal["off", "back"]) -> Kind:
    """Return the kind of step that moves parts of an engine off its device, or back."""
    return next(kind for kind in MOVES if kind.facts.engines == (engine,) and kind.facts.moves == way)


def complete(handlers: Mapping[Kind, Handler], kinds: Iterable[Kind] = Kind) -> Mapping[Kind, Handler]:
    """Return a table of handlers; where a kind has none, raise a ``TypeError``, as its module is imported."""
    missing = [kind for kind in kinds if kind not in handlers]
    if missing:
        raise TypeError(f"no handler for steps of kind {', '.join(missing)}; add one to the table")
    return handlers


class RowLayout(TextValue):
    """A way to lay rows on a pool's devices, and into how many mini-batches they are cut first; 0: into none.

    The ways are those of passes/partition.py.

    Example:
        >>> RowLayout("spread", 4), RowLayout.parse("spread/4").minibatches
        ('spread/4', 4)
    """

    way: str
    minibatches: int

    def __new__(cls, way: str, minibatches: int = 0) -> Self:
        layout = super().__new__(cls, f"{way}/{minibatches}" if minibatches else way)
        layout.way, layout.minibatches = way, minibatches
        return layout

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a layout as it prints; a ``ValueError`` where behind its ``/`` stands no number."""
        way, _, minibatches = text.partition("/")
        return cls(way, int(minibatches or 0))


NONE = RowLayout("")  # the layout of a step that has no rows
ONE = RowLayout("one")  # all rows on the pool's first device


class Version(TextValue):
    """A version of a model's weights, as updates since entry to the iteration: ``v``, ``v+1``, ``v-1``.

    It is negative where generation leads.

    Example:
        >>> Version(0), Version(1), Version.parse("v-1").offset
        ('v', 'v+1', -1)
    """

    offset: int

    def __new__(cls, offset: int) -> Self:
        version = super().__new__(cls, f"v{offset:+d}" if offset else "v")
        version.offset = offset
        return version

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a version as it prints; a ``ValueError`` where it is none."""
        if not re.fullmatch(r"v([+-]\d+)?", text):
            raise ValueError(f"{text!r} is no version of weights: v, v+1, v-1")
        return cls(int(text[1:] or 0))

    @property
    def is_older(self) -> bool:
        """Return whether it is from before the iteration, as generation that runs ahead reads it."""
        return self.offset < 0

    @property
    def next(self) -> Self:
        """Return the version that an update of this one writes."""
        return type(self)(self.offset + 1)
