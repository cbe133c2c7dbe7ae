"""Reads a Hugging Face directory into a sharded model: each rank reads the rows that it owns, and no others.

    shape_of        the model without memory for its weights
    weights_of      what its safetensors files hold
    reads_by_rows   whether the files hold every view of every parameter (``naming``)
    fill            after sharding: memory for this rank's rows, and the rows

Of a mixture's fused experts a rank reads those whose rows it owns. What else transformers converts on its
way in (names without the model's prefix, quantized weights, files that aren't safetensors) is left to it, and
it then loads the whole model (``load_model``).
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.weights.extents import Cut, extent
from rlgraph.runtime.engines.weights.naming import WeightView, WeightViews, base_name

NEW_HEAD = ("score", "classifier")  # transformers' names for a value head


@dataclass(frozen=True)
class StoredWeight:
    """The file of a weight, and its shape."""

    file: str
    shape: list[int]


StoredWeights = Mapping[str, StoredWeight]  # stored weights by name


def shape_of(files: ModelFiles, auto: Any, options: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model with its parameters on the meta device, and its buffers computed, on the CPU.

    ``auto`` is the transformers class that chooses the model's, such as ``AutoModelForCausalLM``; ``options``
    are what is changed in the config.

    Raises:
        ValueError: transformers has no such class for models of this type.
    """
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights
    from transformers.utils import cached_file

    config = files.config(**options)
    law = _without_class(config, auto)
    if law:
        raise ValueError(law)
    model_class = auto._model_mapping.get(type(config), None)
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=files.trusted
        )
    _without_memory(model)
    model.tie_weights()
    if model.can_generate() and cached_file(files.path, "generation_config.json", **_OPTIONAL):
        model.generation_config = GenerationConfig.from_pretrained(files.path)
    return model


def _without_memory(model: torch.nn.Module) -> None:
    """Move parameters to the meta device that were drawn elsewhere, so that they are read like all others.

    ``torch.normal`` with a size takes no notice of a default device: DiffLlama's lambdas (transformers 5.23).
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(parameter.to("meta")))


def classes(head: str) -> tuple[Any, dict[str, Any]]:
    """Return the transformers class that makes a model with this head, and its changes to the config."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    if head == "lm":
        return AutoModelForCausalLM, {}
    return AutoModelForTokenClassification, {"num_labels": 1}


def unfit(config: Any, head: str) -> str:
    """Return why a model of a configuration can't be trained with a head, or nothing."""
    auto, _ = classes(head)
    return _without_class(config, auto)


def _without_class(config: Any, auto: Any) -> str:
    """Return that there is no class of a kind for a configuration, or nothing."""
    from transformers import AutoModelForImageTextToText

    if type(config) in auto._model_mapping:
        return ""
    classes_of_files = getattr(config, "auto_map", None) or {}
    if auto.__name__ in classes_of_files:
        return ""
    if type(config) in AutoModelForImageTextToText._model_mapping:
        law = f"{config.model_type}: vision-language models are not supported yet"
        return f"{law}; choose a text-only language model for models.NAME.path"
    law = f"{config.model_type}: transformers has no {auto.__name__.removeprefix('Auto')} of this type"
    return f"{law}; choose a model of a different type (a critic's may differ from the policy's)"


def weights_of(path: str) -> StoredWeights:
    """Return the weights in a directory's or Hub name's safetensors files; nothing where there are none."""
    from safetensors import safe_open

    stored: dict[str, StoredWeight] = {}
    for name in _safetensors(path):
        with safe_open(name, "pt") as file:
            for weight in file.keys():  # noqa: SIM118
                stored[weight] = StoredWeight(name, file.get_slice(weight).get_shape())
    return stored


def read_weight(stored: StoredWeight, name: str) -> torch.Tensor:
    """Return a weight of a checkpoint, on the CPU."""
    from safetensors import safe_open

    with safe_open(stored.file, "pt") as file:
        weight: torch.Tensor = file.get_tensor(name)
        return weight


def reads_by_rows(model: Any, views: WeightViews, files: StoredWeights, new: tuple[str, ...]) -> bool:
    """Return whether the files hold each weight once, as views of the model's parameters.

    They may lack weights whose names start as ``new`` says.
    """
    if not files:
        return False
    if getattr(model.config, "quantization_config", None):
        return False
    if getattr(model.config, "transformers_weights", None):
        return False
    if _has_wider_weights(model):
        return False
    for names in _tied(model):
        stored_names = [name for name in names if _stored(views[name], files)]
        # transformers would compare both copies of a tied weight
        if len(stored_names) > 1:
            return False
        may_lack = names[0].startswith(new)
        if not stored_names and not may_lack:
            return False
    return True


def _has_wider_weights(model: Any) -> bool:
    """Return whether some weights must not be narrower than float32, and others are."""
    if model.dtype == torch.float32:
        return False
    strict = model._keep_in_fp32_modules_strict or ()
    return any(_has_key(name, strict) for name, _ in model.named_parameters())


def _has_key(name: str, keys: Iterable[str]) -> bool:
    return any(key in name for key in keys)


def check_experts(path: str, views: WeightViews, files: StoredWeights) -> None:
    """Check that no weight of an expert is missing: files have all views of a parameter or none of them.

    Raises:
        ValueError: they have some of them.
    """
    missing: list[str] = []
    for parameter_views in views.values():
        names = [view.name for view in parameter_views]
        absent = [name for name in names if name not in files]
        if len(absent) < len(names):
            missing += absent
    if missing:
        raise ValueError(f"{path} holds no weights for {shortened_list(missing)}")


def compute_the_rest(model: Any, views: WeightViews, files: StoredWeights, seed: int) -> None:
    """Draw the weights that the files lack, and compute buffers: on the CPU, as ``from_pretrained`` does."""
    lacking = set[str]()
    for names in _tied(model):
        if not any(_stored(views[name], files) for name in names):
            lacking.update(names)
    strict = model._keep_in_fp32_modules_strict or ()
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            if name in lacking:
                empty = torch.empty_like(parameter, device="cpu")
                setattr(module, name.rpartition(".")[2], torch.nn.Parameter(empty))
            else:
                parameter._is_hf_initialized = True  # makes transformers leave it as it is
        for name, buffer in list(module.named_buffers(recurse=False)):
            dtype = torch.float32 if _has_key(f"{prefix}.{name}", strict) else buffer.dtype
            setattr(module, name, torch.empty_like(buffer, device="cpu", dtype=dtype))
    torch.default_generator.manual_seed(seed)
    model.initialize_weights()


def check(path: str, model: Any, views: WeightViews, files: StoredWeights, new: tuple[str, ...]) -> None:
    """Check that the files' weights are of the model's shapes (else ValueError), and warn of others."""
    shapes: dict[str, list[int]] = {}
    for parameter_views in views.values():
        for view in parameter_views:
            shapes[view.name] = list(view.shape)
    mismatches: list[str] = []
    for name, shape in shapes.items():
        if name in files and files[name].shape != shape:
            mismatches.append(f"{name} is {files[name].shape}, the model's is {shape}")
    if mismatches:
        raise ValueError(f"{path}: {shortened_list(mismatches)}")
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unexpected: list[str] = []
    for name in files.keys() - shapes.keys():
        if not any(re.search(pattern, name) for pattern in ignored):
            unexpected.append(name)
    report_unexpected(path, model, unexpected, new)


def report_unexpected(path: str, model: Any, names: Iterable[str], new: tuple[str, ...]) -> None:
    """Warn of weights that the model has no place for. A model with a new head has none for the old one."""
    unplaced = sorted(names)
    if new:
        base = f"{model.base_model_prefix}."
        unplaced = [name for name in unplaced if name.startswith(base)]
    if unplaced:
        names_text = shortened_list(unplaced)
        warnings.warn(f"{path}: the model has no place for {names_text}; left out", stacklevel=2)


def fill(
    model: torch.nn.Module,
    views: WeightViews,
    files: StoredWeights,
    device: torch.device,
    cut_of: Callable[[str], Cut | None] = lambda name: None,
) -> None:
    """Give a model memory for its parameters, or for this rank's shards, and read them from the files.

    Tied parameters stay one. A parameter that has memory already, such as a new head's, is left as it is.
    ``cut_of`` returns which part of a parameter, by name, the model has; None: all of it.
    """
    filled: dict[int, torch.Tensor] = {}  # by the identity of a tensor, which tied ones share
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        tensor_views = views.get(base_name(name), [])
        has_memory = isinstance(tensor, torch.nn.Parameter) and not tensor.is_meta
        if _stored(tensor_views, files) and not has_memory:
            filled[id(tensor)] = read_parameter(tensor, tensor_views, files, device, cut_of(name))
    filled_state = {name: filled.get(id(tensor), tensor) for name, tensor in state.items()}
    model.load_state_dict(filled_state, assign=True)


def shortened_list(names: list[str], limit: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@torch.no_grad()
def read_parameter(
    tensor: torch.Tensor,
    views: Sequence[WeightView],
    files: StoredWeights,
    device: torch.device,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Read a buffer in place, or a parameter as a new one: of a sharded one, this rank's rows."""
    if not tensor.is_meta and not isinstance(tensor, DTensor):
        _copy_views(tensor, 0, tensor, views, files)
        return tensor
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    rows = torch.empty(local.shape, dtype=local.dtype, device=device)
    own_extent = extent(tensor, cut)
    if cut and cut[0]:
        _copy_columns(rows, own_extent, views, files)
    else:
        _copy_views(rows, own_extent[0].start if own_extent else 0, tensor, views, files)
    if isinstance(tensor, DTensor):
        rows = DTensor.from_local(
            rows, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return torch.nn.Parameter(rows, requires_grad=tensor.requires_grad)


def _copy_views(
    rows: torch.Tensor,
    first_row: int,
    parameter: torch.Tensor,
    views: Sequence[WeightView],
    files: StoredWeights,
) -> None:
    """Fill consecutive rows of a ``parameter``, from number ``first_row`` on, and read nothing else.

    A file is opened anew for each parameter: closed, it no longer counts as this process's memory.
    """
    from safetensors import safe_open

    width = math.prod(parameter.shape[1:])
    for file, file_views in groupby(views, key=lambda view: files[view.name].file):
        overlaps = [(view.name, view.rows_of(rows, first_row, width)) for view in file_views]
        if not any(overlap for _, overlap in overlaps):
            continue
        with safe_open(file, "pt") as weights:
            for name, overlap in overlaps:
                if overlap is None:
                    continue
                in_file, target = overlap
                if target.dim():
                    target.copy_(weights.get_slice(name)[in_file])
                else:
                    target.copy_(weights.get_tensor(name))


def _copy_columns(
    rows: torch.Tensor, own_extent: tuple[slice, ...], views: Sequence[WeightView], files: StoredWeights
) -> None:
    """Fill a part of the columns of a parameter that is one weight of the checkpoint."""
    from safetensors import safe_open

    (view,) = views
    with safe_open(files[view.name].file, "pt") as weights:
        rows.copy_(weights.get_slice(view.name)[own_extent])


def _stored(views: Sequence[WeightView], files: StoredWeights) -> bool:
    """Return whether the files hold all views of a parameter."""
    return bool(views) and all(view.name in files for view in views)


def _tied(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each weight: of a tied one all, that of the model's first parameter first."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _safetensors(path: str) -> list[str]:
    """Return the safetensors files, where transformers looks for them: one, or those of an index."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    single_file = cached_file(path, SAFE_WEIGHTS_NAME, **_OPTIONAL)
    if single_file:
        return [single_file]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **_OPTIONAL)
    if not index:
        return []
    weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    shards = sorted(set(weight_map.values()))
    return [str(cached_file(path, shard)) for shard in shards]


_OPTIONAL: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
