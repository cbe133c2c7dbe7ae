from rlgraph.op import op
from rlgraph.types import float32, samples, tokens


@op()
def weighted(logprobs: float32[samples, tokens], weights: float32[samples] | None) -> float32[samples, tokens]:
    """-weights logprobs, weights 1 where there are none."""
    return logprobs if weights is None else weights * logprobs
