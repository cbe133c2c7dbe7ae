"""The section of a model: its weights, its optimizer, and the engines that serve and train it."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, Field

from rlgraph.engines.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from rlgraph.engines.registry import SERVING, TRAINING, setting_path
from rlgraph.engines.serve_settings import OpenAISettings, SglangSettings
from rlgraph.section import Count, Natural, Positive, Section, Share, defaults, option

Dtype = Literal["auto", "float32", "bfloat16"]
# what settings that a plan may choose are where it has no reason to choose
ONE_DEVICE, MICRO_TOKENS, ON_DEVICE = 1, 16384, False


def _or(unchosen: int) -> AfterValidator:
    """Return the validator that takes ``auto`` for the value that a plan begins with."""
    return AfterValidator(lambda value: unchosen if value == "auto" else value)


if TYPE_CHECKING:
    ServingName = str
    TrainingName = str
    OptimizerName = str
    DeviceCount = int
    TokenCount = int
    OnHost = bool
else:
    ServingName, TrainingName = Literal["auto", *SERVING], Literal[tuple(TRAINING)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    DeviceCount = Annotated[Count | Literal["auto"], _or(ONE_DEVICE)]
    TokenCount = Annotated[Count | Literal["auto"], _or(MICRO_TOKENS)]
    OnHost = Annotated[bool | Literal["auto"], _or(ON_DEVICE)]


class Optimizer(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or Muon, and the learning-rate schedule."""

    kind: OptimizerName = DEFAULT_OPTIMIZER
    """adamw; or muon, which orthogonalises the averaged gradient of each matrix in the decoder layers (arXiv
    2502.16982), scaled so that AdamW's lr and weight_decay fit; AdamW steps the other weights."""
    lr: Annotated[float, Field(gt=0, le=1)]
    """the learning rate at its highest: about how far a step moves each weight, 1 at most."""
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.999])
    """decay an optimizer step of the averages of the gradient and of its square."""
    eps: Positive = option(1e-8, "what is added to the root of the averaged square.")
    momentum: Share = option(0.95, "of muon: decay an optimizer step of the average of a matrix's gradient.")
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """how much a weight shrinks an optimizer step, times the learning rate."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """gradients with a larger norm are scaled down to it; 0 is off."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """how the learning rate goes on after the warm-up."""
    warmup_steps: Natural | Annotated[float, Field(gt=0, lt=1)] = 0
    """optimizer steps in which the learning rate rises from 0; below 1, a share of total_steps."""
    min_lr_ratio: Share = option(0.0, "of cosine and linear: the share of lr that it falls to.")
    cycles: Positive = option(0.5, "of cosine: the waves that it makes; 0.5 falls once.")
    total_steps: Natural = 0
    """optimizer steps until a cosine or linear schedule ends; 0: those of the run."""


class SharedServe(Section):
    """The settings of a serve engine that a plan has for any engine."""

    engine: ServingName = option(
        "auto",
        f"which engine it is: {'; '.join(f'{n}, {e.about}' for n, e in SERVING.items())}. auto: "
        "sglang on CUDA and where `tensor_parallel` or its section ask for it, else transformers, as on the "
        "GPUs of a machine without SGLang, and for a model that trains an adapter if the plan fits only so.",
    )
    pool: str | None = option(None, "where it is; null: the planner chooses.")
    dtype: Dtype = option("auto", "of weights and computation; auto: bfloat16 on CUDA, float32 on CPUs.")
    max_rows: Count = option(1024, "samples that one engine generates at a time.")
    cache_tokens: Count | Literal["auto"] = "auto"
    """tokens whose keys and values one engine holds; auto: as many as the plan leaves room for while it
    generates, and where memory is not planned 524,288, of sglang 65,536."""
    sync_folder: str | None = None
    """a folder that both sides see, through which weights reach an engine on another pool, or servers at
    addresses; null: they are broadcast."""
    sync: Literal["auto", "full", "delta"] = "auto"
    """what a sync to another pool sends: all, or (delta) what has changed since the last, which both ends
    keep in host memory; that pays where the link is slow, and bfloat16 weights learn slowly. auto: what the
    plan predicts to take less time, and without a cluster all."""
    tensor_parallel: DeviceCount = ONE_DEVICE
    """devices that one engine spans, of `sglang.hosts` hosts; transformers: 1. auto, or not given: 1, and
    where the plan does not fit, what makes it fit and is fastest."""
    lora: Literal["merged", "adapter"] | None = None
    """how it gets what train.lora trains: merged into the weights, all of which a sync sends, or as an
    adapter beside frozen weights. These are read from the model's files, or are those of the train engine if
    the embedded engine generates on its devices and each of them holds all weights. null: an adapter in that
    case, and if sglang is on another pool; else merged."""


class ServeSettings(OpenAISettings, SglangSettings, SharedServe):
    """The settings of the engine that was chosen, those of its own section beside the others.

    The sections of all engines are among its bases, so that a plan has one record for all.
    """

    def setting_name(self, model: str, setting: str) -> str:
        """Return what a graph calls a setting, as ``models.policy.serve.sglang.hosts``."""
        return f"models.{model}.serve.{setting_path(self.engine, setting)}"


class Serve(SharedServe):
    """The engine that generates with the model; what only one engine has stands in a section of its name."""

    sglang: SglangSettings = option(defaults(SglangSettings), "settings of sglang alone.")
    openai: OpenAISettings = option(defaults(OpenAISettings), "settings of openai alone.")

    def of_engine(self) -> ServeSettings:
        """Return the settings of the engine that it names; not validated again, some may still be open."""
        shared = {name: getattr(self, name) for name in SharedServe.model_fields}
        settings = {}
        if SERVING[self.engine].settings:
            settings = dict(getattr(self, self.engine))
        return ServeSettings.model_construct(**shared, **settings)


EXPERTS = "experts."  # with this begin the weights of experts among the targets of adapters


class Lora(Section):
    """Low-rank adapters, which train in place of the model's weights (LoRA, arXiv 2106.09685)."""

    rank: Count = option(16, "of the two matrices whose product is added to a weight.")
    alpha: Positive = option(32.0, "the product is scaled by alpha / rank.")
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """the last names of the decoder's linear layers that get one, such as q_proj, or all-linear; in a
    mixture of experts attention's alone. Experts get one each by the names experts.gate_up_proj and
    experts.down_proj."""
    quantize: Literal["nf4"] | None = None
    """hold the weights of the decoder's linear layers, which do not train, in 4 bits (NF4, QLoRA, arXiv
    2305.14314), on one device; needs bitsandbytes. null: in train.dtype."""


class Train(Section):
    """The engine that trains the model."""

    engine: TrainingName = option(next(iter(TRAINING)), "which engine it is.")
    pool: str | None = option(None, "where it is; null: the planner chooses.")
    shard: Count | None = None
    """devices over which one copy of the model is sharded; the pool holds as many copies (replicas) as it
    has such groups of consecutive devices. null: all devices of the pool, in one copy."""
    micro_tokens: TokenCount = MICRO_TOKENS
    """padded tokens of one micro-batch, on one device or on those that share it. auto, or not given: 16384,
    and where the plan does not fit, what makes it fit and is fastest."""
    score_tokens: Count | None = None
    """the same of a pass that scores or values rows, and keeps no activations; null: micro_tokens."""
    reshard: bool | None = None
    """free each decoder layer's gathered weights after use, and gather them again in the backward pass;
    false: gather all once per mini-batch, which takes their memory. null: as the model's size says."""
    dtype: Dtype = "auto"
    """of the computation, beside float32 masters; auto: bfloat16 on CUDA, float32 on CPUs."""
    head_dtype: Literal["float32"] | None = None
    """of the language-model head: float32 computes logits in it, from a float32 copy of the weights that
    dtype has (arXiv 2506.13585); null: dtype."""
    recompute: bool | Literal["auto"] = "auto"
    """compute activations again in the backward pass: less memory, a third more work. auto: where memory is
    planned and would not suffice otherwise."""
    lora: Lora | None = option(None, "train adapters in place of the weights; null: the weights themselves.")
    compile: bool = option(False, "compile the decoder layers by torch.compile, for any batch and length.")
    packing: bool = True
    """lay rows end to end and read a prompt that they share once, where that is less work."""
    sequence_parallel: DeviceCount = ONE_DEVICE
    """consecutive devices that share the tokens of each row, for rows whose activations no device holds; it
    divides the devices of the pool. auto: as micro_tokens."""
    tensor_parallel: DeviceCount = ONE_DEVICE
    """consecutive devices that each have a part of every decoder layer, for layers that are too large or too
    slow to gather; it divides the devices of the pool, the model's heads and its MLP's width. auto: as
    micro_tokens."""
    expert_parallel: DeviceCount = ONE_DEVICE
    """consecutive devices that each have some experts of a mixture, to which tokens travel, rather than
    gather all of them; it divides the devices of a copy and the model's experts. auto: as
    micro_tokens."""
    optimizer_offload: OnHost = ON_DEVICE
    """keep float32 weights and the optimizer's averages in host memory and step there, so that a device
    holds weights as it computes with them, and gradients; not with lora. auto: as micro_tokens."""
    activation_offload: OnHost = ON_DEVICE
    """keep in host memory what recompute keeps of each layer, its input, from the forward to the backward
    pass; with it recompute: auto is true. auto: as micro_tokens."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """of a mixture of experts: weight of the auxiliary loss that balances the load of experts (Switch
    Transformer, arXiv 2101.03961), which is added to the loss of updates; 0: none."""
    router_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """of a mixture whose routers choose by a bias (GLM 4.5, DeepSeek V3): by how much an optimizer step
    moves it, up for experts with less load than the mean, else down (arXiv 2408.15664); 0: not at all."""

    def pass_tokens(self, updates: bool) -> int:
        """Return the most padded tokens of a micro-batch, of an update or of a pass that scores."""
        if updates or self.score_tokens is None:
            return self.micro_tokens
        return self.score_tokens


class ModelSection(Section):
    """A set of weights by name."""

    path: str = Field(min_length=1)
    """a folder with the model, its name on the Hugging Face hub, or a URL of one that fsspec knows, as
    s3://bucket/model: each host copies it to its cache once."""
    head: Literal["lm", "value"] = "lm"
    """what it puts out: lm, a distribution of the next token; value, one number per token."""
    frozen: bool = option(False, "whether it is only read; any other model needs an optimizer.")
    optimizer: Optimizer | None = option(None, "how its updates step; null where it is frozen.")
    config: dict[str, Any] = Field(default={})
    """fields of its config.json that are others in this run, such as rope_parameters or
    max_position_embeddings; none that changes the shapes of weights."""
    trust_remote_code: bool = False
    """run the Python files that come with the model, with all that you may do; else it is refused."""
    vocabulary: str | None = None
    """a name for its vocabulary: models of which it is the same read each other's tokens; null: as their
    files tokenizer.json say, or else their names on the hub."""
    serve: Serve = option(defaults(Serve), "the engine that generates with it.")
    train: Train = option(defaults(Train), "the engine that trains it, and scores with it.")


def _may_be_auto(section: type[Section]) -> frozenset[str]:
    """Return the settings of a section that ``auto`` leaves to the planner, as if they were left out."""
    names = set()
    for name, field in section.model_fields.items():
        if _has_auto(field.annotation):
            names.add(name)
    return frozenset(names)


def _has_auto(annotation: Any) -> bool:
    """Return whether ``auto`` is among the words that an annotation lists; a text may be any word."""
    if get_origin(annotation) is Literal:
        return "auto" in get_args(annotation)
    return any(_has_auto(part) for part in get_args(annotation))


SERVE_AUTO = _may_be_auto(SharedServe)
TRAIN_AUTO = _may_be_auto(Train)
