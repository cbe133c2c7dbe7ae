"""One forward pass over tokens that a policy wrote: a model's log-probs, or a critic's values."""

from typing import NamedTuple

from pydantic import PositiveFloat

from rlgraph.ops import TrainEngine, op
from rlgraph.ops.column_types import boolean, float32, int64, k, layers, samples, tokens


class Squared(NamedTuple):
    """The columns that ``logprobs.squares`` writes."""

    logprobs: float32[samples, tokens]
    squares: float32[samples, tokens]


class Uncertain(NamedTuple):
    """The columns that ``logprobs.entropy`` writes."""

    logprobs: float32[samples, tokens]
    entropy: float32[samples, tokens]


@op(own=("routing",), assumes=("replayed",), roles={"temperature": "temperature", "keep": "keep"})
def logprobs(
    model: TrainEngine,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    routing: int64[samples, tokens, layers, k] | None,
    *,
    temperature: PositiveFloat | None = None,
    keep: bool = False,
) -> float32[samples, tokens]:
    """Log-prob of each token that the policy wrote, under a train engine's weights.

    log softmax(logits / temperature)[token] at the position before the token, in nats; 0 where ``loss_mask``
    is false. Name the node ``old_logprobs`` for the policy before its update (PPO, arXiv 1707.06347), and
    ``ref_logprobs`` for a frozen reference. With ``routing`` from a rollout of the same model, a mixture of
    experts routes each token to the experts that were used to generate it (R3, arXiv 2510.11370).

    Attributes:
        temperature: the number by which the logits are divided, above 0; null: that of the rollout, so that
            both engines use the same distribution.
        keep: compute it even if the compiler could leave it out because the update makes a single optimizer
            step from the same weights; this measures how far the two engines differ.

    Example:
        old_logprobs: {op: logprobs, model: policy}
    """
    return model.logprobs(tokens, loss_mask, 1.0 if temperature is None else temperature, routing=routing)


@op(own=("routing",), assumes=("replayed",), roles={"temperature": "temperature"})
def squares(
    model: TrainEngine,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    routing: int64[samples, tokens, layers, k] | None,
    *,
    temperature: PositiveFloat | None = None,
) -> Squared:
    """Log-probs and, in the same pass, the sum of squared probabilities: how sure the policy was.

    ``logprobs`` is as for the op of that name; ``squares`` is sum_v p_v^2 over the vocabulary at the same
    position, 1 where the policy was certain (arXiv 2602.07078, for advantage.optimal_token_baseline). Both
    are 0 where ``loss_mask`` is false.

    Attributes:
        temperature: the number by which the logits are divided, above 0; null: that of the rollout.

    Example:
        old_logprobs: {op: logprobs.squares, model: policy, out: {logprobs: old_logprobs}}
    """
    divisor = 1.0 if temperature is None else temperature
    return Squared(*model.squares(tokens, loss_mask, divisor, routing=routing))


@op(own=("routing",), assumes=("replayed",), roles={"temperature": "temperature"})
def entropies(
    model: TrainEngine,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    routing: int64[samples, tokens, layers, k] | None,
    *,
    temperature: PositiveFloat | None = None,
) -> Uncertain:
    """Log-probs and, in the same pass, the entropy at each token: how open the choice was.

    ``logprobs`` is as for the op of that name; ``entropy`` is -sum_v p_v log p_v over the vocabulary at the
    same position, in nats (arXiv 2506.01939, for weight.entropy). Both are 0 where ``loss_mask`` is false.

    Attributes:
        temperature: the number by which the logits are divided, above 0; null: that of the rollout.

    Example:
        old_logprobs: {op: logprobs.entropy, model: policy, out: {logprobs: old_logprobs}}
    """
    divisor = 1.0 if temperature is None else temperature
    return Uncertain(*model.entropies(tokens, loss_mask, divisor, routing=routing))


@op(head="value")
def values(
    model: TrainEngine, tokens: int64[samples, tokens], loss_mask: boolean[samples, tokens]
) -> float32[samples, tokens]:
    """The critic's estimate of the return before each token that the policy wrote.

    V_t reads the tokens before t only, in units of the reward; 0 where ``loss_mask`` is false
    (PPO, arXiv 1707.06347). The model needs ``head: value``.

    Example:
        values: {op: values, model: critic}
    """
    return model.values(tokens, loss_mask)
