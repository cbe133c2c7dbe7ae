"""A user's op that needs a key: it says so in its log, and fails with the key in its error."""

import logging

from rlgraph.ops import float32, op, samples, text


@op(beside=True)
def graded(responses: text[samples], *, key: str, fails: bool = False) -> float32[samples]:
    """The number of ones in a response."""
    import torch

    assert len(key) == 20, "the key itself, not a reference to it"
    logging.getLogger("grader").warning("asked with %s", key)
    if fails:
        raise ValueError(f"http://grader/?key={key} refused")
    return torch.tensor([float(response.count("1")) for response in responses])
