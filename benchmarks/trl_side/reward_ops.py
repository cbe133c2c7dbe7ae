"""The reward of the ragged setting of ``trl_grpo.py``."""

from rlgraph.ops import Context, float32, op, samples, text


@op()
def closeness(ctx: Context, responses: text[samples], answer: text[samples]) -> float32[samples]:
    """How near a response's length is to the answer's: 1 - |m - n| / max(m, n, 1) for m and n characters.

    Records ``reward/mean``.
    """
    import torch

    sizes = [(len(made), len(right)) for made, right in zip(responses, answer, strict=True)]
    scores = [1 - abs(made - right) / max(made, right, 1) for made, right in sizes]
    ctx.record("reward/mean", scores)
    return torch.tensor(scores)
