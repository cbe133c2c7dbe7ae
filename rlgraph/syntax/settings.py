"""The sections of a graph beside its nodes: their keys, types and defaults."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlgraph.section import Count, Natural, Positive, Section, option
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.model_settings import ModelSection

RuntimeEnvKey = Literal[  # Ray 2.60's, but those for Java and those that it sets itself
    "conda",
    "config",
    "container",
    "env_vars",
    "excludes",
    "image_uri",
    "nsight",
    "pip",
    "py_executable",
    "py_modules",
    "rocprof_sys",
    "uv",
    "worker_process_setup_hook",
    "working_dir",
]
GRAPH_NAME = r"^\w[\w.-]*$"  # files are named after it


class Refill(Section):
    """Refill of a filter: the steps before it are repeated with the next prompts until enough rows stay.

    ``refill: true`` is all of the defaults (dynamic sampling, DAPO, arXiv 2503.14476).
    """

    rows: Count | None = None
    """rows that an iteration has behind it, exactly; null: what one batch makes."""
    rounds: Count = option(10, "how often what is before it runs in an iteration; then the run ends.")
    expected: Annotated[float, Field(gt=0, le=1)] = 1.0
    """the share of rows that stays: the first round asks by it, and predictions assume it; later rounds go
    by what was measured in the iteration."""
    over_sample: Annotated[float, Field(ge=1)] = 1.0
    """how much more than needed, by what was measured, later rounds ask for."""


class Pool(Section):
    """A named set of devices."""

    devices: Count | Literal["auto"] = option("auto", "how many; auto: those that there are.")
    hosts: Count | None = None
    """hosts that it takes whole, with as many of its devices each; null: wherever there is room."""


class Stop(Section):
    """The metric that ends a run before its last iteration; then it evaluates, saves and exports as ever."""

    metric: str = Field(min_length=1)
    """its name in metrics.jsonl, as eval/accuracy or reward/mean."""
    at_least: float | None = option(None, "the run ends once it is so high; or else `at_most`.")
    at_most: float | None = option(None, "the run ends once it is so low.")
    times: Count = option(1, "how often in a row it has to be measured so.")


class Best(Section):
    """The metric of evaluations that says which checkpoints are best; these stay, whatever `keep` says.

    Each evaluation that is among the best has its checkpoint saved. The one before the first iteration has
    none, and does not count.
    """

    metric: str = Field(min_length=1)
    """its name in metrics.jsonl, as eval/accuracy."""
    mode: Literal["max", "min"]
    """whether the highest value is best, as of an accuracy, or the lowest, as of a loss."""
    keep: Count = option(1, "how many of the best stay; of equal ones the first.")


class Buffer(Section):
    """Rows that are drawn before the iteration that trains on them: how old they may be, and which come next.

    ``buffer: {}`` is all of the defaults.
    """

    staleness: Natural = 1
    """by how many updates the weights that draw a token may be older than those that its update starts from.
    An iteration that updates a model twice counts once. 0: only what one iteration needs is begun."""
    by: Literal["batch", "group", "surplus"] | None = None
    """what waits in the buffer. batch: generation, on a pool of its own, runs whole iterations ahead. group:
    generation, on a pool of its own, streams: groups go on as they finish, and new weights reach it between
    two tokens. surplus: rows that a filter with `refill` kept and its iteration did not need. null: group
    where generation has a pool of its own, else surplus where a filter refills."""
    order: str = "fifo"
    """which groups an iteration takes, by group and by surplus. fifo: the first to finish, and before them
    those that would be too old in the next. in_order, by group alone: in the order of their prompts, and
    weights change only where nothing is begun, so that runs repeat. Or a function in a file, as
    my_buffer.py:name."""
    too_old: Literal["wait", "drop", "correct"] = "wait"
    """by group: what becomes of a group that would be older. wait: the iteration waits for it. drop: it is
    dropped. correct: it is used, and the loss corrects for any age."""
    in_flight: Count | None = None
    """by group: groups begun at a time, at most; null: as staleness allows."""
    chunk: Count = option(64, "by group: tokens of each sample between two looks at what has finished.")
    lend: bool | Literal["auto"] = "auto"
    """by group: whether the pool that trains generates too while it waits for rows, a `chunk` at a time.
    auto: where a plan for a cluster finds that its devices hold the engine and that an iteration is
    shorter."""


class Schedule(Section):
    """Length of a run, and what is kept on the way."""

    iterations: Natural | None = option(None, "passes through the graph; or else `epochs`.")
    epochs: Positive | dict[str, Positive] | None = None
    """passes through the rows of the data, in place of `iterations`; of several sources those of one, as
    {prompts: 3}. A run counts the iterations before it starts, as `check --files` does."""
    buffer: Buffer | None = None
    """how much older than an update's weights the rows may be that it trains on, and what waits till then.
    null: every iteration trains on rows of its own, which are drawn as a whole."""
    stop: Stop | None = option(None, "the metric that ends the run early; null: none does.")
    save_every: Natural | Interval = 0
    """iterations between checkpoints; or a duration of the run, as 30 min, or epochs, as 0.5 epochs, or
    1 epoch of NAME. 0: only at the end."""
    keep: Count = option(2, "how many of the last checkpoints stay on disk.")
    best: Best | None = option(None, "which checkpoints are best, and stay too; null: only the last do.")
    record_every: Natural | Interval = 0
    """iterations, or as `save_every` another interval, from one whose columns are kept on disk to the next,
    from the first on, for data.recorded and `rlgraph replay`; 0: none."""
    restarts: Natural = 0
    """how often a run whose worker or host is lost starts its workers anew and resumes. Above 0, a
    checkpoint is written with every iteration (with a `buffer` by batch, only as `save_every` says) and
    replaced by the next; those of `save_every` stay."""
    on_nan: Literal["skip", "stop", "dump"] | None = None
    """what happens where a number is not finite. null: a column that an op writes ends the run, naming the
    op; an update whose gradient is not finite leaves out that optimizer step and counts it in the metric
    `skipped`. skip: a column goes on as well. stop: an update ends the run too, and so does one whose loss
    is not finite. dump: as stop, and the rows of the micro-batch are written to the run's `dumps/`."""
    timeout: Positive = option(3600.0, "seconds that one step may take.")
    runtime_env: dict[RuntimeEnvKey, Any] = Field(default={})
    """what Ray gives the run's processes, as its runtime_env: {env_vars: {NAME: value}, working_dir: ...,
    pip: [...]}; nothing of it reaches a run --inline."""

    @property
    def ahead(self) -> int:
        """Return how many whole iterations generation runs ahead of training."""
        return self.buffer.staleness if self.buffer and self.buffer.by == "batch" else 0

    @property
    def stream(self) -> Buffer | None:
        """Return the buffer of generation that streams; None where it does not."""
        return self.buffer if self.buffer and self.buffer.by == "group" else None

    @property
    def surplus(self) -> Buffer | None:
        """Return the buffer of rows that filters kept and did not need; None where they drop them."""
        return self.buffer if self.buffer and self.buffer.by == "surplus" else None


class Eval(Section):
    """An evaluation: the graph with other attributes, pruned to the columns that are reported.

    Updates never run in it. It runs before the first iteration unless told, every ``every``, and after the
    last.
    """

    nodes: dict[str, dict[str, Any]] = Field(default={})
    """other attributes for the graph's nodes, and new nodes (those with an ``op``), which take the place of
    any that write the same columns."""
    report: Annotated[dict[str, str], Field(min_length=1)]
    """metric: the column whose mean it is."""
    every: Natural | Interval = 0
    """iterations from one to the next; or a duration of the run, as 30 min, or epochs, as 0.5 epochs, or
    1 epoch of NAME. 0: only before the first iteration and after the last."""
    before: bool = option(True, "whether one comes before the first iteration.")


class GraphFile(Section):
    """A graph of rlgraph: models, nodes and a schedule; or ``extends`` and ``edits``."""

    graph: str = Field(default="", pattern=GRAPH_NAME, description="the graph's name: one word.")
    about: str = option("", "what it is, in a sentence.")
    extends: str = option("", "the parent: a shipped graph by name, or a file beside this one.")
    use: list[str] = Field(default=[])
    """fragments: files beside this one, whose `edits` are applied in order, before `edits`."""
    edits: list[dict[str, Any]] = option([], "what is changed in the parent, applied in order.")
    seed: Natural = option(0, "what every random number depends on.")
    models: dict[str, ModelSection] = option({}, "sets of weights, by name.")
    nodes: dict[str, dict[str, Any]] = option({}, "stages, by name: each runs an op.")
    eval: Eval | None = option(None, "what is measured on the way.")
    pools: dict[str, Pool] = option({}, "sets of devices, by name.")
    schedule: Schedule = Field(description="how long to run, and what is kept on the way.")
