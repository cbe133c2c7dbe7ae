"""A Hugging Face directory as a model sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rlgraph.runtime.fsdp import lora, pretrained, scoring
from rlgraph.runtime.fsdp.lora import LoraOptions

Head = Literal["lm", "value"]


def load_sharded(
    path: str,
    *,
    head: Head,
    seed: int,
    frozen: bool,
    compute: torch.dtype,
    mesh: DeviceMesh,
    reshard: bool | None,
    small: int,
    recompute: bool,
    adapter: LoraOptions | None = None,
    compiled: bool = False,
) -> tuple[torch.nn.Module, list[FSDPModule], bool]:
    """A model sharded over the ranks of a mesh; where its files allow, each rank reads its rows alone.

    Args:
        path: a directory as ``save_pretrained`` writes it, or a name on the Hub.
        head: ``lm``, or ``value`` for one number a token; a value head that is not there is drawn anew.
        seed: what it is drawn from; the same seed gives the same head on every rank.
        frozen: whether parameters take no gradients, and are held in ``compute``; else in float32.
        compute: dtype of the gathered parameters.
        mesh: one dimension, the ranks.
        reshard: see ``shard_model``; None: unless the model is small.
        small: parameters that a small model has at most.
        recompute: whether ``recompute_layers``, unless frozen.
        adapter: train only low-rank adapters, and a value head; the rest is held in ``compute``.
        compiled: whether ``compile_layers``.

    Returns:
        The model, the modules that gather their parameters together, and whether they reshard.

    Raises:
        ValueError: the directory lacks weights other than a value head's, or has them in another shape; or
            the adapter names layers that there are not.
    """
    dtype, new = compute if frozen or adapter else torch.float32, () if head == "lm" else pretrained.NEW_HEAD
    with quiet(), torch.random.fork_rng(devices=[]):
        files = pretrained.weights_of(path)
        model = pretrained.shape_of(path, *_classes(head), dtype)
        direct = pretrained.reads_as_it_is(model, files, new)
        if direct:
            pretrained.check(path, model, files, new)
            pretrained.compute_the_rest(model, files, seed)
        else:
            model = load_model(path, head=head, seed=seed, dtype=dtype)
        if adapter:
            lora.add_adapters(model, decoder_layers(model), adapter, seed)
    model.register_forward_hook(_own_logits)
    # Dropout would make log-probs depend on the micro-batch; eval mode turns all of it off.
    model.eval()
    for name, parameter in model.named_parameters():
        trains = adapter is None or lora.is_adapter(name) or name.startswith(new)
        parameter.requires_grad_(trains and not frozen)
        if adapter and trains:
            parameter.data = parameter.data.float()
    if compiled:
        compile_layers(model)
    if recompute and not frozen:
        recompute_layers(model)
    if reshard is None:
        reshard = sum(p.numel() for p in model.parameters()) > small
    # alone, there is nothing to gather: FSDP2 would hold every parameter a second time
    alone = mesh.size() == 1 and all(p.dtype == compute for p in model.parameters())
    shards = [] if alone else shard_model(model, mesh, reshard=reshard, compute=compute)
    if head == "lm":
        scoring.prepare(model)
    if direct:
        pretrained.fill(model, files, torch.device(mesh.device_type))
    if alone:
        model.to(mesh.device_type)
    return model, shards, reshard


def load_model(path: str, *, head: Head, seed: int, dtype: torch.dtype) -> Any:
    """The whole model in host memory, loaded and converted by transformers; see ``load_sharded``."""
    auto, options = _classes(head)
    new = () if head == "lm" else pretrained.NEW_HEAD
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model, report = auto.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **options
        )
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith(new)):
        raise ValueError(f"{path} holds no weights for {pretrained.listed(missing)} (head: {head})")
    pretrained.report_unexpected(path, model, report["unexpected_keys"], new)
    return model


def _classes(head: Head) -> tuple[Any, dict[str, Any]]:
    """The transformers class that makes a model with this head, and what it changes in the config."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return (
        (AutoModelForCausalLM, {}) if head == "lm" else (AutoModelForTokenClassification, {"num_labels": 1})
    )


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


def shard_model(
    model: torch.nn.Module, mesh: DeviceMesh, *, reshard: bool, compute: torch.dtype
) -> list[FSDPModule]:
    """Shard a model's parameters over a mesh, in place.

    Args:
        model: the whole model, equal on all ranks.
        mesh: one dimension, the ranks.
        reshard: gather one decoder layer at a time and free it after use; else gather the whole model at once
            and keep it for the length of a call.
        compute: dtype of the gathered parameters; gradients are reduced in float32.

    Returns:
        The modules that gather their parameters together, the root last.
    """
    as_held = all(p.dtype == compute for p in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=None if as_held else compute, reduce_dtype=torch.float32)
    groups = [*(decoder_layers(model) if reshard else []), model]
    # None frees all but the root, whose embeddings and head the backward pass wants at once.
    after_forward = None if reshard else False
    sharded = [
        fully_shard(g, mesh=mesh, mp_policy=policy, reshard_after_forward=after_forward) for g in groups
    ]
    for module in sharded:
        # Sum gradients over ranks: an objective divides by the totals of all ranks itself.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return sharded


def recompute_layers(model: torch.nn.Module) -> None:
    """Of each decoder layer keep only its input, and run it again in the backward pass (arXiv 1604.06174).

    It is the layer's ``forward`` that runs again, inside of the hooks of FSDP2 and transformers: neither acts
    twice. No generator is restored: in eval mode nothing draws.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the ``forward`` of each decoder layer (torch.compile) for any batch and length.

    All layers of a kind share what is compiled. FSDP2's hooks stay outside of it, as does what runs again.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks: those that transformers itself would not split, else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return blocks or list(max(lists, key=len, default=[]))
