"""Bytes that a train engine takes on a device in addition to its shards, moment by moment.

A peak is the largest of all moments: the activations of the whole model are gone by the time that the
gradients of its embeddings are reduced. See docs/cost_model.md. ``benchmarks/memory_fake.py`` compares the
moments with what the engine itself holds.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.layer_memory import Layer, chunk_numbers, logits_bytes, wide_head
from rlgraph.costs.limits import head_rows
from rlgraph.costs.lora_size import (
    adapted_layers,
    adapter_tensors,
    kept_of_experts,
    quantizes,
    trained_on_device,
)
from rlgraph.costs.model_size import Size, padded
from rlgraph.costs.optimizers import extra_step_cost
from rlgraph.costs.plan_size import elsewhere, is_small, largest_layer
from rlgraph.ir.plan import ModelPlan

Moments = dict[str, Counter[str]]
ALONE = 3  # a device alone sums nothing: input, output, and their quotient


@dataclass(frozen=True)
class Pass:
    """One micro-batch through a train engine, all of whose tokens are scored."""

    size: Size
    model: ModelPlan
    devices: int  # over which the model is sharded
    tokens: int  # of the micro-batch that this device reads, padding included
    mask: int = 0  # bytes of the mask of packed rows, if any, and of columns with fixed axes
    replicas: int = 1  # copies of the model, whose gradients are summed
    offloads: bool = False  # whether activations wait on the host
    uneven: float = 1.0  # tokens that reach its experts, over those of an even share

    def score(self) -> Moments:
        """Return the moments of a pass without gradients."""
        inputs = self.mask + self._hidden
        weights = self.root + self.block
        return {
            "start": _parts(self._start, inputs),
            "layer": _parts(weights + self.result, self.mask + self.tokens * self.layer.forward),
            "between layers": _parts(weights + 2 * self.result, inputs + self._hidden),
            "head's gather": _parts(self._head_gather, inputs),
            "logits": _parts(self._scoring, inputs, self._scored(entropy=False)),
        }

    def update(self) -> Moments:
        """Return the moments of a forward and a backward pass, all of them with gradients in shards."""
        weights = self.root + self.block
        activations = self.mask + self._kept + self._hidden
        moments = {
            "start": _parts(self._start, self.mask + self._hidden),
            "between layers": _parts(weights + 2 * self.result, activations),
            "head's gather": _parts(self._head_gather, activations),
            "scores": _parts(self._scoring, activations, self._scored(entropy=True)),
        }
        step = extra_step_cost(self.model)
        if step:
            moments["optimizer step"] = _parts(step.memory(self.size, self.width, self.devices), 0)
        moments |= self._logits() | self._layers()
        if self.adapted is None:
            moments |= self._embeddings()
        gradients = Counter({"gradients": MASTER * trained_on_device(self.size, self.model, self.devices)})
        return {name: sizes + gradients for name, sizes in moments.items()}

    def _logits(self) -> Moments:
        """Return the backward pass of the head: all activations, and what its chunks add up to.

        Over chunks the gradient of the head's weights is summed in float32, beside the gradients of this
        chunk and of the one before. A head that computes in float32 has a copy of its weights in that type,
        and a gradient of the same size per chunk.
        """
        hidden_gradient = self.tokens * self.size.config.hidden_size * MASTER
        activations = self.mask + self._kept + self._hidden + hidden_gradient
        gradient = self.head
        if self._wide and self.head:
            gradient = self._wide_copy
        logits = self._hidden + logits_bytes(
            self.size, self.width, self.tokens, entropy=False, head=self._head_width
        )
        logits_at_gradient = logits
        if self._head_width < MASTER:
            # logits in float32 are gone when the gradient of the weights is computed
            logits_at_gradient -= chunk_numbers(self.size, self.tokens) * MASTER
        weights = self.root + self.result + self.unsharded_gradients + self._wide_copy
        if self.size.head == "lm":
            weights += self.ends
        chunk_rows, _ = head_rows(self.tokens, self.size.vocabulary, self.width)
        if chunk_rows < self.tokens:
            weights += self.head + self.head // self.width * MASTER
        moments = {
            "logits": _parts(weights, activations, logits),
            "head": _parts(weights + gradient, activations, logits_at_gradient),
        }
        if self.ends and self.head:
            reduction = self.result + self._ends_reduced
            moments["head's reduction"] = _parts(reduction, activations, 2 * self._hidden)
        return moments

    def _layers(self) -> Moments:
        """Return the backward pass of the last layer, and of an earlier one during a reduction."""
        in_last_layer = self.mask + self._kept + self._hidden
        layer_kept = self._hidden  # what all layers keep of one
        if not self._recomputes:
            layer_kept = self._kept_of_layer
            in_last_layer -= layer_kept  # the backward pass counts what the layer itself has kept
        in_earlier_layer = in_last_layer
        if not self.offloads:
            in_earlier_layer -= layer_kept
        weights = self.root + self.block + self.result + self.unsharded_gradients
        head_gradients = 0
        if not self.ends:
            weights += self.head
        elif self.head:
            # gradients of a head apart from the root are on their way into shards until the last layer's are
            head_gradients = self._padded_ends * MASTER
        first_gradient = weights + self._first_gradient
        all_gradients = weights + self.width * self._trained(1)
        adapter_factors = self._kept_of_layer - self.tokens * self.layer.kept
        start = self.tokens * self.layer.backward + adapter_factors
        end = self.tokens * self.layer.after_mlp
        return {
            "last layer": _parts(first_gradient + head_gradients, in_last_layer + start),
            "last layer's gradients": _parts(all_gradients + head_gradients, in_last_layer + end),
            "layer": _parts(first_gradient + self.reduced, in_earlier_layer + start),
            "layer's gradients": _parts(all_gradients + self.reduced, in_earlier_layer + end),
        }

    def _embeddings(self) -> Moments:
        """Return the end of the backward pass: gradients of embeddings and head are whole, then reduced."""
        gradients = self.size.embedding * self.width
        if not self.ends:
            gradients += self.head
        weights = self.root + self.unsharded_gradients + self.reduced
        reduction = 0 if self._alone else self._root_reduced
        return {
            "embeddings": _parts(weights + gradients, 2 * self._hidden),
            "reduction": _parts(reduction, 0),
        }

    @property
    def _root_reduced(self) -> int:
        """Return the bytes of the gradients of the root's group while they are reduced."""
        if self._ends_reduced:
            return self._ends_reduced
        if self.unsharded_gradients:
            return 2 * self.unsharded_gradients
        copies = ALONE if self.devices == 1 else 1
        return padded(self.size.root_tensors, self.devices) * (MASTER * copies + self.width)

    @property
    def _ends_reduced(self) -> int:
        """Return the bytes of the gradients of embeddings, or of a head, as they are reduced apart."""
        if not self.ends:
            return 0
        numbers = self._padded_ends
        if self.devices == 1:
            return numbers * MASTER * ALONE
        return numbers * (MASTER + self.width) + numbers // self.devices * MASTER

    @property
    def _padded_ends(self) -> int:
        return padded(self.size.root_tensors[:1], self.devices)

    @cached_property
    def ends(self) -> int:
        """Return the bytes of embeddings, or of a head, gathered; 0 if they belong to the root's group."""
        is_tied = self.size.head == "lm" and not self.size.head_tensors
        if is_tied or self._small or self._alone:
            return 0
        return self.width * self._padded_ends

    @property
    def _start(self) -> int:
        """Return the gathered bytes before the first layer: parameters, and the collective's own buffers."""
        if not self.ends:
            return self.root + self.block + self.root_result + self.result
        if self.devices > 1 or self._casts_shards:
            return self.root + 2 * self.ends
        return self.root + self.ends

    @property
    def _casts_shards(self) -> bool:
        """Return whether a device holds masters, and casts them into a buffer of the computed type."""
        assert self.model.train
        if self.adapted is not None or self.model.train.optimizer_offload:
            return False
        return self.width < MASTER

    @property
    def _scoring(self) -> int:
        """Return the gathered bytes while the head runs forward."""
        if self._gathers_head:
            return self._start
        return self.root + self.result

    @property
    def _head_gather(self) -> int:
        """Return the gathered bytes while the head is gathered: the last layer still has its buffer."""
        if self._gathers_head:
            return self._scoring + self.result
        return self._scoring

    @property
    def _gathers_head(self) -> bool:
        """Return whether a language-model head is gathered apart from the root's group."""
        return self.ends > 0 and self.size.head == "lm"

    @cached_property
    def width(self) -> int:
        assert self.model.train
        return WIDTH[self.model.train.dtype]

    @cached_property
    def adapted(self) -> frozenset[str] | None:
        """Return the linear layers that have adapters; None if the weights of the model train."""
        assert self.model.train
        lora = self.model.train.lora
        return adapted_layers(self.size, lora) if lora else None

    @cached_property
    def layer(self) -> Layer:
        assert self.model.train
        ranks = self.model.train.sequence_parallel
        return Layer(self.size, self.width, self.mask > 0, self.adapted, ranks, self.uneven)

    @cached_property
    def root(self) -> int:
        """Return the bytes of the root's group, gathered.

        It has the last norm and a value head, and embeddings and head that are tied; all of a small model.
        """
        if self._alone:
            return 0
        if self._small:
            on_all_devices = self.size.on_device(self.devices) * self.devices
            numbers = on_all_devices - elsewhere(self.size, self.devices)
            if numbers:
                return self.width * numbers
        tensors = self.size.root_tensors
        if self.ends:
            _, norm, *head = tensors
            tensors = [norm, *head] if self.size.head == "value" else [norm]
        return self.width * padded(tensors, self.devices)

    @cached_property
    def block(self) -> int:
        """Return the bytes of the largest decoder layer with its adapters, gathered apart from the root."""
        if self._small or self._alone:
            return 0
        return self.width * (largest_layer(self.size, self.devices) + self._adapters(self.devices))

    @property
    def root_result(self) -> int:
        """Return the bytes of the collective's own buffer, which parameters are copied from, if any."""
        return self.root if self.devices > 1 else 0

    @property
    def result(self) -> int:
        """Return the same of the group that was gathered last, or in a backward pass comes next."""
        if self.devices == 1:
            return 0
        return self.root if self._small else self.block

    @cached_property
    def reduced(self) -> int:
        """Return the bytes of the gradients of a decoder layer on their way into shards, in float32."""
        if self._small or self._alone:
            return 0
        return MASTER * self._trained(self.devices)

    @cached_property
    def unsharded_gradients(self) -> int:
        """Return the bytes of a small model's gradients, summed over micro-batches in float32 unsharded.

        Those of other models are reduced into shards layer by layer: 0.
        """
        if self._alone or not self._small:
            return 0
        return MASTER * (trained_on_device(self.size, self.model, 1) - elsewhere(self.size, 1))

    @cached_property
    def head(self) -> int:
        """Return the bytes of the gradient of a language-model head; 0 where that does not train."""
        if self.adapted is not None or self.size.head != "lm":
            return 0
        return self.width * self.size.embedding

    @property
    def _small(self) -> bool:
        """Return whether the whole model is gathered at once: by its size, unless the graph says."""
        assert self.model.train
        reshard = self.model.train.reshard
        if reshard is None:
            return is_small(self.size)
        return not reshard

    @property
    def _alone(self) -> bool:
        """Return whether nothing is sharded or summed: a device holds parameters as it computes with them."""
        if self.devices > 1:
            return False
        if self.model.frozen or quantizes(self.model):
            return True
        return self.width == MASTER and self.replicas == 1

    @property
    def _wide(self) -> bool:
        return wide_head(self.model, self.size)

    @property
    def _head_width(self) -> int:
        """Return the bytes of a logit as the head computes it."""
        return MASTER if self._wide else self.width

    @property
    def _wide_copy(self) -> int:
        """Return the bytes of a copy of the head's weights in float32, if it computes with one."""
        return self.size.embedding * MASTER if self._wide else 0

    def _scored(self, entropy: bool) -> int:
        """Return the bytes of a chunk's logits in a forward pass, and of a head's float32 copy."""
        logits = logits_bytes(self.size, self.width, self.tokens, entropy, head=self._head_width)
        return logits + self._wide_copy

    @property
    def _hidden(self) -> int:
        return self.tokens * self.size.config.hidden_size * self.width

    @property
    def _recomputes(self) -> bool:
        assert self.model.train
        return bool(self.model.train.recompute)

    @property
    def _kept(self) -> int:
        """Return the bytes of activations that all layers keep for the backward pass."""
        layers = self.size.config.num_hidden_layers
        if self.offloads:
            layers = 2  # the input of this layer, and the next one, on its way to or from the host
        bytes_of_layer = self._hidden if self._recomputes else self._kept_of_layer
        return layers * bytes_of_layer

    @cached_property
    def _kept_of_layer(self) -> int:
        assert self.model.train
        lora = self.model.train.lora
        nbytes = self.tokens * self.layer.kept
        if lora:
            nbytes += self.width * kept_of_experts(self.size, lora, self.tokens)
        return nbytes

    @property
    def on_host(self) -> int:
        """Return the bytes on the host: an input per layer, each in memory of a power of two."""
        if not self.offloads:
            return 0
        layers = self.size.config.num_hidden_layers
        return layers << (self._hidden - 1).bit_length()

    @property
    def _first_gradient(self) -> int:
        """Return the bytes of the gradient of the weights that come first in a layer's backward pass."""
        config = self.size.config
        if self.adapted is not None or self.layer.permutes:
            return 0
        inner = config.intermediate_size
        if self.layer.sparse:
            experts_on_device = config.experts // self.size.divided
            inner = experts_on_device * config.expert_size
        return self.width * config.hidden_size * inner

    def _trained(self, devices: int) -> int:
        """Return the most numbers of a decoder layer that train."""
        if self.adapted is None:
            return largest_layer(self.size, devices)
        return self._adapters(devices)

    def _adapters(self, devices: int) -> int:
        assert self.model.train
        lora = self.model.train.lora
        if not lora:
            return 0
        layers = [adapter_tensors(self.size, lora, index) for index in self.size.unlike]
        return max(padded(tensors, devices) for tensors in layers)


def _parts(gathered: int, activations: int, logits: int = 0) -> Counter[str]:
    return Counter({"gathered weights": gathered, "activations": activations, "logits": logits})
