"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft: beside a frozen weight W trains B A, of a small rank.

A layer computes ``W x + alpha / rank B A x``. Dropout is not offered: log-probs would depend on the
micro-batch. Adapters begin as the identity: B is zero, A drawn from a seed, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlgraph.runtime.engines.weights.naming import base_name
from rlgraph.runtime.engines.weights.transfer import Named
from rlgraph.syntax.model_settings import Lora

NAME = "default"  # the name of the one adapter, in peft


def add_adapters(model: Any, layers: Iterable[torch.nn.Module], options: Lora, seed: int) -> None:
    """Freeze a model but for a new head, and give linear layers of its decoder adapters, in place.

    The model may have no memory for its weights; the adapters get theirs on the CPU, in float32. Targets are
    looked for in ``layers``, those of the decoder; A is drawn from ``seed``.

    Raises:
        ValueError: a target that no decoder layer has.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=_targets(model, layers, options.targets)
    )
    inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted(model).values():
        down, up = layer.lora_A[NAME], layer.lora_B[NAME]
        # as peft and torch draw a linear layer: uniform within 1 / sqrt(inputs)
        drawn = torch.rand(down.weight.shape, generator=generator)
        down.weight = torch.nn.Parameter((2 * drawn - 1) / down.in_features**0.5)
        up.weight = torch.nn.Parameter(torch.zeros(up.weight.shape))


def adapted(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def without(layers: Iterable[Any]) -> Iterator[None]:
    """Use the layers without their adapters inside the block.

    peft's own switch would turn off the adapters' ``requires_grad`` too, which FSDP2 reads as it gathers.
    """
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def in_files(name: str) -> str:
    """Return the name of an adapter's tensor in peft's files.

    Example:
        >>> in_files("model.layers.0.mlp.up_proj.lora_A.default.weight")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"


def merged(tensors: Iterable[Named], scale: float) -> Iterator[Named]:
    """Yield full tensors of a model with adapters, merged: ``W + scale B A``, in W's data type.

    They come as ``named_parameters`` orders them: of a layer its weight and bias, A, then B. ``scale`` is
    alpha / rank.
    """
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if not held and ".base_layer." not in name:
            yield name, tensor
            continue
        held[name] = tensor
        if ".lora_B." in name:
            yield from _merge(held, scale)
            held = {}


def unadapted(engine: Any) -> SimpleNamespace:
    """Return what scores with the model that an engine adapts, without its adapter: it takes no memory."""
    methods = {name: partial(getattr(engine, name), adapter=False) for name in ("logprobs", "squares")}
    return SimpleNamespace(**methods)


def write_adapter(directory: Path, model: Any, tensors: Mapping[str, torch.Tensor], base: str) -> None:
    """Write full adapters as peft's own directory, for ``PeftModel.from_pretrained`` over the base model.

    ``tensors`` have the names of ``in_files``.
    """
    from safetensors.torch import save_file

    config = model.peft_config[NAME]
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(directory))
    save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _merge(held: Mapping[str, torch.Tensor], scale: float) -> Iterator[Named]:
    down, up = (next(t for name, t in held.items() if key in name) for key in (".lora_A.", ".lora_B."))
    for name, tensor in held.items():
        if name.endswith(".base_layer.weight"):
            whole = tensor.float() + scale * (up.float() @ down.float())
            yield base_name(name), whole.to(tensor.dtype)
        elif not is_adapter(name):
            yield base_name(name), tensor


def _targets(model: Any, layers: Iterable[torch.nn.Module], wanted: str | list[str]) -> list[str]:
    """Return the full names of the wanted linear layers; in a mixture of experts, attention's alone.

    transformers fuses experts into single tensors, for which peft would rewrite the list.
    """
    inside = {id(m) for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)}
    linear = [name for name, module in model.named_modules() if id(module) in inside]
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        linear = [name for name in linear if ".self_attn." in name]
    there = sorted({name.rpartition(".")[2] for name in linear})
    if wanted == "all-linear":
        return linear
    if unknown := sorted({*wanted} - {*there}):
        raise ValueError(
            f"lora: no decoder layer has a linear {', '.join(unknown)}; there are {', '.join(there)}"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]
