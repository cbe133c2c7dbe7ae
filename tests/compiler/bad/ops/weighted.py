from rlgraph.ops import float32, op, samples, tokens


@op()
def weighted(logprobs: float32[samples, tokens], weights: float32[samples] | None) -> float32[samples, tokens]:
    """-weights logprobs, weights 1 where there are none."""
    return logprobs if weights is None else weights * logprobs
