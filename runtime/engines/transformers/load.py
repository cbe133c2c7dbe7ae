"""Builds a transformers model for an engine: empty weights, their names, its kinds of attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rlgraph.runtime.engines.attention import repeat_shared_heads
from rlgraph.runtime.engines.causal import sees_later_tokens
from rlgraph.runtime.engines.model_files import ModelFiles, attention_kinds
from rlgraph.runtime.engines.weights.naming import views_of

WINDOWED = "create_sliding_window_causal_mask"  # by which transformers' models see windows
ATTENTIONS = ("full_attention", "sliding_attention")


def empty_model(
    files: ModelFiles, device: torch.device, dtype: torch.dtype, has_memory: bool = True
) -> PreTrainedModel:
    """Return the model with uninitialised weights; buffers that no checkpoint holds are computed.

    Its parameters lie on the meta device unless the model ``has_memory`` of its own.

    Raises:
        ValueError: it has layers that the engine does not run.
    """
    config = files.config()
    if law := unfit(config):
        raise ValueError(law)
    with device, no_init_weights(), nullcontext() if has_memory else _parameters_without_memory():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=files.trusted
        )
    model.tie_weights()
    repeat_shared_heads(model, device, dtype)
    model.eval()
    model.requires_grad_(False)
    return model


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Move the parameters of modules that are made in a block to the meta device, each as it is made."""

    def moved(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied one stays the same object
            return None
        return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        hook.remove()


def unfit(config: Any) -> str:
    """Return why this engine can't run a model of a configuration, or nothing."""
    kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    kinds = {*attention_kinds(config)}
    is_odd = False
    if kind:
        if "sliding_attention" in kinds and not hasattr(sys.modules[kind.__module__], WINDOWED):
            kinds |= {"windows of its own"}
        takes_both = _has_parameter(kind, "position_ids") and cache_name(kind)
        is_odd = kind._is_stateful or not takes_both
    unknown = sorted(kinds - {*ATTENTIONS})
    if not unknown and not is_odd:
        return _unfit_form(config, kind) if kind else ""
    law = f"{config.model_type}: the embedded engine runs {' and '.join(ATTENTIONS)} with position_ids"
    law += f" and a cache, not {', '.join(unknown) or kind.__name__}"
    return f"{law}; serve it with sglang (models.NAME.serve.engine)"


def _unfit_form(config: Any, kind: Any) -> str:
    """Return why a model whose layers this engine runs can't be run by it all the same."""
    with torch.device("meta"), no_init_weights():
        model = kind._from_config(config)
    if sees_later_tokens(model):
        law = f"{config.model_type}: its attention sees later tokens, as an encoder's does"
        return f"{law}; choose a model of a different type for models.NAME.path"
    try:
        views_of(model, ())
    except ValueError as error:
        return str(error)
    return ""


def cache_name(kind: type) -> str:
    """Return by which name a model's class takes keys and values, or nothing where it takes none.

    transformers 5.24 calls them ``cache``, and warns of the former name.
    """
    forwards = [base for base in kind.__mro__ if "forward" in vars(base)]  # one of its own may hand all on
    for base in forwards:
        for name in ("cache", "past_key_values"):
            if _has_parameter(base, name):
                return name
    return ""


def _has_parameter(kind: type, name: str) -> bool:
    return name in inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters, a tied one once, and buffers that a checkpoint holds, by name."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict()
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in saved}


@torch.no_grad()
def copy_into(name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ValueError(f"weight {name!r} is {list(tensor.shape)}; the model's is {list(target.shape)}")
    target.copy_(tensor)
