"""A measure that rises and falls again while a model learns to earn more."""

from rlgraph.ops import float32, op, samples


@op()
def near(rewards: float32[samples]) -> float32[samples]:
    """How near a reward is to a half: an untrained model earns less, a trained one more."""
    return -(rewards - 0.5).abs()
