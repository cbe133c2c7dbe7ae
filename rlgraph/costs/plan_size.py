"""Sizes of models as a plan has them, and of the parts of devices that divide every decoder layer, or the
experts of a mixture."""

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

from rlgraph.costs import limits
from rlgraph.costs.dtypes import WIDTH
from rlgraph.costs.model_size import Size, padded, size_of
from rlgraph.engines.sglang_options import FP8_BLOCK
from rlgraph.errors import GraphError
from rlgraph.ir.plan import ModelPlan, Plan, ServePlan

SCALE = 4  # bytes of the scale of a block of 8-bit weights
# bytes that a sync of bfloat16 weights has to send at a learning rate, of all: the demo's GRPO, two optimizer
# steps per iteration (benchmarks/results/2026-11-26.md)
SENT = ((1e-6, 0.042), (3e-6, 0.103), (1e-5, 0.258), (2e-4, 0.997))


def planned_size(model: ModelPlan) -> Size:
    """Return the size of a model as its plan has it.

    Raises:
        GraphError: it is not known.
    """
    size = size_of(model.path, model.head, model.config)
    return with_experts_divided(size, model.train.expert_parallel) if model.train else size


def known_sizes(plan: Plan) -> dict[str, Size | None]:
    """Return the size of each of a plan's models; None where it is not known."""
    return {name: _known_size(model) for name, model in plan.models.items()}


def _known_size(model: ModelPlan) -> Size | None:
    try:
        return planned_size(model)
    except GraphError:
        return None


def attention_share(models: Mapping[str, ModelPlan]) -> float:
    """Return the ``Size.attention_share`` by which rows are balanced: that of the largest model that trains
    or scores; 0, so that tokens alone count, where the size of none is known."""
    largest: Size | None = None
    for model in models.values():
        size = _known_size(model) if model.train else None
        if size and (largest is None or size.multiplied > largest.multiplied):
            largest = size
    return largest.attention_share if largest else 0.0


def sent_share(model: ModelPlan) -> float:
    """Return the share of its weights' bytes that an iteration changes, with the places of what changed.

    It goes by the learning rate, as measured, beside and between the measured ones by its logarithm. Weights
    that are served in float32 change all.
    """
    assert model.serve
    if WIDTH[model.serve.dtype] > 2 or not model.optimizer:
        return 1.0
    rate = model.optimizer.lr
    for (low_rate, low_share), (high_rate, high_share) in pairwise(SENT):
        if rate <= high_rate:
            position = math.log(rate / low_rate, high_rate / low_rate)  # 0 at the low rate, 1 at the high one
            return low_share * math.exp(math.log(high_share / low_share) * position)
    return 1.0


@lru_cache(maxsize=256)
def with_experts_divided(size: Size, ranks: int) -> Size:
    """Return the same size of a model whose experts so many devices divide."""
    if ranks == 1:
        return size
    divided = Size(size.config, size.head)
    divided.divided = ranks
    return divided


@lru_cache(maxsize=1024)
def largest_layer(size: Size, devices: int) -> int:
    """Return the numbers of the largest decoder layer as it is gathered from so many devices."""
    layers = []
    for index in size.unlike:
        layers.append(padded(size.config.tensors(index), devices) - _elsewhere_in_layer(size, index, devices))
    return max(layers)


@lru_cache(maxsize=1024)
def elsewhere(size: Size, devices: int) -> int:
    """Return the numbers of experts that a device never gathers, out of all on so many devices.

    Example:
        >>> mixture = with_experts_divided(size_of("Qwen/Qwen3-30B-A3B"), 8)
        >>> elsewhere(mixture, 1) == 48 * 3 * 768 * 2048 * (128 - 16)
        True
    """
    return sum(count * _elsewhere_in_layer(size, index, devices) for index, count in size.unlike.items())


def _elsewhere_in_layer(size: Size, index: int, devices: int) -> int:
    if size.divided == 1:
        return 0
    experts = size.config.fused(index)
    gathered = [(rows // size.divided, numbers) for rows, numbers in experts]
    sharers = max(1, devices // size.divided)  # devices that hold the same experts
    return padded(experts, devices) - padded(gathered, sharers)


def is_small(size: Size) -> bool:
    """Return whether a device gathers the whole model at once, and keeps it for the length of a call."""
    return size.parameters - elsewhere(size, 1) <= limits.SMALL


@lru_cache(maxsize=256)  # a search asks this very often
def part_of(size: Size, ranks: int) -> Size:
    """Return the size of one of so many parts: some heads, and a part of the MLP's width, of every layer.

    Embeddings, norms, router and head are whole.

    Example:
        >>> from rlgraph.costs.model_size import size_of
        >>> eight = size_of("Qwen/Qwen3-8B")
        >>> norms = 2 * 4096 + 2 * 128
        >>> 4 * (part_of(eight, 4).layers[0] - norms) == eight.layers[0] - norms
        True
    """
    if ranks == 1:
        return size
    config = size.config
    fields = {
        "num_attention_heads": config.num_attention_heads // ranks,
        "num_key_value_heads": config.key_heads // ranks,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size // ranks,
    }
    return Size(config.model_copy(update=fields), size.head)


def served_bytes(size: Size, serve: ServePlan, width: int) -> int:
    """Return the bytes of the weights on all devices of a server, of ``width`` per number unless they are
    quantized. Each copy of attention has the embedding too."""
    config = size.config
    attention = 2 * config.hidden_size * (config.queries + config.keys) * config.num_hidden_layers
    copies, layers = serve.attention_replicas - 1, sum(size.layers)
    parameters = size.parameters + copies * (attention + size.embedding)
    if not serve.quantization:
        return parameters * width
    linear = layers + copies * attention  # norms, biases and routers are next to nothing
    return linear + linear * SCALE // FP8_BLOCK**2 + (parameters - linear) * width


def cache_on_device(size: Size, serve: ServePlan, width: int) -> int:
    """Return the bytes of a server's cache on each of its devices, in numbers of ``width`` bytes.

    A device holds the keys and values of some heads, of one at least, for what its copy of attention serves.
    """
    copies = serve.attention_replicas
    cache = int(serve.cache_tokens) // copies * size.kv_bytes(width)
    cache += -(-serve.max_rows // copies) * size.state_bytes(width)
    return -(-cache // min(serve.tensor_parallel // copies, size.config.cache_heads))
