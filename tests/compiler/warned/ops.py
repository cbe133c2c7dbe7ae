"""Ops of graphs that are warned of."""

from rlgraph.ops import boolean, float32, op, prompts, samples, text, tokens


@op()
def steps(responses: text[samples], loss_mask: boolean[samples, tokens]) -> float32[samples, tokens]:
    """Return what a process reward model says of each token."""


@op()
def difficulty(question: text[prompts]) -> float32[prompts]:
    """Return how hard a question is."""
