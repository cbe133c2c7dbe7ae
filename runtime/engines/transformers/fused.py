"""A Llama-like model's forward in fewer and larger operations, for small models on the CPU.

Starting operations takes a good part of what a step of decoding with a small model takes. Here projections of
the same input are one matrix product, of which the parameters are views, and norms and rotary embeddings are
half as many operations as in transformers.

Covers: the families of ``FAMILIES``, whose forward this is, with full attention, in float32 on the CPU. Every
other model runs its own.

Shapes: rows (prompts, or running samples), length (tokens of a row in this forward: 1 in decoding), hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from rlgraph.runtime.engines.transformers.kv_cache import SlotCache

FAMILIES = ("llama", "qwen2", "qwen3")


def fused(model: PreTrainedModel, joins: bool = True) -> Fused | None:
    """Return the model's forward over its parameters; None where not covered.

    Where it ``joins`` projections of the same input, their parameters become views of one. Where another
    model reads the same memory, or layers have adapters, each layer computes its own.
    """
    family = model.config.model_type
    if family not in FAMILIES or type(model).__module__ != f"transformers.models.{family}.modeling_{family}":
        return None
    layer_types = getattr(model.config, "layer_types", None) or ["full_attention"]
    if {*layer_types} != {"full_attention"}:
        return None
    for parameter in model.parameters():
        if parameter.dtype != torch.float32 or not parameter.is_cpu:
            return None
    return Fused(model, joins)


class Fused:
    """The fused forward of a model."""

    def __init__(self, model: Any, joins: bool = True) -> None:
        decoder = model.model
        self.embed = decoder.embed_tokens
        self.rotary = decoder.rotary_emb
        self.head = model.lm_head
        self.layers = [_Layer(layer, joins) for layer in decoder.layers]
        self.norm = _Norm(decoder.norm)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: SlotCache,
        last: Tensor | None = None,
    ) -> Tensor:
        """Return the logits ``[rows, vocabulary]`` after the last token of each row.

        Args:
            tokens: int64 ``[rows, length]``.
            positions: int64 ``[rows or 1, length]``.
            mask: what to add to attention scores ``[rows, 1, 1, width]``; None to see all before it.
            cache: aimed at where keys and values go.
            last: int64 ``[rows]``, which token of a row is its last; None where rows have one.
        """
        hidden = self.embed(tokens)
        cos, sin = (table[:, :, None] for table in self.rotary(hidden, positions))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer, slots in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, cos, sin, mask, slots)
        final = hidden[:, 0] if last is None else hidden[torch.arange(len(hidden)), last]
        logits: Tensor = self.head(self.norm(final))
        return logits


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, joins: bool) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self.size = attention.head_dim
        self.scaling = attention.scaling
        self.keys = attention.k_proj.out_features // self.size  # there are as many values
        self.queries = attention.q_proj.out_features // self.size
        self.is_first = _Norm(layer.input_layernorm)
        self.second = _Norm(layer.post_attention_layernorm)
        names = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self.head_norms = [_Norm(getattr(attention, name)) for name in names]
        side_by_side = _joined if joins else _each
        self.project = side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self.widen = side_by_side(mlp.gate_proj, mlp.up_proj)
        self.out = attention.o_proj
        self.down = mlp.down_proj
        self.activate = mlp.act_fn

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, slots: Any) -> Tensor:
        """Return the hidden states ``[rows, length, hidden]`` behind this layer."""
        projected = self.project(self.is_first(hidden)).unflatten(-1, (-1, self.size))
        turned, values = projected.split((self.queries + self.keys, self.keys), 2)
        queries, keys = self._turned(turned, cos, sin).split((self.queries, self.keys), 2)
        seen_keys, seen_values = slots.update(keys.transpose(1, 2), values.transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            seen_keys,
            seen_values,
            attn_mask=mask,
            is_causal=hidden.shape[1] > 1,
            scale=self.scaling,
            enable_gqa=self.queries != self.keys,
        )
        hidden = self.out(attended.transpose(1, 2).flatten(2)).add_(hidden)
        gate, up = self.widen(self.second(hidden)).chunk(2, -1)
        widened: Tensor = self.down(self.activate(gate).mul_(up))
        return widened.add_(hidden)

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn queries and keys ``[rows, length, heads, size]`` by their positions (arXiv 2104.09864).

        ``sin`` has its first half negated: a turn is then heads * cos + (halves swapped) * sin.
        """
        if self.head_norms:
            parts = heads.split((self.queries, self.keys), 2)
            heads = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], 2)
        return torch.addcmul(heads * cos, heads.roll(self.size // 2, -1), sin)


class _Norm:
    """x / sqrt(mean(x^2) + epsilon), times a weight (RMSNorm, arXiv 1910.07467), over the last dimension."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight
        self.epsilon = torch.tensor(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1])
        return (x * mean.rsqrt_()).mul_(self.weight)


def _joined(*layers: Linear) -> Callable[[Tensor], Tensor]:
    """Return what computes the outputs of linear layers side by side, as one product.

    Their weights and biases are joined, each as one tensor; the layers' own become views of it.
    """
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = _shared([layer.weight for layer in layers])
    bias = _shared(biases) if biases else None
    return lambda inputs: F.linear(inputs, weight, bias)


def _each(*layers: Linear) -> Callable[[Tensor], Tensor]:
    """Return what computes the outputs of linear layers side by side, as each layer does by itself."""
    return lambda inputs: torch.cat([layer(inputs) for layer in layers], -1)


def _shared(parts: Sequence[Tensor]) -> Tensor:
    weights = torch.cat([part.data for part in parts])
    for part, view in zip(parts, weights.split([len(part) for part in parts]), strict=True):
        part.data = view
    return weights
