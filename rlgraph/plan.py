"""The plan: what will run, step by step. Data, and JSON for tools."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlgraph.cadence import Cadences, count
from rlgraph.controller import Controller
from rlgraph.course import Course, Varying
from rlgraph.graph import Call, Graph, Node, Region, label
from rlgraph.passes.refill import collects, members
from rlgraph.sections import Optimizer, Schedule, Serve, Train

LEAVES, RETURNS = ("offload", "sleep"), ("load", "wake")  # kinds of steps that move parts of engines
MOVES = (*LEAVES, *RETURNS)
VERSION = 1  # of the JSON; a released field that goes, comes or changes its meaning raises it


@dataclass(frozen=True)
class Step:
    """One action. ``devices`` are numbers within the pool; ``models`` maps a model to the version read.

    Steps are numbered in the order of one iteration. ``lead``: how many iterations ahead of the updates the
    step runs, where generation overlaps training (see ``Plan.slot``).
    """

    id: int
    phase: str  # train or eval
    kind: str  # run, sync, repeat, select, collect, repartition, load, offload, wake or sleep
    node: str
    pool: str
    devices: tuple[int, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...]
    models: Mapping[str, str]
    layout: str
    inserted: bool
    because: str
    after: tuple[int, ...]
    op: str = ""
    filters: bool = False  # its column says which rows stay
    updates: bool = False  # it writes the next version of its model
    leaves: int = 0  # in a region, the columns of what it leaves unfinished for the next round
    when: Cadences = ()  # the iterations in which it runs, counted from 1; (): all
    region: str = ""  # the filter until whose rows are enough it is repeated; also of the collect behind it
    lead: int = 0
    source: str = ""  # of a sync: the pool that sends, where it is another one
    path: str = ""  # of a sync: memory (within a process), ipc (between two of a device), broadcast or disk
    engine: str = ""  # train or serve: the engine that a step runs on, or whose parts it moves
    parts: tuple[str, ...] = ()  # what a load, offload, wake or sleep moves: parameters, optimizer, weights
    seconds: tuple[float, float] | None = None  # predicted for a cluster: at best, at worst
    bytes: int | None = None  # predicted: what the busiest device receives

    @property
    def copied(self) -> str:
        """The model whose weights it copies onto another; nothing where it copies none."""
        return [*self.models][1] if len(self.models) > 1 else ""

    @property
    def updated(self) -> str:
        """The model whose next version it writes; nothing where it writes none."""
        return next(iter(self.models)) if self.updates else ""


@dataclass(frozen=True)
class Function:
    """How a worker calls an op or a hook."""

    target: str
    attributes: Mapping[str, Any]
    ins: Mapping[str, str] = field(default_factory=dict)  # parameter -> column
    outs: Mapping[str, str] = field(default_factory=dict)  # the op's name of an output -> column
    handles: Mapping[str, str] = field(default_factory=dict)
    courses: Mapping[str, Varying] = field(default_factory=dict)  # attributes that change over the iterations
    model: str | None = None
    of: str | None = None  # the model whose weights it copies onto its own
    tokenizer: str | None = None
    hooks: Mapping[str, Function] = field(default_factory=dict)

    def at(self, iteration: int, adapted: Mapping[str, float] | None = None) -> Function:
        """The same with the attributes that change as they are in an iteration, counted from 1.

        ``adapted`` has those that have a controller; without, they are as in the first iteration.
        """
        courses = {name: course for name, course in self.courses.items() if isinstance(course, Course)}
        now = {name: course.at(iteration) for name, course in courses.items()}
        hooks = {path: hook.at(iteration) for path, hook in self.hooks.items()}
        return replace(self, attributes={**self.attributes, **now, **(adapted or {})}, hooks=hooks)

    @property
    def controllers(self) -> dict[str, Controller]:
        """Of the attributes that follow what is measured."""
        return {name: one for name, one in self.courses.items() if isinstance(one, Controller)}

    @property
    def varying(self) -> dict[str, Any]:
        """The values of the attributes that have a course, those of hooks among them."""
        hooks = {name: value for hook in self.hooks.values() for name, value in hook.varying.items()}
        return {**hooks, **{name: self.attributes[name] for name in self.courses}}


@dataclass(frozen=True)
class ColumnPlan:
    """What the plan says of a column. ``domain`` counts its rows; ``times`` rows for each of ``parent``'s."""

    type: str
    domain: str
    layout: str
    writer: str
    parent: str | None
    times: int


@dataclass(frozen=True)
class ModelPlan:
    """A model, what holds it, and where its weights come from."""

    path: str
    head: str
    frozen: bool
    optimizer: Mapping[str, Any] | None
    train: Mapping[str, Any] | None  # None: no step trains or scores with it
    serve: Mapping[str, Any] | None  # None: no step generates with it
    rate: Course | None = None  # its learning rate, where that changes over the iterations
    shares: str = (
        ""  # the model whose train engine it is too: frozen alike, or trained by an adapter, then off
    )


@dataclass(frozen=True)
class Target:
    """The cluster that a plan is made for, by its name or file, and what is said of the work on it."""

    cluster: str
    prompt_tokens: float | None = None  # the mean of a prompt
    response_tokens: float | None = None
    calibration: str | None = None  # the file of factors that a run was measured to have


@dataclass(frozen=True)
class Origin:
    """What a plan was made from: enough to make it again, and to say what has changed since."""

    graph: str  # a path or the name of a shipped graph, as it was given
    overrides: tuple[str, ...]
    devices: int  # what ``auto`` stood for
    rlgraph: str  # the version that planned
    composed: Mapping[str, Any]  # the graph with its edits, overrides and ``${...}`` filled in
    target: Target | None = None  # None: made for no cluster


@dataclass(frozen=True)
class Peak:
    """The most that a device of a pool holds, in which step, and what it is made of. Bytes."""

    bytes: int
    capacity: int
    step: str
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Prediction:
    """What one iteration takes on a cluster: seconds at best and at worst, and what that assumes.

    Where generation overlaps training it is an iteration of the steady state.
    """

    cluster: str
    seconds: tuple[float, float]
    pools: Mapping[str, tuple[float, float]]  # seconds in which each pool is busy
    assumed: tuple[str, ...]
    calibrated: str = ""  # the run that the factors on its seconds come from


@dataclass(frozen=True)
class Plan:
    """A graph for a cluster.

    ``slot`` are the numbers of ``steps`` in the order in which they are submitted while the pipeline is full:
    in slot t, each step runs for iteration t + its ``lead``. Where no step leads, it is one iteration.
    """

    graph: str
    about: str
    digest: str  # of the graph, without its schedule and pools: a resumed run must have the same
    seed: int
    pools: Mapping[str, int]  # name -> devices; their order is that of the devices
    schedule: Mapping[str, Any]
    models: Mapping[str, ModelPlan]
    steps: tuple[Step, ...]
    slot: tuple[int, ...]
    away: Mapping[str, tuple[str, ...]]  # "policy.train" -> its parts that are off the device between steps
    eval_steps: tuple[Step, ...]
    eval_every: int
    report: Mapping[str, str]
    columns: Mapping[str, Mapping[str, ColumnPlan]]  # phase -> column
    functions: Mapping[str, Mapping[str, Function]]  # phase -> node
    regions: Mapping[str, Region]  # of the training steps, by their filter
    notes: tuple[str, ...]
    open_values: tuple[str, ...]
    origin: Origin | None = None  # None: made from a tree, not from a graph by name
    peak: Mapping[str, Peak] | None = None  # of each pool; None: planned for no cluster
    predicted: Prediction | None = None

    @property
    def iterations(self) -> int:
        return int(self.schedule["iterations"])

    def json(self) -> str:
        """As JSON: the fields, the version of their format, and a checksum over all of it."""
        fields = {"version": VERSION, **asdict(self)}
        return json.dumps({**fields, "checksum": checksum(fields)}, indent=1)

    @staticmethod
    def from_json(text: str, name: str = "plan") -> Plan:
        """The plan that ``json`` wrote; ``name`` is what errors call the text.

        Raises:
            GraphError: it is no plan, or one of another version, or not as it was written.
        """
        from rlgraph.planfile import parse  # it knows every record here

        return parse(text, name)


def checksum(fields: Mapping[str, Any]) -> str:
    """Of a plan's JSON without its checksum, however that is laid out."""
    text = json.dumps({name: value for name, value in fields.items() if name != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(graph: Graph, evaluation: Graph | None, eval_every: int, digest: str) -> Plan:
    """The steps of one iteration, and those of an evaluation."""
    phases = {"train": graph} | ({"eval": evaluation} if evaluation else {})
    steps = {phase: _steps(g, phase) for phase, g in phases.items()}
    return Plan(
        graph=graph.name,
        about=graph.about,
        digest=digest,
        seed=graph.seed,
        pools=dict(graph.devices),
        schedule=_schedule(graph.schedule),
        models=_models(graph, tuple(phases.values())),
        steps=steps["train"],
        slot=tuple(step.id for step in steps["train"]),
        away={},
        eval_steps=steps.get("eval", ()),
        eval_every=eval_every,
        report=dict(evaluation.report) if evaluation else {},
        columns={phase: _columns(g) for phase, g in phases.items()},
        functions={phase: {n.name: _function(n) for n in g.nodes if n.call} for phase, g in phases.items()},
        regions=dict(graph.regions),
        notes=graph.notes,
        open_values=graph.open_values,
    )


def _schedule(schedule: Schedule) -> dict[str, Any]:
    return dict(schedule.model_dump(warnings=False))


def _steps(graph: Graph, phase: str) -> tuple[Step, ...]:
    numbers = {node.name: number for number, node in enumerate(graph.nodes, 1)}
    writer = {column: node.name for node in graph.nodes for column in node.writes}
    last = {column: node.name for node in graph.nodes for column in (*node.writes, *node.reads)}
    keep, regions = set(graph.report.values()), _regions(graph)
    steps = []
    for node in graph.nodes:
        needs = {numbers[writer[c]] for c in node.reads} | {numbers[name] for name in node.after}
        touched = (*node.reads, *node.writes)
        steps.append(
            Step(
                id=numbers[node.name],
                phase=phase,
                kind=node.kind,
                node=node.name,
                pool=node.pool,
                devices=(0,) if node.layout == "one" else tuple(range(graph.devices[node.pool])),
                reads=node.reads,
                writes=node.writes,
                frees=tuple(c for c in dict.fromkeys(touched) if last[c] == node.name and c not in keep),
                models=_version(node),
                layout=node.layout,
                inserted=node.inserted,
                because=node.because,
                after=tuple(sorted(needs)),
                op=node.op.name if node.call else "",
                filters=node.call is not None and node.op.declared.filters,
                updates=node.updates,
                leaves=node.op.declared.leaves if node.call else 0,
                when=node.when,
                region=regions.get(node.name, ""),
                source=node.source,
                path=_path(node, graph),
                engine=_engine(node),
            )
        )
    return tuple(steps)


def _regions(graph: Graph) -> dict[str, str]:
    """Node -> the filter of the region that it belongs to."""
    ends = collects(graph.nodes)
    return {node.name: end.after[0] for end in ends for node in (*members(graph.nodes, end), end)}


def _engine(node: Node) -> str:
    return (node.op.engine or "") if node.call else "serve" if node.kind == "sync" else ""


def _path(node: Node, graph: Graph) -> str:
    """How a sync's weights travel: that follows from where the two engines are.

    To servers that run already they are broadcast, or go through files, wherever those are.
    """
    if node.kind != "sync":
        return ""
    serve = graph.models[str(node.model)].spec.serve
    if node.source or serve.addresses:
        return "disk" if serve.sync_folder else "broadcast"
    return "memory" if serve.engine == "transformers" else "ipc"


def _version(node: Node) -> dict[str, str]:
    if node.model is None or node.version is None or (node.call and node.op.engine is None):
        return {}
    read = {node.model: label(node.version)}
    return {**read, node.of: label(node.of_version or 0)} if node.of else read


def _function(node: Node) -> Function:
    assert node.call
    call: Call = node.call
    return Function(
        target=call.target,
        attributes=dict(call.attributes),
        ins=dict(call.ins),
        outs=dict(call.outs),
        handles=dict(node.op.handles),
        model=node.model,
        of=node.of,
        tokenizer=node.tokenizer,
        courses=dict(call.courses),
        hooks={
            name: Function(hook.target, dict(hook.attributes), courses=dict(hook.courses))
            for name, hook in node.hooks.items()
        },
    )


def _columns(graph: Graph) -> dict[str, ColumnPlan]:
    found = {}
    for name, column in graph.columns.items():
        domain = graph.domains[column.domain]
        found[name] = ColumnPlan(
            str(column.type), column.domain, column.layout, column.writer, domain.parent, domain.times
        )
    return found


def _models(graph: Graph, phases: tuple[Graph, ...]) -> dict[str, ModelPlan]:
    """The models that some step needs, with the engines that hold them."""
    nodes = [node for phase in phases for node in phase.nodes]
    used = [node for node in nodes if node.call and node.op.engine]
    engines = {name: {n.op.engine for n in used if name in (n.model, n.of)} for name in graph.models}
    tokenizers = {node.tokenizer for node in nodes}
    found = {}
    for name, model in graph.models.items():
        if engines[name] or name in tokenizers:
            spec = model.spec
            optimizer = None if spec.frozen else _optimizer(spec.optimizer, name, graph)
            train = _held(spec.train, graph.engines[f"{name}.train"]) if engines[name] else None
            serve = _held(spec.serve, graph.engines[f"{name}.serve"]) if "serve" in engines[name] else None
            found[name] = ModelPlan(model.path, spec.head, spec.frozen, optimizer, train, serve, model.rate)
    apart = {m for n in nodes if n.call and (n.op.copies or n.of) for m in (n.model, n.of)}
    return {name: replace(model, shares=_shared(name, found, apart)) for name, model in found.items()}


def _shared(name: str, models: Mapping[str, ModelPlan], apart: set[str | None]) -> str:
    """The model that holds the weights of a frozen one already; "" where none does."""
    model, names = models[name], list(models)
    if not model.train or not model.frozen or name in apart:
        return ""
    for other in names:
        held = models[other].train
        if not held or (models[other].path, models[other].head) != (model.path, model.head):
            continue
        alike = models[other].frozen and held == model.train and other not in apart
        if alike and names.index(other) < names.index(name):
            return other
        same = all(held[key] == model.train[key] for key in ("engine", "pool", "dtype"))
        if (
            same
            and held["lora"]
            and not models[other].frozen
            and model.head == "lm"
            and not model.train["lora"]
        ):
            return other
    return ""


def _held(engine: Train | Serve, pool: str) -> dict[str, Any]:
    return {**engine.model_dump(warnings=False), "pool": pool}


def _optimizer(spec: Optimizer | None, model: str, graph: Graph) -> dict[str, Any] | None:
    """An optimizer's settings; a schedule without an end ends with the run."""
    if spec is None:
        return None
    found: dict[str, Any] = dict(spec.model_dump(warnings=False))
    if spec.schedule != "constant" and not spec.total_steps:
        updates = [node for node in graph.nodes if node.updates and node.model == model]
        runs = graph.schedule.iterations
        found["total_steps"] = sum(node.optimizer_steps * count(node.when, runs) for node in updates)
    return found
