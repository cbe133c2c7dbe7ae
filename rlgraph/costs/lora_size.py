"""Counts the parameters of a model that train: all of them, or those of its low-rank adapters."""

from collections.abc import Callable, Iterator

from rlgraph.costs import limits
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.layer_memory import staging
from rlgraph.costs.model_size import Size, padded
from rlgraph.costs.plan_size import served_bytes
from rlgraph.engines.registry import own_base, serving
from rlgraph.ir.plan import ModelPlan, Plan
from rlgraph.syntax.model_settings import Lora

SLOTS = 2  # adapters that a server has room for: the current version, and none (the base alone)
LinearLayers = dict[str, tuple[int, int]]  # name -> outputs and inputs


def trained_on_device(size: Size, model: ModelPlan, devices: int) -> int:
    """Return how many parameters with gradients and AdamW averages each device holds in shards.

    A shard is whole rows of each tensor.
    """
    assert model.train
    if model.frozen:
        return 0
    if model.train.lora:
        return adapters_on_device(size, model.train.lora, devices)
    return size.on_device(devices)


def adapters_on_device(size: Size, lora: Lora, devices: int) -> int:
    """Return how many parameters of adapters each device holds, and of a value head, which trains whole."""
    total = 0
    for index, count in size.unlike.items():
        total += count * padded(adapter_tensors(size, lora, index), devices)
    if size.head == "value":
        total += padded(size.head_tensors, devices)
    return total // devices


def served_alone(model: ModelPlan) -> Lora | None:
    """Return the adapter if syncs of a model bring only that; None if they bring all weights."""
    if model.train and model.serve and model.serve.lora == "adapter":
        return model.train.lora
    return None


def shares_base(plan: Plan, name: str, pool: str) -> bool:
    """Return whether a model generates on a pool with the frozen weights that its train engine holds there.

    Its serve engine then has an adapter of its own, the version that a sync brought.
    """
    model = plan.models[name]
    if served_alone(model) is None or not plan.serves(name, pool):
        return False
    assert model.train and model.serve
    return model.train.pool == pool and not own_base(model.serve, model.train, plan.meshes[name].shard)


def quantizes(model: ModelPlan) -> bool:
    """Return whether the linear layers of a model that trains an adapter lie in 4 bits."""
    if model.train is None or model.train.lora is None:
        return False
    return model.train.lora.quantize is not None


def four_bit_bytes(size: Size, width: int) -> int:
    """Return the bytes of a model's weights on one device, those of its linear layers in 4 bits.

    All others have ``width`` bytes. Each block of a weight in 4 bits has a scale in float32.
    """
    numbers = 0
    for index, count in size.unlike.items():
        layers = size.config.linear(index).values()
        numbers += count * sum(outputs * inputs for outputs, inputs in layers)
    packed = numbers // 2 + MASTER * numbers // limits.FOUR_BIT_BLOCK
    return (size.on_device(1) - numbers) * width + packed


def dequantized(size: Size, width: int) -> int:
    """Return the bytes of the largest weight in 4 bits, as a layer computes with it."""
    layers = _any_layer(size, size.config.linear).values()
    return width * max(outputs * inputs for outputs, inputs in layers)


def adapter_sizes(size: Size, lora: Lora) -> list[int]:
    """Return the parameters of each tensor of the adapters, in the model's order."""
    sizes = []
    for index in range(size.config.num_hidden_layers):
        sizes += [rows * numbers for rows, numbers in adapter_tensors(size, lora, index)]
    return sizes


def served_parts(size: Size, model: ModelPlan) -> Iterator[tuple[str, int]]:
    """Yield the parts of a serve engine that have weights, with their bytes on each of its devices.

    They are ``weights``, which syncs bring. Or they are the ``base``, which no sync brings, and ``adapters``.
    A ``base`` that the train engine holds is yielded too (``shares_base``).
    """
    assert model.serve
    width, lora = WIDTH[model.serve.dtype], served_alone(model)
    on_device = -(-served_bytes(size, model.serve, width) // model.serve.tensor_parallel)
    if lora is None:
        yield "weights", on_device
        return
    yield "base", on_device
    slots = SLOTS if serving(model.serve).own_servers else 1
    yield "adapters", slots * sum(adapter_sizes(size, lora)) * width


def syncing_alone(size: Size, model: ModelPlan) -> int:
    """Return the bytes that a device takes in a sync that brings only an adapter; 0 for other syncs.

    The adapter is gathered and laid into a buffer.
    """
    assert model.serve
    lora = served_alone(model)
    if lora is None:
        return 0
    return 2 * sum(adapter_sizes(size, lora)) * WIDTH[model.serve.dtype]


def adapter_tensors(size: Size, lora: Lora, index: int) -> list[tuple[int, int]]:
    """Return the rows and the numbers per row of each tensor in the adapters of a decoder layer.

    A linear layer with an adapter has ``[rank, inputs]`` and ``[outputs, rank]``; experts have a rank each.
    """
    shapes = _with_adapters(size, lora, size.config.linear(index))
    return _factors(shapes, lora.rank) + expert_adapters(size, lora, index)


def expert_adapters(size: Size, lora: Lora, index: int) -> list[tuple[int, int]]:
    """Return the part of ``adapter_tensors`` that belongs to experts: A and B of each weight."""
    shapes = _with_adapters(size, lora, size.config.expert_linear(index))
    return _factors(shapes, lora.rank * size.config.experts)


def _with_adapters(size: Size, lora: Lora, layers: LinearLayers) -> list[tuple[int, int]]:
    names = adapted_layers(size, lora)
    return [shape for name, shape in layers.items() if name in names]


def _factors(shapes: list[tuple[int, int]], rank: int) -> list[tuple[int, int]]:
    """Return A and B of each weight."""
    factors = []
    for outputs, inputs in shapes:
        factors += [(rank, inputs), (outputs, rank)]
    return factors


def kept_of_experts(size: Size, lora: Lora, tokens: int) -> int:
    """Return the numbers that a layer keeps of its experts' adapters for the backward pass of some tokens.

    They are what A makes of the tokens, and a copy of B in the order of experts.
    """
    factors = max((expert_adapters(size, lora, index) for index in size.unlike), key=len)
    weights = len(factors) // 2
    products = tokens * size.config.num_experts_per_tok * lora.rank * weights
    return products + padded(factors[1::2], 1)


def unadapted_runs(size: Size, lora: Lora) -> set[tuple[tuple[int, int], ...]]:
    """Return a model's tensors in runs between adapters.

    A tensor with an adapter is the last of its run, and so is the last tensor of experts that have adapters.
    Tensors are as in ``Config.tensors``.
    """
    layers, names = _any_layer(size, size.config.linear), adapted_layers(size, lora)
    ends = {shape for name, shape in layers.items() if name in names}
    experts_have_adapters = not names <= layers.keys()
    if experts_have_adapters:
        for index in size.unlike:
            if size.config.is_sparse(index):
                ends.add(size.config.fused(index)[-1])
    runs = [list[tuple[int, int]]()]
    for tensor in size.tensors:
        runs[-1].append(tensor)
        if tensor in ends:
            runs.append([])
    return {tuple(run) for run in runs}


def merging(size: Size, lora: Lora, width: int, devices: int) -> int:
    """Return the bytes of adapters and of the weights that they are merged into, of ``width`` bytes each.

    A merge in float32, of a linear layer or an expert, takes two products and a sum beside its weight and the
    weight before it, which is the embedding at first. The weights of a layer's experts wait for all of their
    adapters.
    """
    largest = _largest_adapted(size, lora)
    embedding, first_layer, *_ = size.numbers
    needed = [
        first_layer * (width + 3 * MASTER) + embedding * width,
        largest * (width + 3 * MASTER) + largest * width,
    ]
    for index in size.unlike:
        factors = tuple(expert_adapters(size, lora, index))
        if factors:
            waiting = width * padded(size.config.fused(index), 1)
            needed.append(waiting + staging(factors, devices, MASTER, limits.BUCKET))
    return max(needed)


def adapted_layers(size: Size, lora: Lora) -> frozenset[str]:
    """Return the names of the linear layers that have adapters, in decoder layers and in experts."""
    layers = _any_layer(size, size.config.linear)
    if lora.targets == "all-linear":
        return frozenset(layers)
    expert_layers = _any_layer(size, size.config.expert_linear)
    return frozenset(lora.targets) & (layers.keys() | expert_layers.keys())


def _largest_adapted(size: Size, lora: Lora) -> int:
    """Return the parameters of the largest linear layer, or expert, that has an adapter."""
    layers = _any_layer(size, size.config.linear) | _any_layer(size, size.config.expert_linear)
    shapes = [layers[name] for name in adapted_layers(size, lora)]
    return max((outputs * inputs for outputs, inputs in shapes), default=0)


def _any_layer(size: Size, linear: Callable[[int], LinearLayers]) -> LinearLayers:
    """Return the linear layers, or those of an expert, that some decoder layer has."""
    layers: LinearLayers = {}
    for index in size.unlike:
        layers |= linear(index)
    return layers
