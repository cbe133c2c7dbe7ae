"""A loop whose policy forgets, and ops that read segments beside the samples that they are of."""

from rlgraph.nodes.agent.chat import Chat
from rlgraph.ops import Context, boolean, float32, int64, op, other_tokens, samples, segments, tokens


async def forgetful(chat: Chat) -> None:
    """None to three turns, each of which sees of earlier ones nothing but their ends."""
    for _ in range(chat.seed % 4):
        first = len(chat.tokens)
        await chat.turn()
        chat.forget(first, len(chat.tokens) - 1)
        chat.say("user", "again")


@op(rows="group")
def trained(
    ctx: Context,
    segment_mask: boolean[segments, tokens],
    segment_count: int64[samples],
    loss_mask: boolean[samples, other_tokens],
) -> float32[samples]:
    """How many tokens of a sample are trained in its segments: those of its loss mask, each once."""
    sample = segment_count.new_tensor(range(len(segment_count))).repeat_interleave(segment_count)
    once = loss_mask.sum().new_zeros(len(segment_count)).index_add(0, sample, segment_mask.sum())
    assert once.tolist() == loss_mask.sum().tolist()
    ctx.record("segments", segment_count)
    ctx.record("none", segment_count == 0)
    return once.float()


@op(filters=True)
def short(segment_mask: boolean[segments, tokens]) -> boolean[segments]:
    """Whether a segment trains fewer than six tokens."""
    return segment_mask.sum() < 6
