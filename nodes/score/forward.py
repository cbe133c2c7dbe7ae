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
    ``ref_logprobs`` for a frozen reference. With ``routing`` of the same model's rollout a mixture routes
    each token to the experts that generated with it (R3, arXiv 2510.11370).

    Attributes:
        temperature: what the logits are divided by, above 0; null: the rollout's, so that both engines speak
            of the same distribution.
        keep: compute it also where the compiler could leave it out, because the update makes one optimizer
            step from the same weights; for a look at how far the engines are apart.

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
    """Log-probs, and how sure the policy was of each token: the sum of squared probabilities, in one pass.

    ``logprobs`` as the op of that name; ``squares`` is sum_v p_v^2 over the vocabulary at the same position,
    1 where the policy was certain (arXiv 2602.07078, for advantage.optimal_token_baseline). Both are 0 where
    ``loss_mask`` is false.

    Attributes:
        temperature: what the logits are divided by, above 0; null: the rollout's.

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
    """Log-probs, and how open the choice of each token was: the entropy of its distribution, in one pass.

    ``logprobs`` as the op of that name; ``entropy`` is -sum_v p_v log p_v over the vocabulary at the same
    position, in nats (arXiv 2506.01939, for weight.entropy). Both are 0 where ``loss_mask`` is false.

    Attributes:
        temperature: what the logits are divided by, above 0; null: the rollout's.

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
