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
    """Refill of a filter: the steps before it are repeated with the next prompts until enough rows are kept.

    ``refill: true`` takes all defaults (dynamic sampling, DAPO, arXiv 2503.14476).
    """

    rows: Count | None = None
    """the exact number of rows per iteration after the filter; null: as many as one batch makes."""
    rounds: Count = option(
        10, "how often the steps before it may run in an iteration; after that the run ends."
    )
    expected: Annotated[float, Field(gt=0, le=1)] = 1.0
    """the share of rows expected to be kept, which sizes the first round and which predictions assume; later
    rounds go by the share measured in the iteration."""
    over_sample: Annotated[float, Field(ge=1)] = 1.0
    """later rounds request this many times the rows that the measured share says are needed."""


class Pool(Section):
    """A named set of devices."""

    devices: Count | Literal["auto"] = option("auto", "how many; auto: all that are available.")
    hosts: Count | None = None
    """whole hosts that the pool takes, with equally many of its devices on each; null: wherever there is
    room."""


class Stop(Section):
    """The metric that ends a run before its last iteration; the run then evaluates, saves and exports as
    usual."""

    metric: str = Field(min_length=1)
    """its name in metrics.jsonl, such as eval/accuracy or reward/mean."""
    at_least: float | None = option(
        None, "the run ends once the metric is at least this; give this or `at_most`."
    )
    at_most: float | None = option(None, "the run ends once the metric is at most this.")
    times: Count = option(1, "how many measurements in a row must meet the limit.")


class Best(Section):
    """The evaluation metric that decides which checkpoints are best; these are kept whatever `schedule.keep`
    says.

    A checkpoint is saved for each evaluation that is among the best. The evaluation before the first
    iteration has no checkpoint and does not count.
    """

    metric: str = Field(min_length=1)
    """its name in metrics.jsonl, such as eval/accuracy."""
    mode: Literal["max", "min"]
    """max: the highest value is best, as for an accuracy; min: the lowest, as for a loss."""
    keep: Count = option(1, "how many of the best are kept; among equal ones, the first.")


class Buffer(Section):
    """Rows drawn before the iteration that trains on them: how old they may be, and which are used next.

    ``buffer: {}`` takes all defaults.
    """

    staleness: Natural = 1
    """by how many updates the weights that draw a token may be older than those that its update starts from.
    An iteration that updates a model twice counts once. 0: generation begins only the rows that the current
    iteration needs."""
    by: Literal["batch", "group", "surplus"] | None = None
    """what waits in the buffer. batch: generation, on its own pool, runs whole iterations ahead. group:
    generation, on its own pool, streams: groups move on as they finish, and new weights reach it between two
    tokens. surplus: rows that a filter with `refill` kept but its iteration did not need. null: group if
    generation has its own pool, else surplus if a filter refills."""
    order: str = "fifo"
    """which groups an iteration takes; for `by: group` and `by: surplus`. fifo: first those that would be too
    old in the next iteration, then the first to finish. in_order, only for `by: group`: in the order of their
    prompts; weights change only while no group is in flight, so that runs are repeatable. Or a function in a
    file, such as my_buffer.py:name."""
    too_old: Literal["wait", "drop", "correct"] = "wait"
    """for `by: group`: what happens to a group that would exceed `staleness`. wait: the iteration waits for
    it. drop: it is dropped. correct: it is used, and the loss corrects for any age."""
    in_flight: Count | None = None
    """for `by: group`: the most groups in flight at a time; null: as many as staleness allows."""
    chunk: Count = option(64, "for `by: group`: tokens per sample between two checks for finished samples.")
    lend: bool | Literal["auto"] = "auto"
    """for `by: group`: whether the training pool also generates while it waits for rows, one `chunk` at a
    time. auto: if a plan for a cluster finds that the engine fits on its devices and that iterations get
    shorter."""


class Schedule(Section):
    """The length of a run, and what it saves on the way."""

    iterations: Natural | None = option(None, "passes through the graph; give this or `epochs`.")
    epochs: Positive | dict[str, Positive] | None = None
    """passes through the rows of the data, in place of `iterations`; with several sources, the passes of one
    of them, as in {prompts: 3}. A run counts its iterations before it starts, and so does `check --files`."""
    buffer: Buffer | None = None
    """how much older than an update's weights its rows may be, and what waits in the meantime. null: every
    iteration draws all of the rows that it trains on."""
    stop: Stop | None = option(None, "the metric that may end the run early; null: none.")
    save_every: Natural | Interval = 0
    """iterations between checkpoints; or a time, as in 30 min, or epochs, as in 0.5 epochs or 1 epoch of
    NAME. 0: only at the end."""
    keep: Count = option(2, "how many of the latest checkpoints are kept on disk.")
    best: Best | None = option(
        None, "which checkpoints are best and therefore kept too; null: only the latest are kept."
    )
    record_every: Natural | Interval = 0
    """iterations, or an interval as for `save_every`, between iterations whose columns are saved to disk,
    beginning with the first; data.recorded and `rlgraph replay` read them. 0: none are saved."""
    restarts: Natural = 0
    """how often a run that loses a worker or a host restarts its workers and resumes. Above 0, every
    iteration writes a checkpoint, which the next one replaces; with a `buffer` by batch, only `save_every`
    writes checkpoints. Those of `save_every` are kept."""
    on_nan: Literal["skip", "stop", "dump"] | None = None
    """what happens if a number is not finite. null: in a column, it ends the run with an error that names the
    op; in the gradient of an update, that optimizer step is skipped and counted in the metric `skipped`.
    skip: a column doesn't end the run either. stop: the gradient or the loss of an update ends the run too.
    dump: as stop, and the rows of the micro-batch are written to the run's `dumps/`."""
    timeout: Positive = option(3600.0, "seconds that one step may take.")
    runtime_env: dict[RuntimeEnvKey, Any] = Field(default={})
    """Ray's runtime_env for the run's processes: {env_vars: {NAME: value}, working_dir: ..., pip: [...]}; a
    run with --inline ignores it."""

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
    """An evaluation: the graph with some attributes replaced, pruned to the columns that are reported.

    Updates never run in it. It runs before the first iteration (unless ``before`` is false), every ``every``,
    and after the last.
    """

    nodes: dict[str, dict[str, Any]] = Field(default={})
    """replaced attributes of the graph's nodes, and new nodes (those with an ``op``), which replace nodes
    that write the same columns."""
    report: Annotated[dict[str, str], Field(min_length=1)]
    """metrics by name: the column whose mean each one reports."""
    every: Natural | Interval = 0
    """iterations between evaluations; or a time, as in 30 min, or epochs, as in 0.5 epochs or 1 epoch of
    NAME. 0: only before the first iteration and after the last."""
    before: bool = option(True, "whether to evaluate before the first iteration.")


class GraphFile(Section):
    """An rlgraph graph: models, nodes and a schedule; or ``extends`` and ``edits``."""

    graph: str = Field(default="", pattern=GRAPH_NAME, description="the graph's name, one word.")
    about: str = option("", "a sentence that describes it.")
    extends: str = option("", "the parent graph: the name of a shipped graph, or a file next to this one.")
    use: list[str] = Field(default=[])
    """fragments: files next to this one, whose `edits` are applied in order, before `edits`."""
    edits: list[dict[str, Any]] = option([], "changes to the parent graph, applied in order.")
    seed: Natural = option(0, "the seed of all random numbers.")
    models: dict[str, ModelSection] = option({}, "named sets of weights.")
    nodes: dict[str, dict[str, Any]] = option({}, "named stages, each of which runs an op.")
    eval: Eval | None = option(None, "the evaluation that measures progress.")
    pools: dict[str, Pool] = option({}, "named sets of devices.")
    schedule: Schedule = Field(description="how long to run, and what to save on the way.")
