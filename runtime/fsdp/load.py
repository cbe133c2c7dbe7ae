"""A Hugging Face directory as a model sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

Head = Literal["lm", "value"]


def load_model(path: str, *, head: Head, seed: int, dtype: torch.dtype) -> torch.nn.Module:
    """The whole model in host memory, in ``dtype``.

    Args:
        path: a directory as ``save_pretrained`` writes it, or a name on the Hub.
        head: ``lm``, or ``value`` for one number a token; a value head that is not there is drawn anew.
        seed: what it is drawn from; the same seed gives the same head on every rank.
        dtype: of the parameters.

    Raises:
        ValueError: the directory lacks weights other than a value head's.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    auto: Any = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
    options = {} if head == "lm" else {"num_labels": 1}
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model, report = auto.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **options
        )
    missing = [name for name in report["missing_keys"] if head == "lm" or not name.startswith(_NEW_HEAD)]
    if missing:
        raise ValueError(f"{path} holds no weights for {', '.join(sorted(missing))} (head: {head})")
    model.register_forward_hook(_own_logits)
    # Dropout would make log-probs depend on the micro-batch; eval mode turns all of it off.
    return model.eval()


_NEW_HEAD = ("score", "classifier")


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
    masters = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == masters else compute, reduce_dtype=torch.float32
    )
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


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks: those that transformers itself would not split, else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return blocks or list(max(lists, key=len, default=[]))
