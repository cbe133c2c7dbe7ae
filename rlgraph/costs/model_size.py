"""A model's tensors and bytes follow from the fields of its ``config.json``: no weights, no hub, no torch.

Covers Llama, Mistral, Qwen2, Qwen3, and mixtures of experts as Qwen3-MoE and Mixtral have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from rlgraph.costs.limits import buckets
from rlgraph.errors import GraphError, fail, nearest
from rlgraph.syntax.settings import Count, Natural
from rlgraph.syntax.source import OPEN, Tree, read
from rlgraph.syntax.validate import read_record
from rlgraph.variables import with_values

CARDS = Path(__file__).parent / "cards.yaml"
TWINS = re.compile(r"(-(Instruct|Base))?(-2507)?$")  # same shapes as the model without the suffix
MATH = re.compile(r"2\.5-(Math|Coder)-")
Family = Literal["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
UNTOLD: dict[str, dict[str, int]] = {  # the defaults of transformers where config.json says nothing
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


class Config(BaseModel):
    """The fields of a Hugging Face ``config.json`` that decide shapes; the others are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())

    model_type: Family
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_local_experts: Natural = 0
    num_experts: Natural = 0
    num_experts_per_tok: Count = 1
    moe_intermediate_size: Count | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Natural] = Field(default=[])

    @property
    def queries(self) -> int:
        """Return the width of all query heads."""
        return self.num_attention_heads * self.head_size

    @property
    def keys(self) -> int:
        """Return the width of all key heads, or of all value heads."""
        return self.key_heads * self.head_size

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        # Qwen3 (not its mixture) has 128 where nothing is said; the others divide the hidden size
        default = 128 if self.model_type == "qwen3" else self.hidden_size // self.num_attention_heads
        return self.head_dim or default

    @property
    def experts(self) -> int:
        return self.num_local_experts or self.num_experts

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer's MLP is a mixture of experts."""
        if self.model_type == "mixtral":
            return True
        mixes = self.model_type == "qwen3_moe" and self.experts > 0 and layer not in self.mlp_only_layers
        return mixes and (layer + 1) % self.decoder_sparse_step == 0

    def layer(self, index: int, active: bool = False) -> int:
        """Return the parameters of one decoder layer; ``active``: of them, what one token multiplies with."""
        whole = padded(self.tensors(index), 1)
        idle = self.experts - self.num_experts_per_tok if active and self.is_sparse(index) else 0
        return whole - idle * 3 * self.hidden_size * self.expert_size

    def tensors(self, index: int) -> list[tuple[int, int]]:
        """Return the rows of each tensor of one decoder layer in transformers, and the numbers per row."""
        return [*self._attention(), *self._mlp(self.is_sparse(index)), *[(self.hidden_size, 1)] * 2]

    def weights(self, index: int) -> list[tuple[int, int]]:
        """Return ``tensors``, but with each expert's weights by themselves, as a checkpoint has them."""
        if not self.is_sparse(index):
            return self.tensors(index)
        hidden, inner = self.hidden_size, self.expert_size
        experts = [(inner, hidden)] * 2 * self.experts + [(hidden, inner)] * self.experts
        return [*self._attention(), *experts, (self.experts, hidden), *[(hidden, 1)] * 2]

    def _attention(self) -> list[tuple[int, int]]:
        hidden, queries, keys = self.hidden_size, self.queries, self.keys
        qwen2 = self.model_type == "qwen2"
        queried, keyed = (_linear(rows, hidden, qwen2 or self.attention_bias) for rows in (queries, keys))
        output = _linear(hidden, queries, self.attention_bias and not qwen2)
        norms = [(self.head_size, 1)] * 2 if self.model_type.startswith("qwen3") else []
        return [*queried, *keyed, *keyed, *output, *norms]

    def _mlp(self, sparse: bool) -> list[tuple[int, int]]:
        """Return the tensors of an MLP: experts are fused into two tensors, with a router beside them."""
        hidden, inner, size = self.hidden_size, self.intermediate_size, self.expert_size
        if sparse:
            return [(self.experts, 2 * size * hidden), (self.experts, size * hidden), (self.experts, hidden)]
        return 2 * _linear(inner, hidden, self.mlp_bias) + _linear(hidden, inner, self.mlp_bias)


def _linear(rows: int, numbers: int, biased: bool) -> list[tuple[int, int]]:
    return [(rows, numbers), *([(rows, 1)] if biased else [])]


class Size:
    """Counts of one model. ``head`` is ``lm``, or ``value`` for one number per token (a bias with it)."""

    def __init__(self, config: Config, head: str = "lm") -> None:
        self.config, self.head = config, head
        self._shards: dict[int, int] = {}  # the keys are numbers of devices
        self._buckets: dict[tuple[int, bool], int] = {}
        self.embedding = config.vocab_size * config.hidden_size
        self.layers = [config.layer(index) for index in range(config.num_hidden_layers)]
        self.active_layers = [config.layer(index, active=True) for index in range(config.num_hidden_layers)]

    @property
    def head_tensors(self) -> list[tuple[int, int]]:
        """Return the tensors of the head; none where it is tied to the embedding. See ``Config.tensors``."""
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        if self.head == "value":
            return [(1, hidden), (1, 1)]
        return [] if self.config.tie_word_embeddings else [(vocabulary, hidden)]

    @property
    def root_tensors(self) -> list[tuple[int, int]]:
        """Return the tensors of embedding, last norm and head. See ``Config.tensors``."""
        hidden = self.config.hidden_size
        return [(self.config.vocab_size, hidden), (hidden, 1), *self.head_tensors]

    @cached_property
    def tensors(self) -> tuple[tuple[int, int], ...]:
        """Return the tensors of the whole model, in its order. See ``Config.tensors``."""
        embedding, *rest = self.root_tensors
        layers = range(self.config.num_hidden_layers)
        return (embedding, *(tensor for index in layers for tensor in self.config.tensors(index)), *rest)

    @cached_property
    def _unlike_layers(self) -> list[list[tuple[int, int]]]:
        layers = range(self.config.num_hidden_layers)
        return [*{self.config.is_sparse(index): self.config.tensors(index) for index in layers}.values()]

    def largest_layer(self, devices: int) -> int:
        """Return the numbers of the largest decoder layer as it is gathered from so many devices."""
        return max(padded(tensors, devices) for tensors in self._unlike_layers)

    @cached_property
    def numbers(self) -> list[int]:
        """Return the parameters of each tensor."""
        return [rows * numbers for rows, numbers in self.tensors]

    def on_device(self, devices: int) -> int:
        """Return how many parameters each of so many devices holds in shards: whole rows of each tensor."""
        if devices not in self._shards:  # a search asks this millions of times
            self._shards[devices] = padded(self.tensors, devices) // devices
        return self._shards[devices]

    def buckets(self, width: int, fused: bool = True) -> int:
        """Return how many buckets its weights fill with ``width`` bytes per number.

        ``fused``: a layer's experts are two tensors, as they are gathered, not many, as they are sent.
        """
        if (width, fused) not in self._buckets:
            layer = self.config.tensors if fused else self.config.weights
            embedding, *rest = self.root_tensors
            layers = (tensor for index in range(self.config.num_hidden_layers) for tensor in layer(index))
            filled = buckets([embedding, *layers, *rest], lambda tensor: tensor[0] * tensor[1] * width)
            self._buckets[width, fused] = len([*filled])
        return self._buckets[width, fused]

    @property
    def parameters(self) -> int:
        """Return how many parameters it has, tied ones once."""
        return self.on_device(1)

    @property
    def multiplied(self) -> int:
        """Return N of ``2 N FLOPs per token``: what one token multiplies with, without the embedding."""
        head = self.embedding if self.head == "lm" else padded(self.head_tensors, 1)
        return sum(self.active_layers) + head

    def touched(self, rows: float) -> float:
        """Return the parameters that a decode step of ``rows`` tokens reads, with chosen experts alone."""
        config, whole, active = self.config, sum(self.layers), sum(self.active_layers)
        if whole == active:
            return self.multiplied
        chosen = config.num_experts_per_tok / config.experts
        experts = (whole - active) / (1 - chosen)
        idle: float = (1 - chosen) ** rows
        return self.multiplied - experts * chosen + experts * (1 - idle)

    @property
    def vocabulary(self) -> int:
        """Return how many numbers come out for a token."""
        return self.config.vocab_size if self.head == "lm" else 1

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of keys and values of one token, in numbers of ``width`` bytes.

        Example:
            >>> size_of("Qwen/Qwen2.5-7B").kv_bytes(2) / 2**10
            56.0
        """
        return 2 * self.config.num_hidden_layers * self.config.keys * width

    def attention_flops(self, length: float) -> float:
        """Return the forward FLOPs of causal attention in one sequence: 2 s^2 heads head_dim layers."""
        return 2 * length**2 * self.config.queries * self.config.num_hidden_layers

    @property
    def attention_share(self) -> float:
        """Return the work of attention for a token and a column that it sees, over that of the weights."""
        return self.attention_flops(1) / self.multiplied


def padded(tensors: Iterable[tuple[int, int]], devices: int) -> int:
    """Return the numbers of tensors (``Config.tensors``) whose rows are padded to as many per device.

    Example:
        128 experts over 1,024 devices: 7 of 8 devices hold padding alone, and what is gathered is 8 times as
        large.

        >>> padded([(128, 10)], 1024) // (128 * 10)
        8
    """
    return sum(-(-rows // devices) * devices * numbers for rows, numbers in tensors)


def size_of(path: str, head: str = "lm", changed: Mapping[str, Any] | None = None) -> Size:
    """Return the size of a model: of a folder with a ``config.json``, or of a card by its hub name.

    ``changed`` are fields of the configuration that are others (``models.NAME.config``).

    Raises:
        GraphError: neither is there, or the configuration is of a kind that is not covered.
    """
    file = Path(with_values(path)) / "config.json"
    name = MATH.sub("2.5-", TWINS.sub("", with_values(path)))
    fields = tuple((key, value) for key, value in (changed or {}).items() if key in Config.model_fields)
    if file.is_file():
        return _size(str(file), file.absolute(), file.stat().st_mtime_ns, head, fields)
    if name in _cards().items:
        return _size(name, None, 0, head, fields)
    raise _unknown(path)


@lru_cache(maxsize=64)  # a run asks with every layout of rows
def _size(name: str, file: Path | None, _time: int, head: str, fields: tuple[tuple[str, Any], ...]) -> Size:
    return Size(_checked(read(Path(name)) if file else _cards().items[name], name, dict(fields)), head)


def _checked(tree: Tree, name: str, changed: dict[str, Any]) -> Config:
    family = kind.plain() if (kind := tree.items.get("model_type")) else ""
    if kind and family not in get_args(Family):
        law = f"{family}: sizes of models of this type are not known, so memory and times can't be predicted"
        raise fail("unknown-size", f"{law}; plan without --cluster", kind.mark, get_args(Family))
    untold = UNTOLD.get(str(family), {})
    before, after = ({k: Tree(v, tree.mark) for k, v in more.items()} for more in (untold, changed))
    return read_record(Config, Tree({**before, **tree.items, **after}, tree.mark), name)


@cache
def _cards() -> Tree:
    return read(CARDS)


def known_models() -> tuple[str, ...]:
    """Return the hub names that have a card."""
    return tuple(_cards().items)


def _unknown(path: str) -> GraphError:
    law = f"the size of `{path}` is not known: it is no folder with a `config.json`, and no shipped card"
    remedy = nearest(path, known_models()) or "put the model's `config.json` into a folder and give its path"
    if path == OPEN:
        law, remedy = "the model's path is still open", "give it as models.NAME.path=..."
    return fail("unknown-size", law, None, known_models(), remedy)
