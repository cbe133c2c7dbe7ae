"""The plan: what will run, step by step. Data, and JSON for tools.

One file: the records of one JSON document.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from pydantic import ConfigDict, Field
from pydantic_core import to_jsonable_python

from rlgraph.ir.dependencies import dependencies
from rlgraph.ir.digraph import DiGraph
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.function import Function
from rlgraph.ir.graph import Region
from rlgraph.ir.intervals import Cadences, due
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.prediction import Peak, Prediction
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.ir.steps import Facts, Kind, RowLayout, Version
from rlgraph.ops.column_types import ColumnType
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.model_settings import Optimizer, Serve, Train
from rlgraph.syntax.settings import Schedule

VERSION = 1  # the file's format; raised when a released field comes, goes or means something else


@dataclass(frozen=True)
class Step:
    """One action. ``devices`` are numbers within the pool; ``models`` maps a model to the version read,
    or to none where it moves parts of an engine, whatever that holds.

    Steps are numbered in the order of an iteration; generation may be ``lead`` of them ahead (``Plan.slot``).
    """

    id: int
    phase: str  # train or eval
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
    filters: bool = False  # its column says which rows stay
    updates: bool = False  # it writes the next version of its model
    joins: str = ""  # the node of the update to whose optimizer steps it adds its loss
    beside: bool = False  # its op runs on CPUs of the hosts, and its devices go on with other steps
    leaves: int = 0  # how many columns hold what a region leaves for its next round
    when: Cadences = ()  # the iterations in which it runs, counted from 1; (): all
    region: str = ""  # the filter until whose rows are enough it is repeated; also of the collect behind it
    lead: int = 0
    source: str = ""  # the pool that sends, if this is a sync between two
    path: str = ""  # a sync's: memory (within a process), ipc (within a device), broadcast or disk
    engine: str = ""  # train or serve: the engine that a step runs on, or whose parts it moves
    parts: tuple[str, ...] = ()  # what a load, offload, wake or sleep moves: parameters, optimizer, weights
    seconds: tuple[float, float] | None = None  # predicted for a cluster: at best, at worst
    bytes: int | None = None  # predicted: what the busiest device receives

    @property
    def facts(self) -> Facts:
        """Return what is known of every step of its kind."""
        return self.kind.facts

    @property
    def generates(self) -> bool:
        """Return whether it runs an op on a serve engine."""
        return self.engine == "serve" and not self.inserted

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the kinds of engines that it works on."""
        return self.facts.engines or (self.engine,)[: bool(self.engine)]

    @property
    def work(self) -> str:
        """Return what it works on, as pictures colour it."""
        if self.facts.work or self.trains:
            return self.facts.work or "update"
        return {"serve": "generate", "train": "score"}.get(self.engine, "other")

    @property
    def rate(self) -> str:
        """Return the calibrated rate that prices it, a field of ``Calibration``."""
        if self.facts.rate or self.copied:
            return self.facts.rate or "sync"
        if self.joins:
            return "host"  # the step that it joins takes the time
        if self.engine == "train":
            return "update" if self.updates else "score"
        return "generate" if self.engine == "serve" else "host"

    @property
    def trains(self) -> bool:
        """Return whether it is an update, though its loss may join the optimizer steps of another."""
        return self.updates or bool(self.joins)

    @property
    def model(self) -> str:
        """Return the model that it works on; of a copy, the one that gets the weights of another."""
        return next(iter(self.models))

    @property
    def copied(self) -> str:
        """Return the model whose weights it copies onto another; nothing where it copies none."""
        copied = [model for model in self.models if model != self.model]
        return copied[0] if copied else ""

    @property
    def updated(self) -> str:
        """Return the model whose next version it writes; nothing where it writes none."""
        return self.model if self.updates else ""


@dataclass(frozen=True)
class ColumnPlan:
    """A column as the plan has it. ``domain`` counts its rows (``Plan.domains``)."""

    type: ColumnType
    domain: str
    layout: RowLayout
    writer: str
    origin: str  # the column of a node that it is, or is a copy of
    moved: bool = False  # whether it is the same rows as another, in another layout
    sizes: tuple[int, ...] = ()  # of its fixed axes; () where it has none, or its model's path is still open
    stored: str = ""  # the narrower integers that hold its values; "" where they are of the type's own dtype

    @property
    def said(self) -> str:
        """Return what the graph calls it: its name, without whose rows a part of it has."""
        return self.origin.partition("/")[0]


class TrainPlan(Train):
    """The engine that trains a model, on its pool."""

    pool: str = Field(description="where it is.")


class ServePlan(Serve):
    """The engine that generates with a model, on its pool."""

    pool: str = Field(description="where it is.")


@dataclass(frozen=True)
class ModelPlan:
    """A model, what holds it, and where its weights come from."""

    path: str
    head: str
    frozen: bool
    optimizer: Optimizer | None
    train: TrainPlan | None  # None: no step trains or scores with it
    serve: ServePlan | None  # None: no step generates with it
    rate: ValueSchedule | None = None  # its learning rate, where that changes over the iterations
    shares: str = ""  # the model that holds its frozen weights too, on the same devices
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of its config.json that are others here
    trust_remote_code: bool = False  # whether Python files that come with it run


@dataclass(frozen=True)
class Target:
    """The cluster that a plan is made for, by its name or file, and what is said of the work on it."""

    cluster: str
    prompt_tokens: float | None = None  # the mean of a prompt
    response_tokens: float | Mapping[str, float] | None = None  # the mean, or as ``Lengths.of`` takes it
    calibration: str | None = None  # the file of factors that a run was measured to have
    expert_imbalance: float | None = None  # as ``Workload.imbalance``
    # filter -> the share it keeps; "": of others
    kept_rows: Mapping[str, float] = field(default_factory=dict)
    turns: float | None = None  # the mean of a conversation
    tool_seconds: float | None = None  # of a turn
    margin: float | None = None  # the share of a device's memory that stays free; None: as the cluster says

    @property
    def assumptions(self) -> dict[str, Any]:
        """Return what is said of the work, as ``workload`` takes it."""
        others = ("cluster", "calibration", "margin")
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(frozen=True)
class Origin:
    """The inputs of a plan: enough to make it again, and to say what has changed since."""

    graph: str  # a path or the name of a shipped graph, as it was given
    overrides: tuple[str, ...]
    devices: int  # of all pools together
    rlgraph: str  # the version that planned
    composed: Mapping[str, Any]  # the graph with its edits, overrides and ``${...}`` filled in
    target: Target | None = None  # None: made for no cluster


@dataclass(frozen=True)
class Plan:
    """A graph for a cluster; its pydantic configuration is that of the records in it, too.

    ``slot`` are the numbers of ``steps`` in the order in which they are submitted while the pipeline is full:
    in slot t, each step runs for iteration t + its ``lead``. Where no step leads, it is one iteration.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    graph: str
    about: str
    digest: str  # the graph's, without its schedule and pools: a resumed run must have the same
    seed: int
    device: str  # what the devices are: cuda or cpu
    pools: Mapping[str, int]  # name -> devices; their order is that of the devices
    schedule: Schedule
    models: Mapping[str, ModelPlan]
    steps: tuple[Step, ...]
    slot: tuple[int, ...]
    away: Mapping[str, tuple[str, ...]]  # "policy.train" -> its parts that are off the device between steps
    eval_steps: tuple[Step, ...]
    eval_every: int | Interval
    eval_before: bool  # whether an evaluation comes before the first iteration
    report: Mapping[str, str]
    domains: Mapping[str, Mapping[str, GraphDomain]]  # phase -> what columns have one row per
    columns: Mapping[str, Mapping[str, ColumnPlan]]  # phase -> column
    functions: Mapping[str, Mapping[str, Function]]  # phase -> node
    regions: Mapping[str, Region]  # those of the training steps, by their filter
    notes: tuple[str, ...]
    open_values: tuple[str, ...]
    origin: Origin | None = None  # None: made from a tree, not from a graph by name
    peak: Mapping[str, Peak] | None = None  # one per pool; None: planned for no cluster
    predicted: Prediction | None = None

    @property
    def iterations(self) -> int:
        return self.schedule.iterations or 0

    @property
    def fields(self) -> dict[str, Any]:
        """Return what its JSON holds."""
        return dict(plain(self))

    @property
    def phases(self) -> dict[str, tuple[Step, ...]]:
        """Return the steps of training, and of evaluation where there is one."""
        return {"train": self.steps} | ({"eval": self.eval_steps} if self.eval_steps else {})

    @cached_property
    def needs(self) -> Mapping[str, DiGraph[int]]:
        """Return phase -> which of its steps needs which, by number (see ``dependencies``)."""
        return {phase: dependencies({s.id: s for s in steps}) for phase, steps in self.phases.items()}

    @cached_property
    def meshes(self) -> Mapping[str, Mesh]:
        """Return model -> the mesh of its train engine, for the models that have one."""
        meshes: dict[str, Mesh] = {}
        for name, model in self.models.items():
            if model.train:
                copies = self.pools[model.train.pool] // model.train.tensor_parallel
                shard = model.train.shard or copies
                tensor, experts = model.train.tensor_parallel, model.train.expert_parallel
                meshes[name] = Mesh(copies // shard, shard, tensor, experts)
        return meshes

    @cached_property
    def devices(self) -> Mapping[str, range]:
        """Return pool -> the numbers of its devices."""
        devices: dict[str, range] = {}
        start = 0
        for pool, count in self.pools.items():
            devices[pool] = range(start, start + count)
            start += count
        return devices

    @cached_property
    def lenders(self) -> Mapping[str, Step]:
        """Return pool -> the step that lends it to generation on another pool."""
        return {step.pool: step for step in self.steps if step.facts.lends}

    def serves(self, model: str, pool: str) -> bool:
        """Return whether a pool holds an engine that generates with a model."""
        serve = self.models[model].serve
        return bool(serve and serve.pool == pool) or self._lends(pool, model)

    def held(self, model: str, engine: str, pool: str) -> str:
        """Return the name in ``away`` of an engine of a model on a pool."""
        if engine == "serve" and self._lends(pool, model):
            return f"{model}.{engine} on {pool}"
        return f"{model}.{engine}"

    def _lends(self, pool: str, model: str) -> bool:
        return pool in self.lenders and model in self.lenders[pool].models

    def updates(self, model: str) -> list[Step]:
        """Return the training steps that write a next version of a model, one after the other."""
        return [step for step in self.steps if step.updated == model]

    def terms(self, step: Step) -> list[Step]:
        """Return an update, and before it the steps whose losses join its optimizer steps."""
        joining = [s for s in self.phases[step.phase] if s.joins == step.node] if step.updates else []
        return [*joining, step]

    def passes(self, step: Step) -> list[Step]:
        """Return one term of an update for each pass over rows: those that read the same tokens share one."""
        if len(terms := self.terms(step)) == 1:
            return terms

        def read(term: Step) -> tuple[Any, ...]:
            op = self.functions[term.phase][term.node]
            return op.ins.get("tokens", term.node), op.ins.get("routing"), op.value("temperature")

        return [*{read(term): term for term in terms}.values()]

    def new_versions(self, iteration: int) -> Counter[str]:
        """Return how many versions of each model an iteration writes, counted from 1."""
        return Counter(step.updated for step in self.steps if step.updates and due(step.when, iteration))

    def since_entry(self, model: str, version: Version, iteration: int) -> int:
        """Return how many versions ``v+2`` is after the one on entry: an iteration may leave out updates."""
        return sum(due(step.when, iteration) for step in self.updates(model)[: version.offset])

    def domain(self, phase: str, column: str) -> GraphDomain:
        """Return what a column has one row per."""
        return self.domains[phase][self.columns[phase][column].domain]

    def json(self) -> str:
        """Return it as JSON: the fields, the version of their format, and a checksum over all of it."""
        fields = {"version": VERSION, **self.fields}
        return json.dumps({**fields, "checksum": checksum(fields)}, indent=1)


def plain(value: Any) -> Any:
    """Return a record or an attribute of a plan as JSON has it: lists for tuples, texts for paths."""
    return to_jsonable_python(value, inf_nan_mode="constants")


def checksum(fields: Mapping[str, Any]) -> str:
    """Return the checksum of a plan's JSON without its own field, whatever its layout."""
    text = json.dumps({name: value for name, value in fields.items() if name != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
