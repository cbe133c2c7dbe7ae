"""Activations of one decoder layer, in bytes per token, and logits of the head; see docs/cost_model.md.

Notation: b bytes of a number in the data type that is computed in; h, q, k, m the widths of hidden states, of
all queries, of all keys, and of the MLP.
"""

from functools import lru_cache

from rlgraph.costs import limits
from rlgraph.costs.dtypes import MASTER, WIDTH
from rlgraph.costs.limits import MASK, needs_mask, ring_ranks
from rlgraph.costs.model_size import Size, padded
from rlgraph.ir.plan import ModelPlan
from rlgraph.records import dataclass
from rlgraph.syntax.model_settings import EXPERTS

QUERIED = "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa"
RAISED = "gate_proj", "up_proj", "gate_up_proj"


@dataclass(frozen=True)
class Layer:
    """Bytes of one token in one decoder layer, as transformers computes it."""

    size: Size
    width: int  # b
    masked: bool = False  # rows are packed: keys and values are repeated for every query head
    adapted: frozenset[str] | None = None  # the linear layers that train; None: all weights do
    ranks: int = 1  # that share the tokens of a row
    uneven: float = 1.0  # tokens that come to a device's experts, over those of an even share

    @property
    def kept(self) -> int:
        """Return the bytes that stay for the backward pass.

        In b: queries and keys as they enter attention, values, and what comes out; of each norm its scaled
        input and its output; and of the MLP. In float32: each norm's input. A norm of queries and keys keeps
        as much of them. Frozen weights need no input: only adapters and what has no weights do. Where ranks
        share tokens, what attention puts out stays with all tokens of some heads, and as it came back; in a
        ring, keys and values of the tokens of all its ranks.
        """
        config = self.size.config
        norms = config.norms * config.hidden_size
        if config.normed:
            norms += config.queries + config.keys
        norm_bytes = MASTER * norms
        if self.adapted is None:
            norm_bytes += norms * (MASTER if config.wide_norms else self.width)
        norm_outputs = 0
        for layers in (QUERIED, RAISED):
            if self._trains(*layers):
                norm_outputs += config.hidden_size
        return self.width * (self._attention + norm_outputs + self.mlp) + norm_bytes

    @property
    def _attention(self) -> int:
        """Return the numbers that attention keeps."""
        config = self.size.config
        queries, out = config.queries, config.outputs
        numbers = queries + out
        if self.ranks > 1:
            numbers += out  # with all tokens of some heads, and as it came back
        # one head that is repeated for the queries of a rank of a ring is a view
        is_view = self.ring > 1 and config.key_heads * self.ring <= self.ranks
        if self.masked and not is_view:
            numbers += (queries + out) * self.ring
            if self.ring > 1:
                numbers += queries
            return numbers
        numbers += (config.keys + config.values) * self.ring
        if config.model_type == "phi3":  # values are a view of all that one layer puts out
            numbers += queries + config.keys
        return numbers

    @property
    def ring(self) -> int:
        """Return how many ranks share the tokens of the same heads."""
        return ring_ranks(self.size.config.key_heads, self.ranks)

    @property
    def mlp(self) -> int:
        """Return the numbers of the MLP that stay: gate, its activation, up and their product.

        Of a mixture, as much for every expert that a token chose, with its output, and with the inputs of
        what trains.
        """
        config = self.size.config
        dense = 3 + self._trains("down_proj")
        if not self.sparse:
            return dense * config.intermediate_size
        inputs = config.expert_size * self._trains(f"{EXPERTS}down_proj")
        inputs += config.hidden_size * self._trains(f"{EXPERTS}gate_up_proj")
        chosen = self.chosen * (3 * config.expert_size + config.hidden_size + inputs)
        return int(chosen) + dense * config.shared_size

    @property
    def backward(self) -> int:
        """Return the bytes that the backward pass takes at first, beside the gradient that comes in.

        That is what it keeps, less the product, and gradients of product, up and activation. Of a mixture it
        may be more that three tensors of the chosen experts' outputs are there while they go back to tokens.
        """
        config = self.size.config
        if self.sparse:
            most = max(2 * config.expert_size - config.hidden_size, 3 * config.hidden_size)
            gradients = int(self.chosen * most)
        elif self._trains("down_proj"):
            gradients = 2 * config.intermediate_size
        else:
            gradients = 3 * config.intermediate_size
        return self.kept + self.width * gradients

    @property
    def after_mlp(self) -> int:
        """Return the bytes at the time when the backward pass has the gradients of the MLP's weights."""
        config = self.size.config
        inner = config.intermediate_size
        if self.sparse:
            inner = int(self.chosen * (config.expert_size + config.hidden_size))
        return self.kept + self.width * (2 * inner - self.mlp)

    @property
    def forward(self) -> int:
        """Return the most bytes of the forward pass where nothing is kept: its MLP, or norms of queries; of a
        part of a layer, norms of hidden states.

        The embeddings of the whole pass are there as well.
        """
        config, width = self.size.config, self.width
        hidden, queries = config.hidden_size, config.queries
        inner = self._sparse_forward if self.sparse else 3 * config.intermediate_size
        mlp = (4 * hidden + inner) * width
        attention = (4 * queries + 2 * config.keys) * width
        if config.normed:
            attention = max(attention, queries * (width + 2 * MASTER))
        norms = hidden * (3 * width + 2 * MASTER)
        return max(mlp, 3 * hidden * width + attention, norms)

    @property
    def _sparse_forward(self) -> int:
        """Return the numbers of the chosen experts in a forward pass."""
        config = self.size.config
        hidden = config.hidden_size
        # experts with adapters are computed by the engine itself
        is_adapted = any(name.startswith(EXPERTS) for name in self.adapted or ())
        outputs = 2 * hidden + config.expert_size if is_adapted else 4 * hidden
        numbers = int(self.chosen * max(outputs, hidden + 4 * config.expert_size))
        if self.size.divided > 1:
            numbers += int(self.chosen * hidden)  # tokens as they came
        return numbers

    @property
    def chosen(self) -> float:
        """Return how many tokens come to a device's experts, for each of its own."""
        return self.size.config.num_experts_per_tok * self.uneven

    @property
    def permutes(self) -> bool:
        """Return whether the backward pass takes most where experts' outputs go back to their tokens."""
        config = self.size.config
        return self.sparse and 3 * config.hidden_size > 2 * config.expert_size - config.hidden_size

    @property
    def sparse(self) -> bool:
        return self.size.config.is_sparse(self.size.config.num_hidden_layers - 1)

    def _trains(self, *names: str) -> bool:
        return self.adapted is None or bool(self.adapted & {*names})


def mask_bytes(model: ModelPlan, size: Size, tokens: int, longest: int, device: str) -> int:
    """Return the most that the mask of packed rows takes (engines/fsdp/cells.py); 0 where there is none."""
    assert model.train
    if not model.train.packing or not needs_mask(device, model.train.dtype, size.config.head_size):
        return 0
    if longest * max(longest, tokens) > MASK:
        return 0
    width = max(longest, min(8 * longest, tokens, MASK // max(1, tokens)))
    return max(tokens, width) * width * WIDTH[model.train.dtype]


def chunk_numbers(size: Size, tokens: int) -> int:
    """Return the numbers of one chunk's logits, of whole tokens."""
    return min(tokens, max(1, limits.LOGITS // size.vocabulary)) * size.vocabulary


def wide_head(model: ModelPlan, size: Size) -> bool:
    """Return whether a head computes in float32 what the rest of a model does not."""
    assert model.train
    is_narrow = WIDTH[model.train.dtype] < MASTER
    return bool(model.train.head_dtype) and is_narrow and size.head == "lm"


def logits_bytes(size: Size, width: int, tokens: int, entropy: bool, head: int = 0) -> int:
    """Return the bytes of the logits of a chunk of tokens, copies of them, and hidden states of all tokens.

    That is one in float32, beside a narrower one for a moment, in a backward pass too: their gradient. An
    ``entropy``, which updates measure, wants the exponentials beside the logits; one that is differentiated
    takes another in the backward pass, which is left out. ``head``: bytes of a logit, by default those of a
    number.
    """
    logit = head or width
    bytes_of_logit = MASTER
    if entropy:
        bytes_of_logit += MASTER
    elif logit < MASTER:
        bytes_of_logit += logit
    return bytes_of_logit * chunk_numbers(size, tokens) + tokens * size.config.hidden_size * width


@lru_cache(maxsize=1024)
def staging(
    tensors: tuple[tuple[int, int], ...], devices: int, width: int, bucket: int, parts: int = 1
) -> int:
    """Return the bytes of a weight sync on a device that sends.

    A bucket's shards are cast into one buffer, gathered, and cut out as copies; but a large tensor, alone in
    its bucket, is as it was gathered. The last tensor of the bucket before is there until the next one is
    asked for. Where layers or experts are divided, the parts of a bucket are gathered, laid into one buffer,
    gathered once more, and joined.

    Args:
        tensors: as ``Config.tensors``, in the order in which they are sent, the embedding first.
        devices: that the shards lie on.
        width: bytes of a number as it travels.
        bucket: bytes of a bucket.
        parts: in which layers or experts are divided; embeddings and head are whole.
    """
    peak = previous_tensor = 0
    for bucket_tensors in limits.buckets(tensors, lambda tensor: tensor[0] * tensor[1] * width, size=bucket):
        gathered = padded(bucket_tensors, devices)
        copies = 1 if len(bucket_tensors) == 1 else 2
        needed = gathered // devices + gathered * copies
        if parts > 1 and bucket_tensors != [tensors[0]]:
            needed = 2 * gathered + 2 * gathered // parts
        peak = max(peak, previous_tensor + needed)
        previous_tensor = padded(bucket_tensors[-1:], devices)
    return peak * width
