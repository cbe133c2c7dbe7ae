"""Bytes that a train engine needs of a device beside its shards, moment by moment: see docs/cost_model.md.

A peak is the most of any moment: the activations of the whole model are gone by the time that the gradients
of its embeddings are reduced. ``benchmarks/memory_fake.py`` holds the moments to what the engine itself
holds.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.layer_memory import Layer, chunk_numbers, logits_bytes, wide_head
from rlgraph.costs.limits import head_rows
from rlgraph.costs.lora_size import adapted_layers, adapter_tensors, kept_of_experts, trained_on_device
from rlgraph.costs.model_size import Size, padded
from rlgraph.costs.muon import held_in_step, steps_by_muon
from rlgraph.costs.plan_size import elsewhere, is_small, largest_layer
from rlgraph.ir.plan import ModelPlan

Moments = dict[str, Counter[str]]
ALONE = 3  # a device alone sums nothing: input, output, and their quotient


@dataclass(frozen=True)
class Pass:
    """One micro-batch through a train engine, all of whose tokens are scored."""

    size: Size
    model: ModelPlan
    devices: int  # its shards lie on so many
    tokens: int  # the device reads so many of the micro-batch, padding included
    mask: int = 0  # bytes of the mask of packed rows, if any, and of columns with fixed axes
    replicas: int = 1  # copies of the model, whose gradients are summed
    offloads: bool = False  # what is kept waits on the host
    uneven: float = 1.0  # tokens that come to its experts, over those of an even share

    def score(self) -> Moments:
        """Return the moments of a pass without gradients."""
        hidden = self._hidden
        both = self.root + self.block
        return {
            "start": _parts(self._start, self.mask + hidden),
            "layer": _parts(both + self.result, self.mask + self.tokens * self.layer.forward),
            "between layers": _parts(both + 2 * self.result, self.mask + 2 * hidden),
            "head's gather": _parts(self._head_gather, self.mask + hidden),
            "logits": _parts(self._scoring, self.mask + hidden, self._scored(entropy=False)),
        }

    def update(self) -> Moments:
        """Return the moments of a forward and a backward pass, all of them with gradients in shards."""
        both, kept = self.root + self.block, self.mask + self._kept + self._hidden
        moments = {
            "start": _parts(self._start, self.mask + self._hidden),
            "between layers": _parts(both + 2 * self.result, kept),
            "head's gather": _parts(self._head_gather, kept),
            "scores": _parts(self._scoring, kept, self._scored(entropy=True)),
        }
        if steps_by_muon(self.model):
            moments["optimizer step"] = _parts(held_in_step(self.size, self.width, self.devices), 0)
        moments |= self._logits() | self._layers() | (self._embeddings() if self.adapted is None else {})
        held = MASTER * trained_on_device(self.size, self.model, self.devices)
        return {name: parts + Counter({"gradients": held}) for name, parts in moments.items()}

    def _logits(self) -> Moments:
        """Return the backward pass of the head: all activations, and what its chunks add up to.

        Over chunks the gradient of its weights is summed in float32, beside that of this chunk and of the
        last. A head that computes in float32 has a copy of its weights in it, and a chunk's gradient.
        """
        kept = self.mask + self._kept + self._hidden + self.tokens * self.size.config.hidden_size * MASTER
        width, copied = MASTER if self._wide else self.width, self._wide * self.size.embedding * MASTER
        gradient = copied if copied and self.head else self.head
        logits = self._hidden + logits_bytes(self.size, self.width, self.tokens, entropy=False, head=width)
        wider = chunk_numbers(self.size, self.tokens) * MASTER if width < MASTER else 0
        several = head_rows(self.tokens, self.size.vocabulary, self.width)[0] < self.tokens
        summed = several * (self.head + self.head // self.width * MASTER)
        scored = self.ends if self.size.head == "lm" else 0
        before = self.root + scored + self.result + self.whole + summed + copied
        moments = {
            "logits": _parts(before, kept, logits),
            "head": _parts(before + gradient, kept, logits - wider),
        }
        if self.ends and self.head:
            moments["head's reduction"] = _parts(self.result + self._ends_reduced, kept, 2 * self._hidden)
        return moments

    def _layers(self) -> Moments:
        """Return the backward pass of the last layer, and of the one before, beside which that is reduced."""
        own = 0 if self._recomputes else self._kept_of_layer
        last = self.mask + self._kept - own + self._hidden
        before = last if self.offloads else last - (self._hidden if self._recomputes else own)
        gathered = self.root + self.block + self.result + self.whole
        # gradients of a head apart from the root are on their way into shards until the last layer's are
        beside = self._padded_ends * MASTER if self.ends and self.head else 0
        gathered += 0 if self.ends else self.head
        first, every = gathered + self._first_gradient, gathered + self.width * self._trained(1)
        factors = self._kept_of_layer - self.tokens * self.layer.kept
        begun, done = self.tokens * self.layer.backward + factors, self.tokens * self.layer.after_mlp
        return {
            "last layer": _parts(first + beside, last + begun),
            "last layer's gradients": _parts(every + beside, last + done),
            "layer": _parts(first + self.reduced, before + begun),
            "layer's gradients": _parts(every + self.reduced, before + done),
        }

    def _embeddings(self) -> Moments:
        """Return the end of the backward pass: gradients of embeddings and head are whole, then reduced."""
        both = (0 if self.ends else self.head) + self.size.embedding * self.width
        root = padded(self.size.root_tensors, self.devices)
        copies = ALONE if self.devices == 1 else 1
        reduced = self._ends_reduced or 2 * self.whole or root * (MASTER * copies + self.width)
        return {
            "embeddings": _parts(self.root + self.whole + self.reduced + both, 2 * self._hidden),
            "reduction": _parts(0 if self._alone else reduced, 0),
        }

    @property
    def _ends_reduced(self) -> int:
        """Return the bytes of the gradients of embeddings, or of a head, as they are reduced apart."""
        numbers = self._padded_ends if self.ends else 0
        if self.devices == 1:
            return numbers * MASTER * ALONE
        return numbers * (MASTER + self.width) + numbers // self.devices * MASTER

    @property
    def _padded_ends(self) -> int:
        return padded(self.size.root_tensors[:1], self.devices)

    @cached_property
    def ends(self) -> int:
        """Return the bytes of embeddings, or of a head, gathered; 0 where they are of the root's group."""
        tied = self.size.head == "lm" and not self.size.head_tensors
        return 0 if tied or self._small or self._alone else self.width * self._padded_ends

    @property
    def _start(self) -> int:
        """Return the gathered bytes before the first layer: parameters, and the collective's own buffers."""
        if self.ends:
            assert self.model.train
            as_held = self.width == MASTER or self.adapted is not None or self.model.train.optimizer_offload
            # cast into a buffer, alone too, where a device holds more than it computes with
            return self.root + self.ends * (1 if self.devices == 1 and as_held else 2)
        return self.root + self.block + self.root_result + self.result

    @property
    def _scoring(self) -> int:
        """Return the gathered bytes while the head runs forward."""
        return self._start if self.ends and self.size.head == "lm" else self.root + self.result

    @property
    def _head_gather(self) -> int:
        """Return the gathered bytes as the head comes: of the last layer the collective's buffer is there."""
        return self._scoring + (self.result if self.ends and self.size.head == "lm" else 0)

    @cached_property
    def width(self) -> int:
        assert self.model.train
        return WIDTH[self.model.train.dtype]

    @cached_property
    def adapted(self) -> frozenset[str] | None:
        """Return the linear layers that have adapters; None of a model whose weights train."""
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
        """Return the bytes of the root's group, gathered: last norm and value head, embeddings and head that
        are tied; of a small model all."""
        if self._alone:
            return 0
        all_devices = self.size.on_device(self.devices) * self.devices
        layers = all_devices - elsewhere(self.size, self.devices) if self._small else 0
        _, norm, *head = self.size.root_tensors
        own = [norm, *(head if self.size.head == "value" else [])] if self.ends else self.size.root_tensors
        return self.width * (layers or padded(own, self.devices))

    @cached_property
    def block(self) -> int:
        """Return the bytes of the largest decoder layer, gathered with its adapters, apart from the root."""
        apart = not self._small and not self._alone
        return apart * self.width * (largest_layer(self.size, self.devices) + self._adapters(self.devices))

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
        return 0 if self._small or self._alone else MASTER * self._trained(self.devices)

    @cached_property
    def whole(self) -> int:
        """Return the bytes of a small model's gradients, summed whole over micro-batches in float32."""
        numbers = trained_on_device(self.size, self.model, 1) - elsewhere(self.size, 1)
        return MASTER * numbers if self._small and not self._alone else 0

    @cached_property
    def head(self) -> int:
        """Return the bytes of the gradient of a language-model head; 0 where that does not train."""
        trains = self.adapted is None and self.size.head == "lm"
        return self.width * self.size.embedding if trains else 0

    @property
    def _small(self) -> bool:
        reshard = self.model.train.reshard if self.model.train else None
        return is_small(self.size) if reshard is None else not reshard

    @property
    def _alone(self) -> bool:
        """Return whether nothing is sharded or summed: a device holds parameters as it computes with them."""
        own = self.model.frozen or (self.width == MASTER and self.replicas == 1)
        return self.devices == 1 and own

    @property
    def _wide(self) -> bool:
        return wide_head(self.model, self.size)

    def _scored(self, entropy: bool) -> int:
        """Return the bytes of a chunk's logits in a forward pass, and of a head's float32 copy."""
        width = MASTER if self._wide else self.width
        logits = logits_bytes(self.size, self.width, self.tokens, entropy, head=width)
        return logits + self._wide * self.size.embedding * MASTER

    @property
    def _hidden(self) -> int:
        return self.tokens * self.size.config.hidden_size * self.width

    @property
    def _recomputes(self) -> bool:
        assert self.model.train
        return bool(self.model.train.recompute)

    @property
    def _kept(self) -> int:
        layers = self.size.config.num_hidden_layers
        if self.offloads:  # but for the input of this layer and the one that comes, or still goes
            layers = 2
        return layers * (self._hidden if self._recomputes else self._kept_of_layer)

    @cached_property
    def _kept_of_layer(self) -> int:
        assert self.model.train
        lora = self.model.train.lora
        factors = self.width * kept_of_experts(self.size, lora, self.tokens) if lora else 0
        return self.tokens * self.layer.kept + factors

    @property
    def on_host(self) -> int:
        """Return the bytes that wait on the host: an input of each layer, whose memory is a power of two."""
        layers = self.size.config.num_hidden_layers
        return layers << (self._hidden - 1).bit_length() if self.offloads else 0

    @property
    def _first_gradient(self) -> int:
        """Return the bytes of the gradient of the weights that come first in a layer's backward pass."""
        config = self.size.config
        if self.adapted is not None or self.layer.permutes:
            return 0
        experts = config.experts // self.size.divided
        inner = experts * config.expert_size if self.layer.sparse else config.intermediate_size
        return self.width * config.hidden_size * inner

    def _trained(self, devices: int) -> int:
        """Return the most numbers of a decoder layer that train."""
        return largest_layer(self.size, devices) if self.adapted is None else self._adapters(devices)

    def _adapters(self, devices: int) -> int:
        assert self.model.train
        lora = self.model.train.lora
        if not lora:
            return 0
        return max(padded(adapter_tensors(self.size, lora, at), devices) for at in self.size.unlike)


def _parts(gathered: int, activations: int, logits: int = 0) -> Counter[str]:
    return Counter({"gathered weights": gathered, "activations": activations, "logits": logits})
