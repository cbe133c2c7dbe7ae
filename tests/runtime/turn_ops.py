"""A loop of one to three turns, and ops that give each of them a reward."""

from rlgraph.nodes.agent.chat import Chat
from rlgraph.ops import Context, boolean, float32, int64, op, samples, tokens, turns


async def again(chat: Chat) -> None:
    """Turns of the policy, with a word of a user between them."""
    for _ in range(chat.seed % 3):
        await chat.turn()
        chat.say("user", "again")
    await chat.turn()


@op()
def lengths(
    turn: int64[samples, tokens], loss_mask: boolean[samples, tokens], *, turns: int = 3
) -> float32[samples, turns]:
    """How many tokens the policy wrote in each turn."""
    import torch

    each = [[((turn[row] == t + 1) & loss_mask[row]).sum() for t in range(turns)] for row in range(len(turn))]
    return torch.tensor(each, dtype=torch.float32)


@op()
def checked(
    ctx: Context,
    lengths: float32[samples, turns],
    loss_mask: boolean[samples, tokens],
    observed: boolean[samples, tokens],
    turn: int64[samples, tokens],
    turns: int64[samples],
) -> float32[samples]:
    """0, where columns of turns, tokens and samples are of one row."""
    import torch

    assert lengths.sum(1).tolist() == loss_mask.sum().tolist()
    assert ((lengths > 0).sum(1) == turns).all() and turn.values.dtype == torch.int16
    behind = turn.like((turn.values > 0).to(torch.int64)).sum()
    assert (observed.sum() + loss_mask.sum()).tolist() == behind.tolist()
    ctx.record("observed", observed.sum())
    return torch.zeros(len(turns))
