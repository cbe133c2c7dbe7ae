"""The graph as the compiler holds it: data, never changed in place.

Passes turn a ``Graph`` into a new one. What the user wrote are nodes of kind ``run``; passes insert nodes of
the other kinds, each with a ``because``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from rlgraph.errors import Mark, fail
from rlgraph.ir.actions import Kind
from rlgraph.ir.dependencies import dependencies
from rlgraph.ir.digraph import DiGraph
from rlgraph.ir.domains import GraphDomain, Route, ancestors, origins
from rlgraph.ir.intervals import Cadences, count
from rlgraph.ir.schedules import ValueSchedule, Varying
from rlgraph.ir.steps import NONE, RowLayout, Version
from rlgraph.ops.column_types import ColumnType
from rlgraph.ops.declare import Op, Role
from rlgraph.records import dataclass
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.model_settings import ModelSection, ServeSettings
from rlgraph.syntax.settings import Refill, Schedule


@dataclass(frozen=True)
class Model:
    """A set of weights by name. ``path`` is a folder, or a hub id where no such folder exists."""

    name: str
    path: str
    spec: ModelSection
    mark: Mark
    rate: ValueSchedule | None = None  # its learning rate, where that changes over the iterations

    @cached_property
    def serve(self) -> ServeSettings:
        """The settings of its serve engine."""
        return self.spec.serve.of_engine()


@dataclass(frozen=True)
class Region:
    """Steps from a data source to a filter that are repeated, in rounds, until enough rows stay.

    ``keep`` is how many iterations a row may wait that stayed and was not needed; 0: it is dropped.
    """

    filter: str
    source: str
    kind: str  # what a round begins with: prompts, or a source's own samples
    rows: int  # exactly so many does an iteration have
    times: int  # rows that one of the source makes
    rounds: int  # there are at most so many
    expected: float  # share of the rows that stays, until one is measured
    over_sample: float  # how much more a later round asks for than it needs by what was measured
    keep: int
    policy: str = ""  # the target of a function that says which rows that wait come now; "": all of them
    streams: bool = False  # its rounds go on through the iterations, as ``schedule.buffer`` by group says

    @property
    def max_rows_in_flight(self) -> int:
        """Return the rows that may be begun and not used at a time, at most."""
        iterations = self.keep + 1 if self.streams else 1
        return self.rows * iterations

    def rows_to_request(self, missing: int, seen_rows: int, stayed_rows: int) -> int:
        """Return the rows that a round requests of the source, for ``missing`` rows more, at least 1.

        In the rounds before, the filter saw ``seen_rows`` and kept ``stayed_rows`` of them.

        Example:
            >>> region = Region("informative", "prompts", "prompts", 64, 8, 10, 1.0, 1.0, 0)
            >>> request = region.rows_to_request
            >>> request(64, 0, 0), request(48, 64, 16), request(8, 192, 56)
            (8, 8, 4)
        """
        if seen_rows == 0:
            return math.ceil(missing / self.times / self.expected)
        most = math.ceil(self.rows / self.times / self.expected)
        if stayed_rows == 0:
            return min(most, math.ceil(most * self.over_sample))
        wanted = math.ceil(self.over_sample * missing * seen_rows / stayed_rows / self.times)
        return min(wanted, math.ceil(most * self.over_sample))


@dataclass(frozen=True)
class Column:
    """A named value; ``layout`` says how its rows lie on the pool's devices (see passes/partition.py)."""

    name: str
    type: ColumnType
    domain: str
    writer: str
    layout: RowLayout = NONE
    pool: str = ""  # its rows lie there
    copy_of: str = ""  # the column of a node that it is a copy of, by however many steps; "" where it is none
    moved: bool = False  # whether it is the same rows as another, in another layout

    @property
    def label(self) -> str:
        """Return the type with the concrete domain."""
        return self.type.over(self.domain)


@dataclass(frozen=True)
class Call:
    """A function to call: where it is, its attributes, and which column fills which parameter."""

    op: Op
    target: str
    attributes: Mapping[str, Any]
    ins: Mapping[str, str] = field(default_factory=dict)  # parameter -> column
    outs: Mapping[str, str] = field(default_factory=dict)  # the op's name -> column
    courses: Mapping[str, Varying] = field(default_factory=dict)  # attributes that change over the iterations

    def name_of(self, role: Role) -> str:
        """Return the attribute that has a role; nothing where none has it."""
        return self.op.declared.roles.get(role, "")

    def value(self, role: Role, default: Any = None) -> Any:
        """Return what the attribute says that has a role, or the default."""
        return self.attributes.get(self.name_of(role), default)

    def course(self, role: Role) -> Varying | None:
        """Return how the attribute changes over the iterations that has a role."""
        return self.courses.get(self.name_of(role))


@dataclass(frozen=True)
class Node:
    """One stage: what the user wrote (kind ``run``), or an inserted action."""

    name: str
    kind: Kind = Kind.RUN
    call: Call | None = None
    hooks: Mapping[str, Call] = field(default_factory=dict)  # attribute -> its function
    model: str | None = None
    reads_next: bool = False  # model: policy@next
    of: str | None = None  # the model whose weights it copies onto its own
    of_next: bool = False  # of: policy@next
    of_version: int | None = None
    tokenizer: str | None = None
    rows: tuple[str, ...] = ()  # the filters, or makers of rows, whose rows alone it sees
    route: Route | None = None  # likewise by a column's value; the rest without values
    state: str | None = None  # the node whose state it has, its own or another's
    joins: str = ""  # of an update, the one to whose optimizer steps it adds its loss
    refill: Refill | None = None  # a filter's: what is before it is repeated until enough rows stay
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    domain: str | None = None
    version: int | None = None  # counted from its model's version on entry to the iteration
    after: tuple[str, ...] = ()  # nodes that must come first although no column says so
    when: Cadences = ()  # the iterations in which it runs; (): all
    pool: str = ""
    source: str = ""  # the pool that sends, if this is a sync between two
    layout: RowLayout = NONE
    because: str = ""
    mark: Mark | None = None
    edited: Mark | None = None  # the last place elsewhere, an edit or the command line, that changed it

    @property
    def inserted(self) -> bool:
        return self.kind is not Kind.RUN

    @property
    def called(self) -> Call:
        """Return the call of a node that the user wrote."""
        assert self.call is not None, f"{self.name} is inserted and has no op"
        return self.call

    @property
    def op(self) -> Op:
        return self.called.op

    @property
    def weights(self) -> str:
        """Return the version of its model that it reads: ``policy@v+1``, or ``policy@v-1``, an older one."""
        if self.call and self.op.declared.recorded:
            return f"{self.model}, recorded"
        return f"{self.model}@{Version(self.version or 0)}"

    @property
    def optimizer_steps(self) -> int:
        """Return the optimizer steps that an update makes in an iteration."""
        if self.call is None:
            return 1
        return int(self.call.value("minibatches", 1)) * int(self.call.value("epochs", 1))

    @property
    def unfinished_columns(self) -> int:
        """Return how many columns it leaves of rows that are unfinished; 0 where it leaves none."""
        if self.call is None:
            return 0
        declared = self.op.declared
        switch = declared.leaves_with  # an attribute with which alone it leaves some; "": it always does
        if switch and not self.call.attributes.get(switch):
            return 0
        return declared.leaves

    @property
    def updates(self) -> bool:
        """Return whether it writes the next version of its model."""
        return self.trains and not self.joins

    @property
    def trains(self) -> bool:
        """Return whether it is an update, though its loss may join the optimizer steps of another."""
        return self.call is not None and self.op.declared.updates


@dataclass(frozen=True)
class Graph:
    """Everything that passes read and write."""

    name: str
    about: str
    seed: int
    models: Mapping[str, Model]
    nodes: tuple[Node, ...]
    devices: Mapping[str, int]  # pool -> how many; in the order of the devices
    engines: Mapping[str, str]  # "policy.train", "policy.serve" -> the pool that it is on
    schedule: Schedule
    eval_every: int | Interval = 0  # from one evaluation to the next; 0: none on the way
    eval_before: bool = True  # whether an evaluation comes before the first iteration
    report: Mapping[str, str] = field(default_factory=dict)  # metric -> column; only in an eval graph
    columns: Mapping[str, Column] = field(default_factory=dict)
    domains: Mapping[str, GraphDomain] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)  # the keys are their filters
    notes: tuple[str, ...] = ()  # what a pass did that the user should know
    open_values: tuple[str, ...] = ()  # paths of values written ???
    removed: Mapping[str, Mark] = field(default_factory=dict)  # what edits took out of it -> where
    dropped: tuple[Node, ...] = ()  # nodes that lead to nothing

    @cached_property
    def _by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def writers(self) -> Mapping[str, Node]:
        """Return the node that writes each column, once edges are resolved to columns."""
        writers = {}
        for node in self.nodes:
            for column in node.writes:
                writers[column] = node
        return writers

    @cached_property
    def _readers(self) -> Mapping[str, list[Node]]:
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for column in dict.fromkeys(node.reads):
                readers.setdefault(column, []).append(node)
        return readers

    @cached_property
    def needs(self) -> DiGraph[str]:
        """Return which node needs which, once edges are resolved to columns (see ``dependencies``)."""
        return dependencies(self._by_name)

    @cached_property
    def in_order(self) -> tuple[Node, ...]:
        """Return the nodes in depth-first topological order: as written, each need before its first user.

        Raises:
            GraphError: nodes wait for each other, by columns or by versions.
        """
        cycle = self.needs.cycle()
        if cycle:
            chain = " needs ".join(f"`{name}`" for name in (*cycle, cycle[0]))
            remedy = "a reader of `model@next` comes after its update, and a reader of the version on entry "
            remedy += "before it"
            mark = self.node(cycle[-1]).mark
            raise fail("cycle", f"nodes wait for each other: {chain}", mark, remedy=remedy)
        return tuple(map(self.node, self.needs.postorder()))

    def node(self, name: str) -> Node:
        return self._by_name[name]

    def with_nodes(self, changed: Mapping[str, Node]) -> Graph:
        """Return the graph with some nodes replaced, by their names, each in its place."""
        nodes = [changed.get(node.name, node) for node in self.nodes]
        return replace(self, nodes=tuple(nodes))

    def updates(self, model: str | None) -> list[Node]:
        """Return the nodes that write a next version of a model, one after the other."""
        return [node for node in self.nodes if node.updates and node.model == model]

    def ancestors(self, domain: str | None) -> list[GraphDomain]:
        """Return a domain and those that it was made of, up to its source."""
        return ancestors(self.domains, domain)

    def origins(self, domain: str | None) -> list[list[GraphDomain]]:
        """Return a domain's ancestors; of a union, or what was made of one, those by way of each part."""
        return origins(self.domains, domain)

    def optimizer_steps(self, model: str) -> int | None:
        """Return the optimizer steps of a model in all of a run; None where the run's length is not known."""
        iterations = self.schedule.iterations
        if iterations is None:
            return None
        steps = 0
        for update in self.updates(model):
            steps += update.optimizer_steps * count(update.when, iterations)
        return steps

    def readers(self, column: str) -> list[Node]:
        """Return the nodes that read a column, in their order."""
        return self._readers.get(column, [])
