"""The sections of a graph beside its nodes: their keys, types and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from rlgraph.engines.registry import SERVING, TRAINING
from rlgraph.text_value import Referring

GRAPH_NAME = r"^\w[\w.-]*$"  # files are named after it
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16"]
Default = TypeVar("Default")
if TYPE_CHECKING:
    ServingName = str
    TrainingName = str
else:
    ServingName, TrainingName = Literal["auto", *SERVING], Literal[tuple(TRAINING)]


def option(default: Default, about: str) -> Default:
    """Return a field with a default, and what the reference says of it."""
    return Field(default=default, description=about)


class Section(Referring):
    """A strict record: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or Muon, and the learning-rate schedule."""

    kind: Literal["adamw", "muon"] = option(
        "adamw",
        "adamw; or muon, which orthogonalises the averaged gradient of each matrix in the decoder layers "
        "(arXiv 2502.16982), scaled so that AdamW's lr and weight_decay fit; AdamW steps the other weights.",
    )
    lr: Positive = Field(description="the learning rate at its highest.")
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = option(
        [0.9, 0.999], "decay an optimizer step of the averages of the gradient and of its square."
    )
    eps: Positive = option(1e-8, "what is added to the root of the averaged square.")
    momentum: Share = option(0.95, "of muon: decay an optimizer step of the average of a matrix's gradient.")
    weight_decay: Annotated[float, Field(ge=0)] = option(
        0.0, "how much a weight shrinks an optimizer step, times the learning rate."
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = option(
        1.0, "gradients with a larger norm are scaled down to it; 0 is off."
    )
    schedule: Literal["constant", "cosine", "linear"] = option(
        "constant", "how the learning rate goes on after the warm-up."
    )
    warmup_steps: Natural = option(0, "optimizer steps in which the learning rate rises from 0.")
    total_steps: Natural = option(
        0, "optimizer steps until a cosine or linear schedule ends; 0: those of the run."
    )


class Serve(Section):
    """The engine that generates with the model."""

    engine: ServingName = option(
        "auto",
        f"which engine it is: {'; '.join(f'{n}, {e.about}' for n, e in SERVING.items())}. auto: "
        "sglang on CUDA and where `tensor_parallel`, `addresses` or `options` ask for it, else transformers, "
        "as on the GPUs of a machine without SGLang.",
    )
    pool: str | None = option(None, "where it is; null: the planner chooses.")
    dtype: Dtype = option("auto", "of weights and computation; auto: bfloat16 on CUDA, float32 on CPUs.")
    max_rows: Count = option(1024, "samples that one engine generates at a time.")
    cache_tokens: Count | Literal["auto"] = option(
        "auto",
        "tokens whose keys and values one engine holds; auto: as many as the plan leaves room "
        "for while it generates, and where memory is not planned 524,288, of sglang 65,536.",
    )
    sync_folder: str | None = option(
        None,
        "a folder that both sides see, through which weights reach an engine on another pool, or "
        "servers at addresses; null: they are broadcast.",
    )
    tensor_parallel: Count = option(1, "devices that one engine spans, of `hosts` hosts; transformers: 1.")
    hosts: Count = option(1, "of sglang: hosts that one engine spans, whole ones.")
    expert_parallel: Count = option(1, "of sglang: devices of an engine that experts are dealt out to.")
    attention_replicas: Count = option(1, "of sglang: copies of attention in an engine, with rows each.")
    quantization: Literal["fp8"] | None = option(
        None, "of sglang on Hopper GPUs: fp8 serves linear layers in 8 bits, by blocks; null: in dtype."
    )
    lora: Literal["merged", "adapter"] | None = option(
        None,
        "how it gets what train.lora trains: merged into the weights, all of which a sync sends, or as an "
        "adapter beside weights that it reads from the model's files. null: an adapter where it is on "
        "another pool and its engine can, else merged.",
    )
    restarts: Natural = option(
        3,
        "of sglang: how often in a run a server that is lost is started anew and asked again. "
        "Above 0, a copy of its weights stays in its host's memory, but for a GPU that trains them too: "
        "there the next sync brings them.",
    )
    start_timeout: Positive = option(600.0, "of sglang: seconds in which a server has to be up.")
    addresses: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]] = option(
        [],
        "servers that run already, as http://host:30000, in place of any that the run would "
        "start. Their API key is taken from a variable where the workers start, such as SGLANG_API_KEY.",
    )
    options: dict[str, str | bool | int | float] = option(
        {},
        "settings of the engine's own, of sglang by the names of its ServerArgs, such as "
        "{attention_backend: fa3}; those that the run decides are refused.",
    )


class Lora(Section):
    """Low-rank adapters, which train in place of the model's weights (LoRA, arXiv 2106.09685)."""

    rank: Count = option(16, "of the two matrices whose product is added to a weight.")
    alpha: Positive = option(32.0, "the product is scaled by alpha / rank.")
    targets: Literal["all-linear"] | list[str] = option(
        "all-linear",
        "the last names of the decoder's linear layers that get one, such as q_proj, or "
        "all-linear; in a mixture of experts attention's alone.",
    )


class Train(Section):
    """The engine that trains the model."""

    engine: TrainingName = option(next(iter(TRAINING)), "which engine it is.")
    pool: str | None = option(None, "where it is; null: the planner chooses.")
    shard: Count | None = option(
        None,
        "devices over which one copy of the model is sharded; the pool holds as many copies (replicas) as it "
        "has such groups of consecutive devices. null: all devices of the pool, in one copy.",
    )
    micro_tokens: Count = option(
        16384, "padded tokens of one micro-batch, on one device or on those that share it."
    )
    dtype: Dtype = option(
        "auto", "of the computation, beside float32 masters; auto: bfloat16 on CUDA, float32 on CPUs."
    )
    head_dtype: Literal["float32"] | None = option(
        None,
        "of the language-model head: float32 computes logits in it, from a float32 copy of the weights that "
        "dtype has (arXiv 2506.13585); null: dtype.",
    )
    recompute: bool | Literal["auto"] = option(
        "auto",
        "compute activations again in the backward pass: less memory, a third more work. auto: "
        "where memory is planned and would not suffice otherwise.",
    )
    lora: Lora | None = option(None, "train adapters in place of the weights; null: the weights themselves.")
    compile: bool = option(False, "compile the decoder layers by torch.compile, for any batch and length.")
    packing: bool = option(
        True, "lay rows end to end and read a prompt that they share once, where that is less work."
    )
    sequence_parallel: Count = option(
        1,
        "consecutive devices that share the tokens of each row, for rows whose activations no device "
        "holds; it divides the devices of the pool.",
    )
    tensor_parallel: Count = option(
        1,
        "consecutive devices that each have a part of every decoder layer, for layers that are too large or "
        "too slow to gather; it divides the devices of the pool, the model's heads and its MLP's width.",
    )
    expert_parallel: Count = option(
        1,
        "consecutive devices that each have some experts of a mixture, to which tokens travel, rather than "
        "gather all of them; it divides the devices of a copy and the model's experts.",
    )
    optimizer_offload: bool = option(
        False,
        "keep float32 weights and the optimizer's averages in host memory and step there, so that a device "
        "holds weights as it computes with them, and gradients; not with lora.",
    )
    activation_offload: bool = option(
        False,
        "keep in host memory what recompute keeps of each layer, its input, from the forward to the backward "
        "pass; with it recompute: auto is true.",
    )


class ModelSection(Section):
    """A set of weights by name."""

    path: str = Field(description="a folder with the model, or its name on the Hugging Face hub.")
    head: Literal["lm", "value"] = option(
        "lm", "what it puts out: lm, a distribution of the next token; value, one number per token."
    )
    frozen: bool = option(False, "whether it is only read; any other model needs an optimizer.")
    optimizer: Optimizer | None = option(None, "how its updates step; null where it is frozen.")
    config: dict[str, Any] = option(
        {},
        "fields of its config.json that are others in this run, such as rope_parameters or "
        "max_position_embeddings; none that changes the shapes of weights.",
    )
    trust_remote_code: bool = option(
        False, "run the Python files that come with the model, with all that you may do; else it is refused."
    )
    serve: Serve = option(Serve(), "the engine that generates with it.")
    train: Train = option(Train(), "the engine that trains it, and scores with it.")


class Refill(Section):
    """Refill of a filter: the steps before it are repeated with the next prompts until enough rows stay.

    ``refill: true`` is all of the defaults (dynamic sampling, DAPO, arXiv 2503.14476).
    """

    rows: Count | None = option(
        None, "rows that an iteration has behind it, exactly; null: what one batch makes."
    )
    rounds: Count = option(10, "how often what is before it runs in an iteration; then the run ends.")
    expected: Annotated[float, Field(gt=0, le=1)] = option(
        1.0,
        "the share of rows that stays: the first round asks by it, and predictions assume it; "
        "later rounds go by what was measured in the iteration.",
    )
    over_sample: Annotated[float, Field(ge=1)] = option(
        1.0, "how much more than needed, by what was measured, later rounds ask for."
    )
    keep: Natural = option(
        0,
        "iterations that a row may wait which stays and is not needed; it comes before new ones, "
        "and is off-policy by as many versions. 0: it is dropped.",
    )
    policy: str | None = option(
        None,
        "a function in a file, as my_buffer.py:name: which of the groups that wait come now, in "
        "which order; the others wait on. null: all, the oldest first.",
    )


class Pool(Section):
    """A named set of devices."""

    devices: Count | Literal["auto"] = option("auto", "how many; auto: those that there are.")


class Schedule(Section):
    """Length of a run, and what is kept on the way."""

    iterations: Natural = Field(description="passes through the graph.")
    staleness: Natural = option(
        0,
        "how many iterations generation may run ahead of training, on a pool of its own: as many "
        "iterations old are its weights. 0: both take turns.",
    )
    save_every: Natural = option(0, "iterations between checkpoints; 0: only at the end.")
    keep: Count = option(2, "checkpoints that stay on disk.")
    record_every: Natural = option(
        0,
        "iterations from one whose columns are kept on disk to the next, from the first on, for "
        "data.recorded and `rlgraph replay`; 0: none.",
    )
    restarts: Natural = option(
        0,
        "how often a run whose worker or host is lost starts its workers anew and resumes. Above "
        "0, a checkpoint is written with every iteration (with `staleness`, only as `save_every` says) and "
        "replaced by the next; those of `save_every` stay.",
    )
    on_nan: Literal["skip", "stop", "dump"] | None = option(
        None,
        "what happens where a number is not finite. null: a column that an op writes ends the run, "
        "naming the op; an update whose gradient is not finite leaves out that optimizer step and counts it "
        "in the metric `skipped`. skip: a column goes on as well. stop: an update ends the run too, and so "
        "does one whose loss is not finite. dump: as stop, and the rows of the micro-batch are written to "
        "the run's `dumps/`.",
    )
    timeout: Positive = option(3600.0, "seconds that one step may take.")


class Eval(Section):
    """An evaluation: the graph with other attributes, pruned to the columns that are reported.

    Updates never run in it. It runs before the first iteration, every ``every``, and after the last.
    """

    nodes: dict[str, dict[str, Any]] = option(
        {},
        "other attributes for the graph's nodes, and new nodes (those with an ``op``), which "
        "take the place of any that write the same columns.",
    )
    report: Annotated[dict[str, str], Field(min_length=1)] = Field(
        description="metric: the column whose mean it is."
    )
    every: Natural = option(
        0, "iterations from one to the next; 0: only before the first iteration and after the last."
    )


class GraphFile(Section):
    """A graph of rlgraph: models, nodes and a schedule; or ``extends`` and ``edits``."""

    graph: str = Field(default="", pattern=GRAPH_NAME, description="the graph's name: one word.")
    about: str = option("", "what it is, in a sentence.")
    extends: str = option("", "the parent: a shipped graph by name, or a file beside this one.")
    edits: list[dict[str, Any]] = option([], "what is changed in the parent, applied in order.")
    seed: Natural = option(0, "what every random number depends on.")
    models: dict[str, ModelSection] = option({}, "sets of weights, by name.")
    nodes: dict[str, dict[str, Any]] = option({}, "stages, by name: each runs an op.")
    eval: Eval | None = option(None, "what is measured on the way.")
    pools: dict[str, Pool] = option({}, "sets of devices, by name.")
    schedule: Schedule = Field(description="how long to run, and what is kept on the way.")
