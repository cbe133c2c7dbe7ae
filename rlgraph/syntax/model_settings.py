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
    """the peak learning rate: roughly how far a step moves each weight; at most 1."""
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.999])
    """decay per optimizer step of the running averages of the gradient and of its square."""
    eps: Positive = option(1e-8, "added to the root of the averaged square.")
    momentum: Share = option(
        0.95, "muon only: decay per optimizer step of the running average of a matrix's gradient."
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """how much a weight shrinks per optimizer step, times the learning rate."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """gradients with a larger norm are scaled down to it; 0 is off."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """how the learning rate changes after the warm-up."""
    warmup_steps: Natural | Annotated[float, Field(gt=0, lt=1)] = 0
    """optimizer steps over which the learning rate rises from 0; a value below 1 is a share of
    total_steps."""
    min_lr_ratio: Share = option(0.0, "cosine and linear only: the share of lr at which the decay ends.")
    cycles: Positive = option(0.5, "cosine only: the number of waves; 0.5 falls once.")
    total_steps: Natural = 0
    """optimizer steps until a cosine or linear schedule ends; 0: all steps of the run."""


class SharedServe(Section):
    """The settings of a serve engine that a plan has for any engine."""

    engine: ServingName = option(
        "auto",
        f"which engine generates: {'; '.join(f'{n}, {e.about}' for n, e in SERVING.items())}. auto: "
        "sglang on CUDA, or if `tensor_parallel` or the section `sglang` asks for it; else transformers. A "
        "machine with GPUs but without SGLang gets transformers, and so does a model that trains an adapter "
        "if the plan fits in no other way.",
    )
    pool: str | None = option(None, "the pool that it runs on; null: the planner chooses.")
    dtype: Dtype = option("auto", "type of weights and computation; auto: bfloat16 on CUDA, float32 on CPUs.")
    max_rows: Count = option(1024, "samples that one engine generates at a time.")
    cache_tokens: Count | Literal["auto"] = "auto"
    """tokens whose keys and values one engine holds; auto: as many as the plan leaves room for during
    generation; if memory is not planned, 524,288, or 65,536 for sglang."""
    sync_folder: str | None = None
    """a folder that both sides can read, through which weights reach an engine on another pool or servers at
    addresses; null: weights are broadcast."""
    sync: Literal["auto", "full", "delta"] = "auto"
    """what a weight sync to another pool sends: full, all weights; delta, only weights that changed since the
    last sync, a copy of which both ends keep in host memory. delta pays off if the link is slow and bfloat16
    weights change little. auto: whichever the plan predicts to be faster; full without a cluster."""
    tensor_parallel: DeviceCount = ONE_DEVICE
    """devices that one engine spans, on `sglang.hosts` hosts; always 1 with transformers. auto, or not given:
    1, or, if the plan does not fit, the fastest value that makes it fit."""
    lora: Literal["merged", "adapter"] | None = None
    """how the engine gets what train.lora trains: merged into the weights, all of which a sync then sends, or
    as an adapter beside frozen weights. The frozen weights are read from the model's files; if the embedded
    engine generates on the devices of the train engine and each of them holds all weights, the two share
    them. null: adapter in that case, and if sglang is on another pool; else merged."""


class ServeSettings(OpenAISettings, SglangSettings, SharedServe):
    """The settings of the engine that was chosen, those of its own section beside the others.

    The sections of all engines are among its bases, so that a plan has one record for all.
    """

    def setting_name(self, model: str, setting: str) -> str:
        """Return what a graph calls a setting, as ``models.policy.serve.sglang.hosts``."""
        return f"models.{model}.serve.{setting_path(self.engine, setting)}"


class Serve(SharedServe):
    """The engine that generates with the model. Settings of a single engine are in the section of its
    name."""

    sglang: SglangSettings = option(defaults(SglangSettings), "settings that only sglang has.")
    openai: OpenAISettings = option(defaults(OpenAISettings), "settings that only openai has.")

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

    rank: Count = option(16, "rank of the two matrices whose product is added to a weight.")
    alpha: Positive = option(32.0, "the product is scaled by alpha / rank.")
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """the decoder's linear layers that get an adapter, by the last part of their names, such as q_proj;
    all-linear: all of them, or only those of attention in a mixture of experts. The names
    experts.gate_up_proj and experts.down_proj give each expert an adapter."""
    quantize: Literal["nf4"] | None = None
    """hold the frozen weights of the decoder's linear layers in 4 bits (NF4, QLoRA, arXiv 2305.14314); on one
    device only, and it needs bitsandbytes. null: hold them in train.dtype."""


class Train(Section):
    """The engine that trains the model."""

    engine: TrainingName = option(next(iter(TRAINING)), "which engine trains.")
    pool: str | None = option(None, "the pool that it runs on; null: the planner chooses.")
    shard: Count | None = None
    """devices over which one copy of the model is sharded; each such group of consecutive devices in the pool
    holds one copy (replica). null: one copy over all devices of the pool."""
    micro_tokens: TokenCount = MICRO_TOKENS
    """padded tokens per micro-batch, on one device or on the devices that share it. auto, or not given:
    16384, or, if the plan does not fit, the fastest value that makes it fit."""
    score_tokens: Count | None = None
    """the same for a pass that computes log-probs or values and so keeps no activations; null:
    micro_tokens."""
    reshard: bool | None = None
    """free each decoder layer's gathered weights after use, and gather them again in the backward pass;
    false: gather all layers once per mini-batch and hold them in memory. null: decided by the model's
    size."""
    dtype: Dtype = "auto"
    """type of the computation; master weights are float32. auto: bfloat16 on CUDA, float32 on CPUs."""
    head_dtype: Literal["float32"] | None = None
    """type of the language-model head: float32 computes logits in float32, from a float32 copy of weights in
    dtype (arXiv 2506.13585); null: dtype."""
    recompute: bool | Literal["auto"] = "auto"
    """compute activations again in the backward pass: less memory, a third more work. auto: only if memory is
    planned and would not suffice otherwise."""
    lora: Lora | None = option(None, "train adapters in place of the weights; null: the weights themselves.")
    compile: bool = option(
        False, "compile the decoder layers with torch.compile, for any batch size and length."
    )
    packing: bool = True
    """lay rows end to end, and process a prompt that several rows share only once, if that is less work."""
    sequence_parallel: DeviceCount = ONE_DEVICE
    """consecutive devices that share the tokens of each row, for rows whose activations don't fit on one
    device; it must divide the devices of the pool. auto: as for micro_tokens."""
    tensor_parallel: DeviceCount = ONE_DEVICE
    """consecutive devices that each hold a part of every decoder layer, for layers that are too large or too
    slow to gather; it must divide the devices of the pool, the model's heads and the width of its MLP. auto:
    as for micro_tokens."""
    expert_parallel: DeviceCount = ONE_DEVICE
    """consecutive devices that each hold some experts of a mixture; tokens are sent to the experts, so that
    no device gathers all of them. It must divide the devices of a replica and the model's experts. auto: as
    for micro_tokens."""
    optimizer_offload: OnHost = ON_DEVICE
    """keep float32 weights and the optimizer's averages in host memory and run the optimizer there, so that a
    device holds only gradients and weights in the dtype of the computation; not with lora. auto: as for
    micro_tokens."""
    activation_offload: OnHost = ON_DEVICE
    """between the forward and the backward pass, keep in host memory the one activation that recompute keeps
    per layer, its input; `recompute: auto` is then true. auto: as for micro_tokens."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """mixtures of experts only: weight of the auxiliary loss that balances the load of experts (Switch
    Transformer, arXiv 2101.03961) and is added to the loss of updates; 0: none."""
    router_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """only mixtures whose routers choose by a bias (GLM 4.5, DeepSeek V3): by how much an optimizer step
    moves the bias, up for experts with less load than the mean, else down (arXiv 2408.15664); 0: not at
    all."""

    def pass_tokens(self, updates: bool) -> int:
        """Return the most padded tokens of a micro-batch, of an update or of a pass that scores."""
        if updates or self.score_tokens is None:
            return self.micro_tokens
        return self.score_tokens


class ModelSection(Section):
    """A named set of weights."""

    path: str = Field(min_length=1)
    """a folder with the model, its name on the Hugging Face hub, or the URL of a folder that fsspec can read,
    such as s3://bucket/model, which each host copies to its cache once."""
    head: Literal["lm", "value"] = "lm"
    """what the model outputs: lm, a distribution over the next token; value, one number per token."""
    frozen: bool = option(False, "true: the model never trains; a model that trains needs an optimizer.")
    optimizer: Optimizer | None = option(None, "the optimizer of its updates; null for a frozen model.")
    config: dict[str, Any] = Field(default={})
    """fields of its config.json to override in this run, such as rope_parameters or max_position_embeddings,
    except fields that change the shapes of weights."""
    trust_remote_code: bool = False
    """run the Python files that come with the model, with all of your permissions; false: such a model is
    refused."""
    vocabulary: str | None = None
    """a name for its vocabulary: models with the same name read each other's tokens; null: models are
    compared by their tokenizer.json, or else by their names on the hub."""
    serve: Serve = option(defaults(Serve), "the engine that generates with it.")
    train: Train = option(
        defaults(Train), "the engine that trains the model and computes its log-probs or values."
    )


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
