"""Loads a Hugging Face directory as a model sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rlgraph.costs.limits import SMALL
from rlgraph.runtime.engines import experts
from rlgraph.runtime.engines.attention import GRAPHS, attend_without_mask, repeat_shared_heads
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.fsdp import scoring, tensor
from rlgraph.runtime.engines.fsdp.options import Head, TrainOptions
from rlgraph.runtime.engines.fsdp.ranks import ModelRanks
from rlgraph.runtime.engines.fsdp.shards import borrow
from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup, LayerParts, divide
from rlgraph.runtime.engines.memory.activations import ActivationOffload
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sequence import attention as sequence
from rlgraph.runtime.engines.weights import four_bit, lora, naming, pretrained
from rlgraph.runtime.engines.weights.four_bit import FourBitLayers, FourBitLinear, put_layers
from rlgraph.runtime.engines.weights.frozen import FrozenWeights
from rlgraph.runtime.engines.weights.naming import WeightViews

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ShardedModel:
    """A model that is sharded over ranks, and how.

    Attributes:
        model: the model, which holds this rank's shards.
        shards: the modules that gather their parameters together, the root last; none on a rank alone.
        reshard: whether they free gathered parameters after use.
        views: the weights of the checkpoint that each parameter holds.
        parts: the parameters of which this rank has a part.
        layers: the decoder layers.
    """

    model: PreTrainedModel
    shards: list[FSDPModule]
    reshard: bool
    views: WeightViews
    layer_parts: LayerParts
    layers: list[torch.nn.Module]


def load_sharded(
    files: ModelFiles,
    options: TrainOptions,
    ranks: ModelRanks,
    borrowed: FrozenWeights | None = None,
    borrowed_layers: FourBitLayers | None = None,
) -> ShardedModel:
    """Load a model and shard it over a mesh; where its files allow, each rank reads its rows alone.

    ``borrowed`` are frozen weights that another model holds on the same ranks, which this one reads there;
    ``borrowed_layers`` those of them that lie in 4 bits.

    Raises:
        ValueError: models of this type can't be trained, or their tokens not shared, or their layers or
            experts not divided; or the directory lacks weights other than a value head's, or has them in
            another shape; or the adapter names layers that there are not.
    """
    device = torch.device(ranks.mesh.device_type)
    compute = options.compute
    model, views, unread = _build(files, options, ranks)
    layer_parts = divide(model, ranks.tensor)
    placement = None
    if ranks.experts.group:
        divided = dict.fromkeys(experts.divide(model, ranks.experts.group), 0)
        layer_parts = LayerParts(ranks.experts, divided, mesh=ranks.experts.mesh)
    repeat_shared_heads(model, device, compute)
    attend_without_mask(model, device, compute)
    sequence.share_attention(model, ranks.sequence)
    model.register_forward_hook(_own_logits)
    # Dropout would make log-probs depend on the micro-batch; eval mode turns all of it off.
    model.eval()
    _choose_trained(model, options)
    if options.compile:
        compile_layers(model)
    if options.recompute and not options.is_frozen:
        offload = ActivationOffload(device) if options.activation_offload else None
        recompute_layers(model, offload)
    reshard = options.reshard
    if reshard is None:
        reshard = sum(p.numel() for p in model.parameters()) > SMALL
    if ranks.experts.group:
        placement = _placement_of_experts(model, layer_parts, ranks.experts)
    if borrowed_layers:
        put_layers(model, views, borrowed_layers)
    elif options.lora and options.lora.quantize:
        _hold_in_four_bits(model, views, unread, device)
    if options.lora and options.lora.quantize:
        lora.compute_in_type_of_inputs(model)
    is_sharded = _needs_shards(model, options, ranks)
    shards: list[FSDPModule] = []
    if is_sharded:
        shards = shard_model(model, ranks.mesh, reshard=reshard, compute=compute, place=placement)
    if options.head == "lm":
        scoring.prepare(model, options.has_wide_head)
    if borrowed:
        borrow(model, views, borrowed)
    if unread is not None:
        pretrained.fill(model, views, unread, device, layer_parts.cut)
    if not is_sharded:
        module: torch.nn.Module = model
        module.to(device)
    return ShardedModel(model, shards, reshard, views, layer_parts, decoder_layers(model))


def _needs_shards(model: PreTrainedModel, options: TrainOptions, ranks: ModelRanks) -> bool:
    """Return whether FSDP2 has something to do on these ranks.

    On a rank alone there is nothing to gather or to sum, and FSDP2 would hold every parameter a second time.
    Weights in 4 bits are on a rank alone, and adapters beside them are cast by their layers.
    """
    if any(isinstance(module, FourBitLinear) for module in model.modules()):
        assert ranks.mesh.size() == 1, "weights in 4 bits are not sharded"
        return False
    if ranks.copy_group.size() > 1:
        return True
    if not options.is_frozen and ranks.mesh.size() > 1:
        return True
    return any(p.dtype != options.compute for p in model.parameters())


def _hold_in_four_bits(
    model: PreTrainedModel,
    views: WeightViews,
    unread: pretrained.StoredWeights | None,
    device: torch.device,
) -> None:
    """Hold the weights below adapters in 4 bits, each as soon as it is read."""

    def weight_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
        if unread is None:
            return parameter.to(device)
        return pretrained.read_parameter(parameter, views[naming.base_name(name)], unread, device)

    four_bit.quantize(model, weight_of)


def _new_weights(head: Head) -> tuple[str, ...]:
    """Return the prefixes of the weights that a model's directory may lack."""
    return () if head == "lm" else pretrained.NEW_HEAD


def _build(
    files: ModelFiles, options: TrainOptions, ranks: ModelRanks
) -> tuple[PreTrainedModel, WeightViews, pretrained.StoredWeights | None]:
    """Return a model, the views of its parameters, and the files whose weights it still lacks, if any."""
    path = files.path
    new = _new_weights(options.head)
    dtype = options.compute if options.is_frozen or options.lora else torch.float32
    with quiet(), torch.random.fork_rng(devices=[]):
        stored = pretrained.weights_of(path)
        auto, changes = pretrained.classes(options.head)
        model: PreTrainedModel = pretrained.shape_of(files, auto, changes, dtype)
        if options.head == "lm":
            scoring.check(model)
        sequence.check(model, ranks.sequence.ranks)
        tensor.check(model, ranks.tensor.ranks)
        experts.check(model, ranks.experts.ranks)
        views = naming.views_of(model, stored)
        pretrained.check_experts(path, views, stored)
        reads_by_rows = pretrained.reads_by_rows(model, views, stored, new)
        if reads_by_rows:
            pretrained.check(path, model, views, stored, new)
            pretrained.compute_the_rest(model, views, stored, options.seed)
        else:
            attention: str = model.config._attn_implementation
            model = load_model(files, options, dtype, attention)
        if options.lora:
            lora.add_adapters(model, decoder_layers(model), options.lora, options.seed)
    return model, views, stored if reads_by_rows else None


def _choose_trained(model: PreTrainedModel, options: TrainOptions) -> None:
    new = _new_weights(options.head)
    for name, parameter in model.named_parameters():
        trains = options.lora is None or lora.is_adapter(name) or name.startswith(new)
        parameter.requires_grad_(trains and not options.is_frozen)
        if options.lora and trains:
            parameter.data = parameter.data.float()


def load_model(
    files: ModelFiles, options: TrainOptions, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """Return the whole model in host memory, loaded and converted by transformers."""
    path = files.path
    new = _new_weights(options.head)
    auto, changes = pretrained.classes(options.head)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        loaded: tuple[PreTrainedModel, dict[str, Any]] = auto.from_pretrained(
            path,
            config=files.config(**changes),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            trust_remote_code=files.trusted,
        )
    model, report = loaded
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(new))
    if missing:
        law = f"{path} holds no weights for {pretrained.shortened_list(missing)}"
        raise ValueError(f"{law} (head: {options.head})")
    pretrained.report_unexpected(path, model, report["unexpected_keys"], new)
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

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _placement_of_experts(
    model: torch.nn.Module, layer_parts: LayerParts, group: ExpertGroup
) -> Callable[..., Any]:
    """Return what tells FSDP2 that experts are sharded over the ranks that have the same.

    Raises:
        ValueError: torch has no mesh per parameter: its versions before 2.12.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        law = f"torch {torch.__version__} shards all weights of a layer over the same ranks"
        raise ValueError(f"{law}; install torch 2.12 or newer, or set train.expert_parallel to 1")
    assert group.mesh
    mesh = common.FSDPMeshInfo(group.mesh, 0)
    has_replicas = group.mesh.ndim > 1
    if has_replicas:
        mesh = common.HSDPMeshInfo(group.mesh, 1, 0)
    placement = common.ShardPlacementResult(None, mesh)
    divided = {id(p) for name, p in model.named_parameters() if name in layer_parts.dimensions}
    return lambda parameter: placement if id(parameter) in divided else None


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
    needs_cast = any(p.dtype != compute for p in model.parameters())
    gathered_dtype = compute if needs_cast else None
    policy = MixedPrecisionPolicy(param_dtype=gathered_dtype, reduce_dtype=torch.float32)
    ends, layers = (scoring.ends(model), decoder_layers(model)) if reshard else ([], [])
    # The backward pass wants the head at once, and the root: the last norm, with what is tied.
    gathered_for_backward = [*ends[1:], model]
    sharded = [
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard and module not in gathered_for_backward,
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
