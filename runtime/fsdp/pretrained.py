"""A Hugging Face directory read into a sharded model: each rank reads the rows that it owns, and no others.

    shape_of        the model without memory for its weights
    weights_of      what its safetensors files hold
    reads_as_it_is  whether each weight lies there under the model's own name
    fill            after sharding: memory for this rank's rows, and the rows

What transformers converts on its way in (mixtures of experts that it fuses, renamed weights, quantized ones,
files that aren't safetensors) is left to transformers, which then loads the whole model (``load_model``).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlgraph.runtime.fsdp.lora import base_name

NEW_HEAD = ("score", "classifier")  # what transformers calls a value head


@dataclass(frozen=True)
class Stored:
    """Where a weight lies, and its shape."""

    file: str
    shape: list[int]


Files = Mapping[str, Stored]  # by the weight's name


def shape_of(path: str, auto: Any, options: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The model with its parameters on the meta device, and its buffers computed, on the CPU.

    Args:
        path: a directory or a name on the Hub.
        auto: the transformers class that chooses the model's, such as ``AutoModelForCausalLM``.
        options: what is changed in the config.
        dtype: of the parameters.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import no_init_weights
    from transformers.utils import cached_file

    config = AutoConfig.from_pretrained(path, **options)
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    if model.can_generate() and cached_file(path, "generation_config.json", **_OPTIONAL):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def weights_of(path: str) -> Files:
    """What lies in the safetensors files of a directory or Hub name; nothing where there are none."""
    from safetensors import safe_open

    stored: dict[str, Stored] = {}
    for name in _safetensors(path):
        with safe_open(name, "pt") as file:
            stored |= {weight: Stored(name, file.get_slice(weight).get_shape()) for weight in file.keys()}  # noqa: SIM118
    return stored


def reads_as_it_is(model: Any, files: Files, new: tuple[str, ...]) -> bool:
    """Whether the files hold each weight once, under the model's own name and as the model has it.

    Args:
        model: as ``shape_of`` returns it.
        files: as ``weights_of`` gives them.
        new: how the names of weights start that the files may lack.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    odd = (
        getattr(model.config, "quantization_config", None)
        or getattr(model.config, "transformers_weights", None)
        or model._keep_in_fp32_modules_strict
        or get_model_conversion_mapping(model, add_legacy=False)
    )
    if odd or not files:
        return False
    found = {names[0]: [name for name in names if name in files] for names in _tied(model)}
    # of two copies of a tied weight, transformers would compare both
    return all(len(held) == 1 or (not held and name.startswith(new)) for name, held in found.items())


def compute_the_rest(model: Any, files: Files, seed: int) -> None:
    """Draw the weights that the files lack, and compute buffers: on the CPU, as ``from_pretrained`` does."""
    lacking = {name for names in _tied(model) if not files.keys() & {*names} for name in names}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            if name in lacking:
                empty = torch.empty_like(parameter, device="cpu")
                setattr(module, name.rpartition(".")[2], torch.nn.Parameter(empty))
            else:
                parameter._is_hf_initialized = True  # by which transformers leaves it as it is
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    torch.default_generator.manual_seed(seed)
    model.initialize_weights()


def check(path: str, model: Any, files: Files, new: tuple[str, ...]) -> None:
    """Hold the files to the model.

    Raises:
        ValueError: weights of another shape than the model's.
    """
    state = model.state_dict(keep_vars=True)
    wrong = [
        f"{name} is {files[name].shape}, the model's is {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in files and files[name].shape != list(tensor.shape)
    ]
    if wrong:
        raise ValueError(f"{path}: {listed(wrong)}")
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    extra = [name for name in files if name not in state and not any(re.search(p, name) for p in ignored)]
    report_unexpected(path, model, extra, new)


def report_unexpected(path: str, model: Any, names: Iterable[str], new: tuple[str, ...]) -> None:
    """Warn of weights that the model has no place for. A model with a new head has none for the old one."""
    base = f"{model.base_model_prefix}."
    if extra := [name for name in sorted(names) if not new or name.startswith(base)]:
        warnings.warn(f"{path}: the model has no place for {listed(extra)}; left out", stacklevel=2)


def fill(model: torch.nn.Module, files: Files, device: torch.device) -> None:
    """Give a model memory for its parameters, or for this rank's shards, and read them from the files.

    Tied parameters stay one. What has memory already, such as a new head, is left as it is.
    """
    held: dict[int, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        stored = base_name(name)
        if stored in files:
            held[id(tensor)] = _read(tensor, files[stored].file, stored, device)
    model.load_state_dict({name: held.get(id(tensor), tensor) for name, tensor in state.items()}, assign=True)


def listed(names: list[str], most: int = 5) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@torch.no_grad()
def _read(tensor: torch.Tensor, file: str, name: str, device: torch.device) -> torch.Tensor:
    """A buffer in place; a parameter as a new one, of a sharded one this rank's rows.

    Each weight opens the file anew: closed, it no longer counts as this process's memory.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as weights:
        if tensor.is_meta and not isinstance(tensor, DTensor):
            whole = torch.empty_like(tensor, device=device).copy_(weights.get_tensor(name))
            return torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
        if not isinstance(tensor, DTensor):
            return tensor.copy_(weights.get_tensor(name))
        local = tensor.to_local()
        rows = torch.empty(local.shape, dtype=local.dtype, device=device)
        if len(rows):
            start = tensor.device_mesh.get_local_rank() * -(-tensor.shape[0] // tensor.device_mesh.size())
            rows.copy_(weights.get_slice(name)[start : start + len(rows)])
    sharded = DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
    return torch.nn.Parameter(sharded, requires_grad=tensor.requires_grad)


def _tied(model: torch.nn.Module) -> list[list[str]]:
    """The names of each weight: of a tied one all, the model's own first."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _safetensors(path: str) -> list[str]:
    """The safetensors files, where transformers looks for them: one, or those of an index."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    if whole := cached_file(path, SAFE_WEIGHTS_NAME, **_OPTIONAL):
        return [whole]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **_OPTIONAL)
    parts = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else ()
    return [str(cached_file(path, part)) for part in sorted({*parts})]


_OPTIONAL: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
