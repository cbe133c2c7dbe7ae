"""The tensors of a decoder layer follow from the fields of a model's ``config.json``.

Covers Llama, Mistral, Qwen2, Qwen3, and mixtures of experts as Qwen3-MoE and Mixtral have them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlgraph.syntax.settings import Count, Natural

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
        whole = sum(rows * numbers for rows, numbers in self.tensors(index))
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
