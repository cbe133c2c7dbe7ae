"""The parameters of a model that train are counted here: all, or those of its low-rank adapters."""

from collections.abc import Callable, Iterator

from rlgraph.costs import limits
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.layer_memory import staging
from rlgraph.costs.model_size import Size, padded
from rlgraph.costs.plan_size import served_bytes
from rlgraph.engines.registry import serving
from rlgraph.ir.plan import ModelPlan
from rlgraph.syntax.model_settings import Lora

SLOTS = 2  # adapters that a server has room for: the version that it generates by, and none (the base alone)


def trained_on_device(size: Size, model: ModelPlan, devices: int) -> int:
    """Return how many parameters with gradients and AdamW's averages each of so many devices holds in shards:
    whole rows of each tensor."""
    assert model.train
    if model.frozen or not model.train.lora:
        return 0 if model.frozen else size.on_device(devices)
    return adapters_on_device(size, model.train.lora, devices)


def adapters_on_device(size: Size, lora: Lora, devices: int) -> int:
    """Return the same of low-rank adapters, and of a new value head, which trains whole."""
    added = sum(count * padded(adapter_tensors(size, lora, at), devices) for at, count in size.unlike.items())
    return (added + (padded(size.head_tensors, devices) if size.head == "value" else 0)) // devices


def served_alone(model: ModelPlan) -> Lora | None:
    """Return the adapter that syncs of a model bring alone; None where they bring all weights."""
    return model.train.lora if model.train and model.serve and model.serve.lora == "adapter" else None


def adapter_sizes(size: Size, lora: Lora) -> list[int]:
    """Return the parameters of each tensor of the adapters, in the model's order."""
    layers = range(size.config.num_hidden_layers)
    return [rows * numbers for index in layers for rows, numbers in adapter_tensors(size, lora, index)]


def served_parts(size: Size, model: ModelPlan) -> Iterator[tuple[str, int]]:
    """Yield the parts of a serve engine that have weights, with their bytes on each of its devices.

    They are ``weights``, which syncs bring; or the ``base``, which none does, and room for ``adapters``: for
    slots of them or, where the engine merges them, for what they change without them.
    """
    assert model.serve
    width, lora = WIDTH[model.serve.dtype], served_alone(model)
    held = served_bytes(size, model.serve, width)
    yield "base" if lora else "weights", -(-held // model.serve.tensor_parallel)
    if lora:
        merges = serving(model.serve).merges_adapters
        room = _adapted_numbers(size, lora) if merges else SLOTS * sum(adapter_sizes(size, lora))
        yield "adapters", room * width


def syncing_alone(size: Size, model: ModelPlan) -> int:
    """Return the bytes of a sync that brings an adapter alone: gathered, laid into a buffer and, where the
    engine does so, merged; 0 of other syncs."""
    assert model.serve
    lora = served_alone(model)
    if not lora:
        return 0
    merges = serving(model.serve).merges_adapters
    merge = 3 * MASTER * _largest_adapted(size, lora) if merges else 0
    return 2 * sum(adapter_sizes(size, lora)) * WIDTH[model.serve.dtype] + merge


def adapter_tensors(size: Size, lora: Lora, index: int) -> list[tuple[int, int]]:
    """Return the rows and the numbers per row of each tensor in the adapters of a decoder layer.

    Each linear layer that has one has ``[rank, inputs]`` and ``[outputs, rank]``; experts have a rank each.
    """
    chosen = adapted_layers(size, lora)
    linear = [shape for name, shape in size.config.linear(index).items() if name in chosen]
    return _factors(linear, lora.rank) + expert_adapters(size, lora, index)


def expert_adapters(size: Size, lora: Lora, index: int) -> list[tuple[int, int]]:
    """Return those of ``adapter_tensors`` that are of experts: A and B of each weight."""
    chosen = adapted_layers(size, lora)
    experts = [shape for name, shape in size.config.expert_linear(index).items() if name in chosen]
    return _factors(experts, lora.rank * size.config.experts)


def _factors(shapes: list[tuple[int, int]], rank: int) -> list[tuple[int, int]]:
    return [factor for rows, inputs in shapes for factor in ((rank, inputs), (rows, rank))]


def kept_of_experts(size: Size, lora: Lora, tokens: int) -> int:
    """Return the numbers that stay of a layer's experts' adapters for the backward pass of so many tokens:
    what A makes of them, and B in the order of experts, which is a copy."""
    factors = max((expert_adapters(size, lora, index) for index in size.unlike), key=len)
    narrow = tokens * size.config.num_experts_per_tok * lora.rank * (len(factors) // 2)
    return narrow + padded(factors[1::2], 1)


def unadapted_runs(size: Size, lora: Lora) -> set[tuple[tuple[int, int], ...]]:
    """Return a model's tensors in runs between adapters: each that has one is the last of its run, and so is
    the last tensor of experts that have some.

    Tensors are as of ``Config.tensors``.
    """
    layers, chosen = _any_layer(size, size.config.linear), adapted_layers(size, lora)
    runs = [list[tuple[int, int]]()]
    adapted = {layers[name] for name in chosen & layers.keys()}
    if chosen - layers.keys():
        adapted |= {size.config.fused(at)[-1] for at in size.unlike if size.config.is_sparse(at)}
    for tensor in size.tensors:
        runs[-1].append(tensor)
        if tensor in adapted:
            runs.append([])
    return {tuple(run) for run in runs}


def merging(size: Size, lora: Lora, width: int, devices: int) -> int:
    """Return the bytes of adapters and of what they are merged into, in numbers of ``width`` bytes.

    A merge in float32, of a linear layer or an expert, takes two products and a sum beside its weight and the
    one before, the embedding at first. The weights of a layer's experts wait for all their adapters.
    """
    largest = _largest_adapted(size, lora)
    embedding, first, *_ = size.numbers
    beside = ((first, embedding), (largest, largest))
    needed = [one * (width + 3 * MASTER) + before * width for one, before in beside]
    for index in size.unlike:
        if factors := tuple(expert_adapters(size, lora, index)):
            waiting = width * padded(size.config.fused(index), 1)
            needed.append(waiting + staging(factors, devices, MASTER, limits.BUCKET))
    return max(needed)


def adapted_layers(size: Size, lora: Lora) -> frozenset[str]:
    """Return the names of the linear layers that have adapters, and of those of experts."""
    layers, wanted = _any_layer(size, size.config.linear), lora.targets
    if wanted == "all-linear":
        return frozenset(layers)
    return frozenset(wanted) & (layers.keys() | _any_layer(size, size.config.expert_linear).keys())


def _largest_adapted(size: Size, lora: Lora) -> int:
    """Return the parameters of the largest linear layer, or expert, that has an adapter."""
    layers = _any_layer(size, size.config.linear) | _any_layer(size, size.config.expert_linear)
    return max((layers[name][0] * layers[name][1] for name in adapted_layers(size, lora)), default=0)


def _adapted_numbers(size: Size, lora: Lora) -> int:
    """Return the parameters of all weights that have adapters."""
    config, chosen = size.config, adapted_layers(size, lora)
    total = 0
    for at, count in size.unlike.items():
        for layers, copies in ((config.linear(at), 1), (config.expert_linear(at), config.experts)):
            numbers = sum(rows * inputs for name, (rows, inputs) in layers.items() if name in chosen)
            total += count * copies * numbers
    return total


def _any_layer(size: Size, linear: Callable[[int], dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers, or those of an expert, that some decoder layer has."""
    return {name: shape for index in size.unlike for name, shape in linear(index).items()}
