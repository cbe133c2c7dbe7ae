"""A user's ops whose columns have fixed axes."""

from typing import Literal, NamedTuple

from rlgraph.ops import Context, FixedAxis, float32, int64, op, prompt_tokens, prompts, samples, tokens


class places(FixedAxis):
    """An axis of this file's own."""


class Marks(NamedTuple):
    """The columns that ``marks`` writes."""

    marks: int64[samples, tokens, places, Literal[2]]
    means: float32[samples, places]


@op(stores={"marks": "int16"})
def marks(tokens: int64[samples, tokens], *, places: int = 3) -> Marks:
    """Each token times 1 to ``places``, and the same less one; the mean of the former over the tokens."""
    import torch

    times = torch.arange(1, places + 1)
    values = torch.stack([tokens.values[:, None] * times, tokens.values[:, None] * times - 1], 2)
    means = tokens.like(values[:, :, 0].float()).sum() / tokens.lengths[:, None]
    return Marks(tokens.like(values.short()), means)


@op()
def pairs(prompt: int64[prompts, prompt_tokens]) -> float32[prompts, Literal[2]]:
    """The tokens of a prompt, and their sum."""
    import torch

    return torch.stack([prompt.lengths.float(), prompt.sum().float()], 1)


@op(rows="group")
def checked(
    ctx: Context,
    tokens: int64[samples, tokens],
    group: int64[samples],
    marks: int64[samples, tokens, places, Literal[2]],
    means: float32[samples, places],
    pairs: float32[samples, Literal[2]],
) -> float32[samples]:
    """A reward that is read off the columns, each of which must belong to its row."""
    import torch

    times = torch.arange(1, means.shape[1] + 1)
    assert marks.values.dtype == torch.int16 and marks.offsets.equal(tokens.offsets)
    assert marks.values[:, :, 0].equal((tokens.values[:, None] * times).short())
    assert marks.values[:, :, 1].equal((tokens.values[:, None] * times - 1).short())
    assert torch.allclose(means, means[:, :1] * times)
    for row in range(len(tokens)):
        length = int(pairs[row, 0])
        assert tokens[row][:length].sum() == pairs[row, 1]
    ctx.record("checked", pairs[:, 0])
    return means[:, 0] / means[:, 0].max()


@op(rows="all")
def together(marks: int64[samples, tokens, places, Literal[2]]) -> float32[samples]:
    """A reward for which all rows come together."""
    import torch

    return torch.zeros(len(marks))
