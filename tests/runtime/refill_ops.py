"""A user's ops that count the rows behind a filter that refills."""

import torch

from rlgraph.ops import Context, Tokenizer, boolean, float32, int64, op, prompts, samples, text, tokens


@op(filters=True)
def small(ctx: Context, answer: text[prompts], *, most: float) -> boolean[prompts]:
    """The prompts whose answer is at most ``most``; records the mean of those that stay."""
    kept = torch.tensor([int(number) <= most for number in answer])
    ctx.record("rows/answer", [int(number) for number in answer if int(number) <= most])
    return kept


@op(rows="all")
def counted(ctx: Context, rewards: float32[samples], group: int64[samples]) -> float32[samples]:
    """Rewards as they are; records how many rows and groups there are, and the sum of the groups' numbers."""
    numbers = set(group.tolist())
    ctx.record("rows/used", len(rewards), kind="sum")
    ctx.record("rows/groups", len(numbers), kind="sum")
    ctx.record("rows/numbers", sum(numbers), kind="sum")
    return rewards


@op()
def drawn(
    ctx: Context,
    tokenizer: Tokenizer,
    rewards: float32[samples],
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    token_versions: int64[samples, tokens],
    question: text[samples],
) -> float32[samples]:
    """Rewards as they are; records which samples several versions drew, and the age of the first."""
    assert ((token_versions.values >= 0) == loss_mask.values).all()
    for ids, asked in zip(tokens.tolist(), question, strict=True):
        assert tokenizer.decode(ids).startswith(asked)
    for row in token_versions.tolist():
        own = [version for version in row if version >= 0]
        assert own == sorted(own)
        ctx.record("versions/mixed", [len(set(own)) > 1])
        ctx.record("versions/age", [ctx.iteration - min(own)])
    return rewards
