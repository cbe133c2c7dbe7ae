"""Ops of prompts: filters, and prompts for another model."""

from rlgraph.ops import boolean, float32, int64, op, prompt_tokens, prompts, samples, text


@op(filters=True)
def short(question: text[prompts], *, most: int = 100) -> boolean[prompts]:
    """Keep short questions."""
    raise NotImplementedError


@op(filters=True)
def maths(source: text[samples]) -> boolean[samples]:
    """Keep samples of one source."""
    raise NotImplementedError


@op(makes="prompts", rows="all")
def asked(responses: text[samples], rewards: float32[samples]) -> int64[prompts, prompt_tokens]:
    """Ask whether each response is right."""
    raise NotImplementedError
