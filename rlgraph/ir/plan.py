"""The plan: what will run, step by step. Data, and JSON for tools.

One file: the records of one JSON document.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar, assert_never

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema, to_jsonable_python

from rlgraph.ir import plan_rows
from rlgraph.ir.actions import Action, Kind, Lend, MoveEngine, OnColumns, RunOp, Sync, kind_of
from rlgraph.ir.dependencies import dependencies
from rlgraph.ir.digraph import DiGraph
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.function import Function
from rlgraph.ir.graph import Region
from rlgraph.ir.intervals import Cadences, due
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.prediction import Peak, Prediction
from rlgraph.ir.schedules import ValueSchedule
from rlgraph.ir.steps import RowLayout, Version
from rlgraph.ops.column_types import ColumnType
from rlgraph.records import dataclass
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.model_settings import Optimizer, ServeSettings, Train
from rlgraph.syntax.settings import Schedule

VERSION = 1  # the file's format; raised when a released field comes, goes or means something else


@dataclass(frozen=True)
class Step:
    """One action of a plan: what it does, where, on which columns, and when.

    Steps are numbered in the order of an iteration; generation may be ``lead`` of them ahead (``Plan.slot``).

    Attributes:
        phase: ``train`` or ``eval``.
        devices: numbers within the pool.
        frees: the columns that no later step uses.
        because: why a pass inserted it; "" of a step that the user wrote.
        after: the numbers of the steps that must come first.
        action: what it does, a record of its kind.
        when: the iterations in which it runs, counted from 1; (): all.
        region: the filter until whose rows are enough it is repeated; also of the collect behind it.
        seconds: predicted for a cluster: at best, at worst.
        bytes: predicted: what the busiest device receives.
    """

    id: int
    phase: str
    node: str
    pool: str
    devices: tuple[int, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...]
    layout: RowLayout
    because: str
    after: tuple[int, ...]
    action: Action
    when: Cadences = ()
    region: str = ""
    lead: int = 0
    seconds: tuple[float, float] | None = None
    bytes: int | None = None

    @property
    def kind(self) -> Kind:
        """Return the name of its kind in plan files."""
        return kind_of(self.action)

    @property
    def run(self) -> RunOp | None:
        """Return the call of an op, or None of a step that a pass inserted."""
        return self.action if isinstance(self.action, RunOp) else None

    @property
    def inserted(self) -> bool:
        """Return whether a pass inserted it: the user's graph does not name it."""
        return self.run is None

    @property
    def op(self) -> str:
        """Return the name of its op; "" of an inserted step."""
        return self.run.op if self.run else ""

    @property
    def models(self) -> Mapping[str, Version | None]:
        """Return model -> the version that it reads, or None where it moves whatever an engine holds."""
        match self.action:
            case RunOp(models=models):
                return models
            case Sync(model=model, version=version):
                return {model: version}
            case MoveEngine(model=model):
                return {model: None}
            case OnColumns():
                return {}
            case _:
                assert_never(self.action)

    @property
    def model(self) -> str:
        """Return the model that it works on; of a copy, the one that gets the weights of another."""
        return next(iter(self.models))

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the kinds of engines that it works on, in the order in which weights pass them."""
        match self.action:
            case RunOp(engine=engine):
                return (engine,) if engine else ()
            case Sync():
                return ("train", "serve")
            case MoveEngine(engine=engine):
                return (engine,)
            case OnColumns():
                return ()
            case _:
                assert_never(self.action)

    @property
    def source(self) -> str:
        """Return the pool that sends in a sync between two pools; "" of every other step."""
        return self.action.source if isinstance(self.action, Sync) else ""

    @property
    def generates(self) -> bool:
        """Return whether it runs an op on a serve engine."""
        return self.run is not None and self.run.engine == "serve"

    @property
    def updated(self) -> str:
        """Return the model whose next version it writes; "" where it writes none."""
        return self.model if self.run and self.run.updates else ""

    @property
    def copied(self) -> str:
        """Return the model whose weights it copies onto another; "" where it copies none."""
        return self.run.copied if self.run else ""

    @property
    def joins(self) -> str:
        """Return the node of the update to whose optimizer steps it adds its loss; "" where it joins none."""
        return self.run.joins if self.run else ""

    @property
    def on_host(self) -> bool:
        """Return whether it runs on CPUs of the hosts, and its devices go on with other steps."""
        return self.run is not None and self.run.on_host

    @property
    def unfinished(self) -> int:
        """Return how many columns hold the rows that a region leaves unfinished for its next round."""
        return self.run.unfinished if self.run else 0

    def as_file_row(self) -> plan_rows.StepRow:
        """Return it as a plan file has it."""
        return plan_rows.StepRow(
            id=self.id,
            phase=self.phase,
            node=self.node,
            pool=self.pool,
            devices=self.devices,
            reads=self.reads,
            writes=self.writes,
            frees=self.frees,
            layout=self.layout,
            inserted=self.inserted,
            because=self.because,
            after=self.after,
            when=self.when,
            region=self.region,
            lead=self.lead,
            seconds=self.seconds,
            bytes=self.bytes,
            **plan_rows.action_fields(self.action),
        )

    @classmethod
    def of_file_row(cls, row: plan_rows.StepRow) -> Step:
        """Return the step that a plan file has as this row.

        Raises:
            ValueError: a field says what steps of its kind do not have.
        """
        step = cls(
            id=row.id,
            phase=row.phase,
            node=row.node,
            pool=row.pool,
            devices=row.devices,
            reads=row.reads,
            writes=row.writes,
            frees=row.frees,
            layout=row.layout,
            because=row.because,
            after=row.after,
            action=plan_rows.action_of(row),
            when=row.when,
            region=row.region,
            lead=row.lead,
            seconds=row.seconds,
            bytes=row.bytes,
        )
        written = vars(step.as_file_row())
        for name, value in vars(row).items():
            if value != written[name]:
                raise ValueError(f"a step of kind {row.kind} can't have this `{name}`")
        return step

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        rows = handler.generate_schema(plan_rows.StepRow)
        return core_schema.no_info_after_validator_function(cls.of_file_row, rows)


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
    def graph_name(self) -> str:
        """Return what the graph calls it: its name, without whose rows a part of it has."""
        return self.origin.partition("/")[0]


class TrainPlan(Train):
    """The engine that trains a model, on its pool."""

    pool: str = Field(description="where it is.")


class ServePlan(ServeSettings):
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
        assumptions = dict(vars(self))
        for name in ("cluster", "calibration", "margin"):
            del assumptions[name]
        return assumptions


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
        fields = {record.name: getattr(self, record.name) for record in dataclasses.fields(self)}
        for name in ("steps", "eval_steps"):
            fields[name] = [step.as_file_row() for step in fields[name]]
        return dict(plain(fields))

    @property
    def phases(self) -> dict[str, tuple[Step, ...]]:
        """Return the steps of training, and of evaluation where there is one."""
        if not self.eval_steps:
            return {"train": self.steps}
        return {"train": self.steps, "eval": self.eval_steps}

    @cached_property
    def needs(self) -> Mapping[str, DiGraph[int]]:
        """Return phase -> which of its steps needs which, by number (see ``dependencies``)."""
        needs = {}
        for phase, steps in self.phases.items():
            needs[phase] = dependencies({step.id: step for step in steps})
        return needs

    @cached_property
    def meshes(self) -> Mapping[str, Mesh]:
        """Return model -> the mesh of its train engine, for the models that have one."""
        meshes: dict[str, Mesh] = {}
        for name, model in self.models.items():
            train = model.train
            if train is None:
                continue
            rows = self.pools[train.pool] // train.tensor_parallel  # of devices that divide the layers
            shard = train.shard or rows
            meshes[name] = Mesh(
                replicate=rows // shard,
                shard=shard,
                tensor=train.tensor_parallel,
                experts=train.expert_parallel,
            )
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
        return {step.pool: step for step in self.steps if isinstance(step.action, Lend)}

    def serves(self, model: str, pool: str) -> bool:
        """Return whether a pool holds an engine that generates with a model."""
        serve = self.models[model].serve
        if serve and serve.pool == pool:
            return True
        return self._lends(pool, model)

    def engine_key(self, model: str, engine: str, pool: str) -> str:
        """Return the key in ``away`` of an engine of a model on a pool."""
        key = f"{model}.{engine}"
        is_lent = engine == "serve" and self._lends(pool, model)
        return f"{key} on {pool}" if is_lent else key

    def _lends(self, pool: str, model: str) -> bool:
        lender = self.lenders.get(pool)
        return lender is not None and model in lender.models

    def updates(self, model: str) -> list[Step]:
        """Return the training steps that write a next version of a model, one after the other."""
        return [step for step in self.steps if step.updated == model]

    def terms(self, step: Step) -> list[Step]:
        """Return an update, and before it the steps whose losses join its optimizer steps."""
        if not step.updated:
            return [step]
        joining = [term for term in self.phases[step.phase] if term.joins == step.node]
        return [*joining, step]

    def passes(self, step: Step) -> list[Step]:
        """Return one term of an update for each pass over rows: those that read the same tokens share one."""
        terms = self.terms(step)
        if len(terms) == 1:
            return terms
        passes: dict[tuple[Any, ...], Step] = {}
        for term in terms:
            op = self.functions[term.phase][term.node]
            tokens = op.ins.get("tokens", term.node)
            passes[tokens, op.ins.get("routing"), op.value("temperature")] = term
        return [*passes.values()]

    def new_versions(self, iteration: int) -> Counter[str]:
        """Return how many versions of each model an iteration writes, counted from 1."""
        versions: Counter[str] = Counter()
        for step in self.steps:
            if step.updated and due(step.when, iteration):
                versions[step.updated] += 1
        return versions

    def since_entry(self, model: str, version: Version, iteration: int) -> int:
        """Return how many versions ``v+2`` is after the one on entry: an iteration may leave out updates."""
        updates = self.updates(model)[: version.offset]
        return sum(due(update.when, iteration) for update in updates)

    def domain(self, phase: str, column: str) -> GraphDomain:
        """Return what a column has one row per."""
        return self.domains[phase][self.columns[phase][column].domain]

    def json(self) -> str:
        """Return it as JSON: the fields, the version of their format, and a checksum over all of it."""
        fields = {"version": VERSION, **self.fields}
        fields["checksum"] = checksum(fields)
        return json.dumps(fields, indent=1)


def plain(value: Any) -> Any:
    """Return a record or an attribute of a plan as JSON has it: lists for tuples, texts for paths."""
    return to_jsonable_python(value, inf_nan_mode="constants")


def checksum(fields: Mapping[str, Any]) -> str:
    """Return the checksum of a plan's JSON without its own field, whatever its layout."""
    covered = {name: value for name, value in fields.items() if name != "checksum"}
    text = json.dumps(covered, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
