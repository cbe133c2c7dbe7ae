"""Loads a Hugging Face directory as a model sharded over the ranks of a mesh."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
import torch._dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rlgraph.costs.limits import SMALL
from rlgraph.runtime.engines import experts
from rlgraph.runtime.engines.attention import GRAPHS, attend_without_mask, repeat_shared_heads
from rlgraph.runtime.engines.fsdp import lora, scoring, tensor
from rlgraph.runtime.engines.fsdp.shards import Held, borrow
from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup, LayerParts, divide
from rlgraph.runtime.engines.memory.activations import ActivationOffload
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sequence import attention as sequence
from rlgraph.runtime.engines.sequence.groups import ALONE, RowGroup, SequenceGroup
from rlgraph.runtime.engines.weights import naming, pretrained
from rlgraph.runtime.engines.weights.naming import Pieces
from rlgraph.syntax.model_settings import Lora

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class Loading:
    """The settings by which a model is read and sharded; see ``FsdpEngine``."""

    files: ModelFiles
    head: Head
    seed: int  # gives the same new value head on every rank
    frozen: bool  # parameters take no gradients, and are held in ``compute``; else in float32
    compute: torch.dtype  # the gathered parameters' type
    mesh: DeviceMesh
    reshard: bool | None  # None: where the model has more than ``SMALL`` parameters
    recompute: bool
    adapter: Lora | None  # trains, with a value head, alone; the rest is held in ``compute``
    compiled: bool
    sequence: SequenceGroup = ALONE
    tensor: RowGroup = ALONE  # the ranks that each have a part of every layer
    offload: bool = False  # with ``recompute``: the inputs of layers wait on the host
    wide_head: bool = False  # a language-model head computes in float32
    experts: ExpertGroup = field(default_factory=ExpertGroup)  # the ranks that each have some experts
    held: Held = field(default_factory=dict)  # weights that another model holds on the same ranks

    @property
    def new(self) -> tuple[str, ...]:
        """Return the prefixes of the weights that the directory may lack."""
        return () if self.head == "lm" else pretrained.NEW_HEAD


def load_sharded(how: Loading) -> tuple[torch.nn.Module, list[FSDPModule], bool, Pieces, LayerParts]:
    """Load a model and shard it over a mesh; where its files allow, each rank reads its rows alone.

    Returns:
        The model, the modules that gather their parameters together, whether they reshard, which weights
        of the checkpoint each parameter holds, and of which of them this rank has a part.

    Raises:
        ValueError: models of this type can't be trained, or their tokens not shared, or their layers or
            experts not divided; or the directory lacks weights other than a value head's, or has them in
            another shape; or the adapter names layers that there are not.
    """
    device = torch.device(how.mesh.device_type)
    model, pieces, files = _build(how)
    parts = divide(model, how.tensor)
    if how.experts.group:
        divided = dict.fromkeys(experts.divide(model, how.experts.group), 0)
        parts = LayerParts(how.experts, divided, mesh=how.experts.mesh)
    repeat_shared_heads(model, device, how.compute)
    attend_without_mask(model, device, how.compute)
    sequence.share_attention(model, how.sequence)
    model.register_forward_hook(_own_logits)
    # Dropout would make log-probs depend on the micro-batch; eval mode turns all of it off.
    model.eval()
    _choose_trained(model, how)
    if how.compiled:
        compile_layers(model)
    if how.recompute and not how.frozen:
        recompute_layers(model, ActivationOffload(device) if how.offload else None)
    large = sum(p.numel() for p in model.parameters()) > SMALL
    reshard = large if how.reshard is None else how.reshard
    # alone, there is nothing to gather or to sum: FSDP2 would hold every parameter a second time
    apart = how.mesh.size(how.mesh.ndim - 1) == 1 and (how.frozen or how.mesh.size() == 1)
    alone = apart and all(p.dtype == how.compute for p in model.parameters())
    place = _of_experts(model, parts, how.experts) if how.experts.group else None
    shards = [] if alone else shard_model(model, how.mesh, reshard=reshard, compute=how.compute, place=place)
    if how.head == "lm":
        scoring.prepare(model, how.wide_head)
    if how.held:
        borrow(model, pieces, how.held)
    if files is not None:
        pretrained.fill(model, pieces, files, device, parts.cut)
    if alone:
        model.to(device)
    return model, shards, reshard, pieces, parts


def _build(how: Loading) -> tuple[Any, Pieces, Any]:
    """Return a model, the pieces of its parameters, and the files whose weights it still lacks, if any."""
    dtype = how.compute if how.frozen or how.adapter else torch.float32
    with quiet(), torch.random.fork_rng(devices=[]):
        files = pretrained.weights_of(how.files.path)
        model = pretrained.shape_of(how.files, *pretrained.classes(how.head), dtype)
        if how.head == "lm":
            scoring.check(model)
        sequence.check(model, how.sequence.ranks)
        tensor.check(model, how.tensor.ranks)
        experts.check(model, how.experts.ranks)
        pieces = naming.pieces_of(model, files)
        pretrained.check_experts(how.files.path, pieces, files)
        direct = pretrained.reads_by_rows(model, pieces, files, how.new)
        if direct:
            pretrained.check(how.files.path, model, pieces, files, how.new)
            pretrained.compute_the_rest(model, pieces, files, how.seed)
        else:
            model = load_model(how, dtype, model.config._attn_implementation)
        if how.adapter:
            lora.add_adapters(model, decoder_layers(model), how.adapter, how.seed)
    return model, pieces, files if direct else None


def _choose_trained(model: Any, how: Loading) -> None:
    for name, parameter in model.named_parameters():
        trains = how.adapter is None or lora.is_adapter(name) or name.startswith(how.new)
        parameter.requires_grad_(trains and not how.frozen)
        if how.adapter and trains:
            parameter.data = parameter.data.float()


def load_model(how: Loading, dtype: torch.dtype, attention: str) -> Any:
    """Return the whole model in host memory, loaded and converted by transformers."""
    auto, options = pretrained.classes(how.head)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(how.seed)
        model, report = auto.from_pretrained(
            how.files.path,
            config=how.files.config(**options),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            trust_remote_code=how.files.trusted,
        )
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith(how.new)):
        law = f"{how.files.path} holds no weights for {pretrained.listed(missing)}"
        raise ValueError(f"{law} (head: {how.head})")
    pretrained.report_unexpected(how.files.path, model, report["unexpected_keys"], how.new)
    return model


def _own_logits(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
    """Copy logits that are a view, as of a linear layer with a bias: FSDP warns of views, and rightly."""
    if output.logits._base is not None:
        output.logits = output.logits.clone()
    return output


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and loading reports."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _of_experts(model: torch.nn.Module, parts: LayerParts, group: ExpertGroup) -> Callable[..., Any]:
    """Return what tells FSDP2 that experts are sharded over the ranks that have the same.

    Raises:
        ValueError: torch has no mesh per parameter: its versions before 2.12.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        law = f"torch {torch.__version__} shards all weights of a layer over the same ranks"
        raise ValueError(f"{law}; install torch 2.12 or newer, or set train.expert_parallel to 1")
    assert group.mesh
    several = group.mesh.ndim > 1
    mesh = common.HSDPMeshInfo(group.mesh, 1, 0) if several else common.FSDPMeshInfo(group.mesh, 0)
    result = common.ShardPlacementResult(None, mesh)
    own = {id(p) for name, p in model.named_parameters() if name in parts.dimensions}
    return lambda parameter: result if id(parameter) in own else None


def shard_model(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    compute: torch.dtype,
    place: Callable[..., Any] | None = None,
) -> list[FSDPModule]:
    """Shard a whole model, equal on all ranks of a mesh, in place; gradients are reduced in float32.

    A mesh of two dimensions shards over the second, and holds replicas along the first. ``place`` says which
    parameters have another mesh, as ``fully_shard`` asks for it.

    To ``reshard`` is to gather one decoder layer at a time, in ``compute``, and free it after use, and so for
    embeddings and head unless they are tied; else the whole model is gathered at once and kept for the length
    of a call.

    Returns:
        The modules that gather their parameters together, the root last.
    """
    as_held = all(p.dtype == compute for p in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=None if as_held else compute, reduce_dtype=torch.float32)
    ends, layers = (scoring.ends(model), decoder_layers(model)) if reshard else ([], [])
    # The backward pass wants the head at once, and the root: the last norm, with what is tied.
    kept = [*ends[1:], model]
    sharded = [
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard and module not in kept,
            shard_placement_fn=place,
        )
        for module in (*layers, *ends, model)
    ]
    for module in ends[:1]:
        cast(FSDPModule, module).set_unshard_in_backward(False)  # a gradient of embeddings needs none of them
    for module in sharded:
        # Sum gradients over ranks: an objective divides by the totals of all ranks itself.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return sharded


def recompute_layers(model: torch.nn.Module, offload: ActivationOffload | None = None) -> None:
    """Keep only the input of each decoder layer, and rerun it in the backward pass (arXiv 1604.06174).

    It is the layer's ``forward`` that runs again, inside of the hooks of FSDP2 and transformers: neither acts
    twice. No generator is restored: in eval mode nothing draws. With ``offload`` the inputs wait on the host.
    """
    for layer in decoder_layers(model):
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(_saving, offload, again) if offload else again


def _saving(offload: ActivationOffload, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer that ``checkpoint`` runs again: of what it does, only its inputs are saved."""
    with offload.saving():
        return forward(*args, **kwargs)


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the ``forward`` of each decoder layer (torch.compile) for any batch and length.

    All layers of a kind share what is compiled, those of other models too. That is a graph for each kind of
    pass: with gradients or without, with a mask or causal, of one lane or several, of each data type. torch
    would give up after 8 of them, and run the rest as it is. FSDP2's hooks stay outside of it, as does what
    runs again.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks: those that transformers would not split, else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return blocks or list(max(lists, key=len, default=[]))
