"""What a model weighs, from the fields of its ``config.json``: no weights, no hub, no torch.

Covers decoders with grouped-query attention and gated MLPs: Llama, Mistral, Qwen2, Qwen3, and mixtures of
experts as Qwen3-MoE and Mixtral have them. Not covered: shared experts, latent attention, vision towers.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlgraph.errors import GraphError, fail, nearest
from rlgraph.sections import Count, Natural
from rlgraph.source import OPEN, Tree, read
from rlgraph.validate import Binder, validate

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
        """Width of all query heads."""
        return self.num_attention_heads * self._head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, which is that of the value heads."""
        return (self.num_key_value_heads or self.num_attention_heads) * self._head_dim

    @property
    def _head_dim(self) -> int:
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
        """Whether a layer's MLP is a mixture of experts."""
        if self.model_type == "mixtral":
            return True
        if self.model_type != "qwen3_moe" or layer in self.mlp_only_layers:
            return False
        return self.experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    def attention(self) -> int:
        """Parameters of one layer's attention, its biases and query-key norms included."""
        weights = 2 * self.hidden_size * (self.queries + self.keys)
        if self.model_type == "qwen2" or self.attention_bias:
            weights += self.queries + 2 * self.keys
        if self.attention_bias and self.model_type != "qwen2":
            weights += self.hidden_size
        return weights + (2 * self._head_dim if self.model_type.startswith("qwen3") else 0)

    def mlp(self, sparse: bool, active: bool = False) -> int:
        """Parameters of one layer's MLP; ``active``: of those, what one token multiplies with."""
        if not sparse:
            bias = 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
            return 3 * self.hidden_size * self.intermediate_size + bias
        chosen = self.num_experts_per_tok if active else self.experts
        return chosen * 3 * self.hidden_size * self.expert_size + self.experts * self.hidden_size

    def layer(self, index: int, active: bool = False) -> int:
        """Parameters of one decoder layer with its two norms."""
        return self.attention() + self.mlp(self.is_sparse(index), active) + 2 * self.hidden_size


class Size:
    """Counts of one model. ``head`` is ``lm``, or ``value`` for one number a token (a bias with it)."""

    def __init__(self, config: Config, head: str = "lm") -> None:
        self.config, self.head = config, head
        layers = range(config.num_hidden_layers)
        self.embedding = config.vocab_size * config.hidden_size
        self.layers = [config.layer(index) for index in layers]
        self.active_layers = [config.layer(index, active=True) for index in layers]

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not the embedding's."""
        if self.head == "value":
            return self.config.hidden_size + 1
        return 0 if self.config.tie_word_embeddings else self.embedding

    @property
    def root(self) -> int:
        """Parameters outside the decoder layers: embedding, last norm, head."""
        return self.embedding + self.config.hidden_size + self.head_parameters

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.root + sum(self.layers)

    @property
    def multiplied(self) -> int:
        """N of ``2 N FLOPs a token``: what one token multiplies with; a look-up in the embedding is none."""
        head = self.embedding if self.head == "lm" else self.head_parameters
        return sum(self.active_layers) + head

    def touched(self, rows: float) -> float:
        """Parameters that a decode step of ``rows`` tokens reads: of a mixture, those of chosen experts."""
        config = self.config
        whole, active = sum(self.layers), sum(self.active_layers)
        if whole == active:
            return self.multiplied
        chosen = config.num_experts_per_tok / config.experts
        experts = (whole - active) / (1 - chosen)
        idle: float = (1 - chosen) ** rows
        return self.multiplied - experts * chosen + experts * (1 - idle)

    @property
    def vocabulary(self) -> int:
        """Numbers that come out for a token."""
        return self.config.vocab_size if self.head == "lm" else 1

    def kv_bytes(self, width: int) -> int:
        """Bytes of keys and values of one token, in numbers of ``width`` bytes.

        Example:
            >>> size_of("Qwen/Qwen2.5-7B").kv_bytes(2) / 2**10
            56.0
        """
        return 2 * self.config.num_hidden_layers * self.config.keys * width

    def attention_flops(self, length: float) -> float:
        """Forward FLOPs of causal attention in one sequence: 2 s^2 heads head_dim layers."""
        return 2 * length**2 * self.config.queries * self.config.num_hidden_layers


def size_of(path: str, head: str = "lm") -> Size:
    """The size of a model: of a folder with a ``config.json``, or of a card by its hub name.

    Raises:
        GraphError: neither is there, or the configuration is of a kind that is not covered.
    """
    return Size(_config(path), head)


def _config(path: str) -> Config:
    file = Path(path) / "config.json"
    if file.is_file():
        return _checked(read(file), str(file))
    name = MATH.sub("2.5-", TWINS.sub("", path))
    card = _cards().get(name)
    if card is None:
        raise _unknown(path)
    return _checked(card, name)


def _checked(tree: Tree, name: str) -> Config:
    binder = Binder()
    kind = tree.items.get("model_type")
    untold = UNTOLD.get(str(kind.plain()), {}) if kind else {}
    whole = Tree(
        {**{field: Tree(value, tree.mark) for field, value in untold.items()}, **tree.items}, tree.mark
    )
    found = validate(Config, whole, name, binder)
    if not isinstance(found, Config) or binder.problems:
        raise GraphError(binder.problems)
    return found


@cache
def _cards() -> Tree:
    return read(CARDS)


def known_models() -> tuple[str, ...]:
    """The hub names that have a card."""
    return tuple(_cards().items)


def _unknown(path: str) -> GraphError:
    if path == OPEN:
        law, remedy = "the model's path is still open", "give it as models.NAME.path=..."
    else:
        law = f"the size of `{path}` is not known: it is no folder with a `config.json`, and no shipped card"
        remedy = (
            nearest(path, known_models()) or "put the model's `config.json` into a folder and give its path"
        )
    return fail("unknown-size", law, None, known_models(), remedy)
