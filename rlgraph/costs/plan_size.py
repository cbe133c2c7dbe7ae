"""Sizes of models as a plan has them, and of the parts of devices that divide every decoder layer."""

from __future__ import annotations

from functools import lru_cache

from rlgraph.costs.model_size import Size, size_of
from rlgraph.engines.sglang_options import FP8_BLOCK
from rlgraph.ir.plan import ModelPlan, ServePlan

SCALE = 4  # bytes of the scale of a block of 8-bit weights


def planned_size(model: ModelPlan) -> Size:
    """Return the size of a model as its plan has it.

    Raises:
        GraphError: it is not known.
    """
    return size_of(model.path, model.head, model.config)


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
