"""Derives the tensors of a decoder layer, as transformers has them, from a model's ``config.json``.

Covers Llama, Mistral, Qwen2, Qwen3, Phi 3 and 4, OLMo 2 and 3, GLM 4, Gemma 2 and the text of Gemma 3;
mixtures of experts: Qwen3-MoE, Mixtral, GLM 4.5, gpt-oss; DeepSeek V3 with its latent attention (arXiv
2412.19437), and Qwen3-Next with its linear attention (Gated DeltaNet, arXiv 2412.06464).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rlgraph.costs.models.fields import Fields
from rlgraph.syntax.model_settings import EXPERTS

# families in which one layer of so many sees all tokens
INTERVALS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4, "gpt_oss": 2, "qwen3_next": 4}
WINDOWED = ("mistral", "mixtral", "phi3")  # all layers have the window, if there is one
ROUTED_FIRST = ("mixtral", "gpt_oss", "qwen3_next")  # a router comes before its experts


class Tensor(NamedTuple):
    """A tensor of a decoder layer; the weight of a linear layer has its ``name``."""

    rows: int
    numbers: int  # per row
    name: str = ""


class Config(Fields):
    """A model's configuration, and the shapes that follow from it."""

    @property
    def queries(self) -> int:
        """Return the width of all query heads."""
        return self.num_attention_heads * self.head_size

    @property
    def keys(self) -> int:
        """Return the width of all key heads."""
        return self.key_heads * self.head_size

    @property
    def values(self) -> int:
        """Return the width of all value heads."""
        return self.key_heads * self.value_size

    @property
    def outputs(self) -> int:
        """Return the width of what attention puts out: of all values, once per query head."""
        return self.num_attention_heads * self.value_size

    @property
    def value_size(self) -> int:
        """Return the width of a value head."""
        return self.v_head_dim if self.latent else self.head_size

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        if self.latent:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def latent(self) -> bool:
        """Return whether keys and values are kept as a latent vector, which all heads share."""
        return self.kv_lora_rank > 0

    @property
    def cached(self) -> int:
        """Return the numbers that a layer keeps of each token that it sees."""
        if self.latent:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.keys

    @property
    def cache_heads(self) -> int:
        """Return over how many devices of a serve engine what is kept of a token can be shared out."""
        return 1 if self.latent else self.key_heads

    @property
    def asked(self) -> int:
        """Return the numbers that a generated token multiplies with for a token that it sees: where attention
        is latent, each head's query asks the latent vector itself."""
        if self.latent:
            return self.num_attention_heads * (self.cached + self.kv_lora_rank)
        return self.queries + self.outputs

    @property
    def state(self) -> int:
        """Return the numbers of the state that a layer of linear attention has for a row."""
        return self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim

    @property
    def convolved(self) -> int:
        """Return the width of what a layer of linear attention convolves: queries, keys and values."""
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        return 2 * keys * self.linear_key_head_dim + values * self.linear_value_head_dim

    @property
    def normed(self) -> bool:
        """Return whether queries and keys have norms."""
        always = ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "olmo2", "olmo3")
        return self.model_type in always or self.use_qk_norm

    @property
    def norms(self) -> int:
        """Return how many norms of hidden states a layer has."""
        return 4 if self.model_type in ("gemma2", "gemma3_text", "glm4") else 2

    @property
    def wide_norms(self) -> bool:
        """Return whether norms scale in float32, before their output is as narrow as the rest."""
        return self.model_type in ("gemma2", "gemma3_text", "qwen3_next", "olmo2", "olmo3", "gpt_oss")

    @property
    def experts(self) -> int:
        return self.num_local_experts or self.num_experts

    @property
    def biased_choice(self) -> bool:
        """Return whether routers choose experts by a bias that is in no gate (arXiv 2408.15664)."""
        return self.experts > 0 and self.model_type in ("glm4_moe", "deepseek_v3")

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def shared_size(self) -> int:
        """Return the width of the experts that every token has; 0 where there are none."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.expert_size

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer's attention sees; None: all before; 0: none, it has a state."""
        kind = self._attention_kind(layer)
        if kind == "linear_attention":
            return 0
        return self.sliding_window if kind.startswith("s") else None

    def _attention_kind(self, layer: int) -> str:
        """Return linear_attention, full_attention, or a kind that begins with sliding."""
        if self.layer_types:
            return self.layer_types[layer]
        if self.model_type in WINDOWED:
            return "sliding_attention"
        interval = (
            self.full_attention_interval or self.sliding_window_pattern or INTERVALS.get(self.model_type)
        )
        if not interval or (layer + 1) % interval == 0:
            return "full_attention"
        if self.model_type == "qwen3_next":
            return "linear_attention"
        return "sliding_attention"

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer's MLP is a mixture of experts."""
        if self.model_type in ("mixtral", "gpt_oss"):
            return True
        dense_layers = self.mlp_only_layers or []
        if not self.experts or layer in dense_layers:
            return False
        if layer < self.first_k_dense_replace:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    def layer(self, index: int, active: bool = False) -> int:
        """Return the parameters of one decoder layer; ``active``: those that one token multiplies with."""
        total = sum(rows * numbers for rows, numbers in self.tensors(index))
        if not active or not self.is_sparse(index):
            return total
        per_expert = sum(tensor.numbers for tensor in self._experts)
        return total - (self.experts - self.num_experts_per_tok) * per_expert

    def passing(self, index: int) -> int:
        """Return the numbers per token that one decoder layer reads and writes in a forward pass, beside its
        weights: those that go into and come out of each norm, linear layer, attention, gate and sum.

        In a mixture the rows of a token are copied for each expert that it chose, and summed in the end.
        """
        hidden = self.hidden_size
        norms_and_sums = 2 * (2 * hidden + 3 * hidden)
        projected = self.queries + self.keys + self.values
        rotated = 2 * (self.queries + self.keys)
        attention = hidden + projected + rotated + projected + 2 * self.outputs + hidden
        if not self.is_sparse(index):
            return norms_and_sums + attention + 2 * hidden + 6 * self.intermediate_size
        routed = self.num_experts_per_tok * (5 * hidden + 6 * self.expert_size)
        router = hidden + self.experts
        shared = 2 * hidden + 6 * self.shared_size if self.shared_size else 0
        return norms_and_sums + attention + router + routed + 2 * hidden + shared

    def tensors(self, index: int) -> list[tuple[int, int]]:
        """Return the rows of each tensor of one decoder layer in transformers, and the numbers per row."""
        return _shapes(self._layer(index, self._experts))

    def fused(self, index: int) -> list[tuple[int, int]]:
        """Return those of ``tensors`` that have a row per expert."""
        if not self.is_sparse(index):
            return []
        return _shapes(self._experts)

    def weights(self, index: int) -> list[tuple[int, int]]:
        """Return ``tensors``, but with each expert's weights on their own, as a checkpoint has them."""
        if self.model_type == "gpt_oss":  # its checkpoints have fused experts too
            return self.tensors(index)
        hidden, inner, count = self.hidden_size, self.expert_size, self.experts
        gates_and_ups = [Tensor(inner, hidden)] * 2 * count
        downs = [Tensor(hidden, inner)] * count
        return _shapes(self._layer(index, [*gates_and_ups, *downs]))

    def unfused(self, index: int) -> list[tuple[int, int]]:
        """Return ``weights``, but with each matrix of fused experts on its own too."""
        if self.model_type != "gpt_oss":
            return self.weights(index)
        of_expert = [
            Tensor(self.hidden_size, 2 * self.expert_size),
            Tensor(self.expert_size, self.hidden_size),
        ]
        return _shapes(self._layer(index, [*of_expert * self.experts, *self._expert_biases]))

    def no_matrices(self, index: int) -> list[tuple[int, int]]:
        """Return the tensors of a layer that have several numbers per row but are not matrices.

        They are biases of experts, and convolutions.
        """
        tensors = [*self._expert_biases]
        if self.window(index) == 0:
            tensors.append(Tensor(self.convolved, self.linear_conv_kernel_dim))
        return _shapes(tensors)

    def linear(self, index: int) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of a layer's linear layers that can have adapters, by name.

        In a mixture of experts only those of softmax attention can.
        """
        window = self.window(index)
        tensors: list[Tensor] = []
        if window != 0 or not self.experts:
            tensors += self._attention(window)
        if not self.experts:
            tensors += self._mlp(False, ())
        named = [tensor for tensor in tensors if tensor.name]
        return {tensor.name: (tensor.rows, tensor.numbers) for tensor in named}

    def expert_linear(self, index: int) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of the linear layers of one expert of a layer.

        Their names are those in the targets of adapters, where gate and up are one.
        """
        if not self.is_sparse(index):
            return {}
        hidden, inner = self.hidden_size, self.expert_size
        return {
            f"{EXPERTS}gate_up_proj": (2 * inner, hidden),
            f"{EXPERTS}down_proj": (hidden, inner),
        }

    def _layer(self, index: int, experts: Iterable[Tensor]) -> Iterator[Tensor]:
        yield from self._attention(self.window(index))
        yield from self._mlp(self.is_sparse(index), experts)
        yield from [Tensor(self.hidden_size, 1)] * self.norms

    def _attention(self, window: int | None) -> Iterator[Tensor]:
        if window == 0:
            return self._linear_attention()
        if self.latent:
            return self._latent_attention()
        return self._softmax_attention()

    def _softmax_attention(self) -> Iterator[Tensor]:
        hidden, queries, keys, family = self.hidden_size, self.queries, self.keys, self.model_type
        biased = self.attention_bias or family == "qwen2"
        if family == "phi3":
            yield Tensor(hidden, queries, "o_proj")
            yield Tensor(queries + 2 * keys, hidden, "qkv_proj")
            return
        if family == "gpt_oss":  # sinks
            yield Tensor(self.num_attention_heads, 1)
        gates = 2 if family == "qwen3_next" else 1
        yield from _linear("q_proj", gates * queries, hidden, biased)
        yield from _linear("k_proj", keys, hidden, biased)
        yield from _linear("v_proj", keys, hidden, biased)
        has_output_bias = biased and family not in ("qwen2", "glm4", "glm4_moe")
        yield from _linear("o_proj", hidden, queries, has_output_bias)
        if not self.normed:
            return
        if family in ("olmo2", "olmo3"):  # norms of all heads together
            yield Tensor(queries, 1)
            yield Tensor(keys, 1)
        else:
            yield from [Tensor(self.head_size, 1)] * 2

    def _latent_attention(self) -> Iterator[Tensor]:
        hidden, rank, biased = self.hidden_size, self.q_lora_rank, self.attention_bias
        if rank:
            yield from _linear("q_a_proj", rank, hidden, biased)
            yield Tensor(rank, 1)
            yield Tensor(self.queries, rank, "q_b_proj")
        else:
            yield Tensor(self.queries, hidden, "q_proj")
        yield from _linear("kv_a_proj_with_mqa", self.cached, hidden, biased)
        yield Tensor(self.kv_lora_rank, 1)
        heads = self.num_attention_heads
        yield Tensor(heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank, "kv_b_proj")
        yield from _linear("o_proj", hidden, self.outputs, biased)

    def _linear_attention(self) -> Iterator[Tensor]:
        hidden, heads = self.hidden_size, self.linear_num_value_heads
        values = heads * self.linear_value_head_dim
        yield from [Tensor(heads, 1)] * 2
        yield Tensor(self.convolved, self.linear_conv_kernel_dim)
        yield Tensor(self.convolved + values, hidden, "in_proj_qkvz")
        yield Tensor(2 * heads, hidden, "in_proj_ba")
        yield Tensor(self.linear_value_head_dim, 1)
        yield Tensor(hidden, values, "out_proj")

    def _mlp(self, sparse: bool, experts: Iterable[Tensor]) -> Iterator[Tensor]:
        if not sparse:
            yield from self._dense(self.intermediate_size)
            return
        router = _linear("", self.experts, self.hidden_size, self.model_type == "gpt_oss")
        if self.model_type in ROUTED_FIRST:
            yield from (*router, *experts)
        else:
            yield from (*experts, *router)
        if self.shared_size:
            yield from self._dense(self.shared_size)
        if self.model_type == "qwen3_next":
            yield Tensor(1, self.hidden_size)

    @property
    def _experts(self) -> list[Tensor]:
        """Return the tensors into which a layer's experts are fused."""
        count, hidden, inner = self.experts, self.hidden_size, self.expert_size
        up, down = Tensor(count, 2 * inner * hidden), Tensor(count, inner * hidden)
        if not self._expert_biases:
            return [up, down]
        up_bias, down_bias = self._expert_biases
        return [up, up_bias, down, down_bias]

    @property
    def _expert_biases(self) -> list[Tensor]:
        if self.model_type != "gpt_oss":
            return []
        return [Tensor(self.experts, 2 * self.expert_size), Tensor(self.experts, self.hidden_size)]

    def _dense(self, inner: int) -> Iterator[Tensor]:
        hidden, biased = self.hidden_size, self.mlp_bias
        if self.model_type in ("phi3", "glm4"):
            yield Tensor(2 * inner, hidden, "gate_up_proj")
        else:
            yield from _linear("gate_proj", inner, hidden, biased)
            yield from _linear("up_proj", inner, hidden, biased)
        yield from _linear("down_proj", hidden, inner, biased)


def _linear(name: str, rows: int, inputs: int, biased: bool) -> Iterator[Tensor]:
    yield Tensor(rows, inputs, name)
    if biased:
        yield Tensor(rows, 1)


def _shapes(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.rows, tensor.numbers) for tensor in tensors]
