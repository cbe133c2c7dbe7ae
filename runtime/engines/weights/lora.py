"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft: beside a frozen weight W trains B A, of a small rank.

A layer computes ``W x + alpha / rank B A x``. Dropout is not offered: log-probs would depend on the
micro-batch. Adapters begin as the identity: B is zero, A drawn from a seed, the same on every rank.

The experts of a mixture each have a pair of their own, which peft keeps as two matrices for all of them,
``A [experts rank, inputs]`` and ``B [outputs, rank experts]``.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rlgraph.errors import nearest
from rlgraph.runtime.engines.experts import mixtures_of
from rlgraph.runtime.engines.weights.adapters import FILES, add
from rlgraph.runtime.engines.weights.naming import base_name
from rlgraph.runtime.engines.weights.transfer import Named
from rlgraph.syntax.model_settings import EXPERTS, Lora

NAME = "default"  # the name of the one adapter, in peft


def add_adapters(model: Any, layers: Iterable[torch.nn.Module], options: Lora, seed: int) -> None:
    """Freeze a model but for a new head, and give linear layers and experts in it adapters, in place.

    The model may have no memory for its weights; the adapters get theirs on the CPU, in float32. Targets are
    looked for in ``layers``, those of the decoder; A is drawn from ``seed``.

    Raises:
        ValueError: a target that no decoder layer has.
    """
    _inject(model, layers, options)
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted(model).values():
        down = layer.lora_A[NAME]
        up = layer.lora_B[NAME]
        # as peft and torch draw a linear layer: uniform within 1 / sqrt(inputs)
        uniform = torch.rand(down.weight.shape, generator=generator)
        down.weight = torch.nn.Parameter((2 * uniform - 1) / down.in_features**0.5)
        up.weight = torch.nn.Parameter(torch.zeros(up.weight.shape))
        if hasattr(layer, "parameter_name"):
            layer.forward = partial(_experts, layer)


def serve_adapters(
    model: Any, layers: Iterable[torch.nn.Module], options: Lora, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Give a model that only generates adapters of zeros, in place; return their tensors by ``in_files``.

    What the model computes without them stays as it is, in the memory where it lies.

    Raises:
        ValueError: a target that no decoder layer has.
    """
    _inject(model, layers, options)
    for layer in adapted(model).values():
        for factors in (layer.lora_A, layer.lora_B):
            zeros = torch.zeros(factors[NAME].weight.shape, device=device, dtype=dtype)
            factors[NAME].weight = torch.nn.Parameter(zeros, requires_grad=False)
        forward = _experts if hasattr(layer, "parameter_name") else _linear
        layer.forward = partial(forward, layer)
    return {in_files(name): p.data for name, p in model.named_parameters() if is_adapter(name)}


def _inject(model: Any, layers: Iterable[torch.nn.Module], options: Lora) -> None:
    """Freeze a model, and give its targets adapters without memory, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    linear, experts = targets_of(model, layers, options.targets)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft divides it by the rank: any number will do
        target_modules=linear,
        target_parameters=experts or None,
    )
    inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)


def adapted(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by name; experts are one layer for each weight that has one."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def in_files(name: str) -> str:
    """Return the name of an adapter's tensor in peft's files.

    Example:
        >>> in_files("model.layers.0.mlp.up_proj.lora_A.default.weight")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{FILES}{name.replace(f'.{NAME}.', '.')}"


def merged(tensors: Iterable[Named], scale: float, layers: Mapping[str, Any]) -> Iterator[Named]:
    """Yield full tensors of a model with adapters, merged in place: ``W + scale B A``, in W's data type.

    They come as ``named_parameters`` orders them: of a layer its weight and bias, A, then B; of experts all
    weights, then A and B of each that has them. ``scale`` is alpha / rank; ``layers`` is as ``adapted``.
    """
    layer_tensors: dict[str, torch.Tensor] = {}
    awaited = 0  # adapters of the layer that is held
    for name, tensor in tensors:
        awaited = awaited or name.count(".base_layer")
        if not awaited:
            yield name, tensor
            continue
        layer_tensors[name] = tensor
        awaited -= ".lora_B." in name
        if not awaited:
            _merge(layer_tensors, scale, layers)
            yield from (
                (base_name(name), tensor) for name, tensor in layer_tensors.items() if not is_adapter(name)
            )
            layer_tensors = {}


def write_adapter(
    directory: Path, model: Any, tensors: Mapping[str, torch.Tensor], base: str, task: str
) -> None:
    """Write full adapters as peft's own directory, for ``PeftModel.from_pretrained`` over the base model.

    ``tensors`` have the names of ``in_files``; ``base`` is a directory or a hub name, and ``task`` is peft's
    name of what the model does: by both ``AutoPeftModelForCausalLM`` loads it wherever it is asked from.
    """
    from safetensors.torch import save_file

    config = model.peft_config[NAME]
    config.base_model_name_or_path = base
    if Path(base).exists():
        config.base_model_name_or_path = str(Path(base).absolute())
    config.task_type = task
    config.inference_mode = True
    config.save_pretrained(str(directory))
    save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _merge(tensors: Mapping[str, torch.Tensor], scale: float, layers: Mapping[str, Any]) -> None:
    for name, up in tensors.items():
        owner, is_up, _ = name.partition(".lora_B.")
        if is_up:
            layer = layers[owner]
            weight = f".base_layer.{getattr(layer, 'parameter_name', 'weight')}"
            (base_weight,) = (tensor for other_name, tensor in tensors.items() if other_name.endswith(weight))
            transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            add(base_weight, tensors[f"{owner}.lora_A.{NAME}.weight"], up, scale, transposed)


def compute_in_type_of_inputs(model: Any) -> None:
    """Have the adapters of linear layers compute in the data type of their inputs, as FSDP2 has them do.

    peft would keep the inputs in the type of the adapters, float32, for the backward pass.
    """
    for layer in adapted(model).values():
        layer.forward = partial(_trained_linear, layer)


def _trained_linear(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return what a linear layer makes of ``inputs [..., size]`` with its adapter, cast to their type."""
    out: torch.Tensor = layer.base_layer(inputs)
    down, up = (factor[NAME].weight.to(inputs.dtype) for factor in (layer.lora_A, layer.lora_B))
    added = F.linear(F.linear(inputs, down), up)
    return out + added * float(layer.scaling[NAME])


def _linear(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return what a linear layer with its adapter makes of ``inputs [..., size]``, as peft does, with fewer
    operations."""
    out: torch.Tensor = layer.base_layer(inputs)
    narrow = F.linear(inputs, layer.lora_A[NAME].weight)
    return out.add_(F.linear(narrow, layer.lora_B[NAME].weight), alpha=layer.scaling[NAME])


def _experts(outer: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum, by ``weights [tokens, k]``, of what ``chosen [tokens, k]`` experts with their adapters
    make of ``hidden [tokens, size]``.

    peft adds B A to the weights of all experts, and keeps the sums, as large as what is frozen, for the
    backward pass, which has gradients of them. Here tokens pass A and B of their expert.
    """
    from transformers.integrations.moe import _grouped_linear

    experts = outer.get_base_layer()
    k = chosen.shape[1]
    if outer.disable_adapters:
        return experts(hidden, chosen, weights)  # type: ignore[no-any-return]
    expert, order = chosen.flatten().sort(stable=True)
    counts = expert.new_zeros(experts.num_experts).scatter_add_(0, expert, torch.ones_like(expert))
    grouped = partial(_grouped_linear, offs=counts.cumsum(0).int(), is_transposed=experts.is_transposed)
    factors: dict[str, Any] = {}
    while outer is not experts:
        factors[outer.parameter_name] = outer.get_delta_factors(NAME)
        outer = outer.base_layer

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
        out: torch.Tensor = grouped(inputs, getattr(experts, name), bias=bias)
        if name not in factors:
            return out
        left, right, scale = factors[name]  # the product has the shape of the experts' weights
        first = right
        second = left
        if experts.is_transposed:
            first = left
            second = right
        return out.add_(grouped(scale * grouped(inputs, first), second.contiguous()))

    raised = experts._apply_gate(linear("gate_up_proj", hidden[order // k]))
    weighted = linear("down_proj", raised) * weights.flatten()[order, None]
    return weighted[order.argsort()].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def targets_of(
    model: Any, layers: Iterable[torch.nn.Module], wanted: str | list[str]
) -> tuple[list[str], list[str]]:
    """Return the full names of the wanted linear layers, in a mixture of experts attention's alone, and of
    the wanted weights of experts, which transformers fuses into single tensors.

    Raises:
        ValueError: a target that no decoder layer has.
    """
    inside = set[int]()  # the identities of the linear modules of the decoder layers
    for layer in layers:
        inside |= {id(module) for module in layer.modules() if isinstance(module, torch.nn.Linear)}
    linear = [name for name, module in model.named_modules() if id(module) in inside]
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        linear = [name for name in linear if ".self_attn." in name]
    fused = []
    for name, mixture in mixtures_of(model).items():
        if mixture.has_gate and not getattr(mixture, "has_post_expert_norm", False):
            fused += [f"{name}.gate_up_proj", f"{name}.down_proj"]
    short = {name: name.rpartition(".")[2] for name in linear}
    short |= {name: f"{EXPERTS}{name.rpartition('.')[2]}" for name in fused}
    available = sorted({*short.values()})
    if wanted == "all-linear":
        return linear, []
    unknown = sorted({*wanted} - {*available})
    if unknown:
        law = f"lora: no decoder layer has a linear {', '.join(unknown)}"
        suggestions = " ".join(filter(None, (nearest(name, available) for name in unknown)))
        raise ValueError(f"{law}; there are {', '.join(available)}. {suggestions}".strip(" ."))
    wanted_linear = [name for name in linear if short[name] in wanted]
    wanted_fused = [name for name in fused if short[name] in wanted]
    return wanted_linear, wanted_fused
