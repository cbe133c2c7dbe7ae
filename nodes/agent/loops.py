"""The shipped agent loops. A loop is an async function that leads a conversation.

``my_loops.py:name`` is one of yours. Parameters behind ``chat`` are columns of the node, with the value of
this conversation's prompt; those behind the * are attributes.
"""

from __future__ import annotations

from rlgraph.nodes.agent.chat import Chat


async def single_turn(chat: Chat) -> None:
    """The policy answers once; tools are shown, and not run.

    Example:
        rollout: {op: rollout.agent, model: policy, loop: {kind: single_turn}, max_new_tokens: 256}
    """
    await chat.turn()


async def tool_loop(chat: Chat) -> None:
    """The policy writes turns until one calls no tool (ReAct, arXiv 2210.03629).

    The calls of a turn run at the same time.

    Example:
        rollout: {op: rollout.agent, model: policy, loop: {kind: tool_loop}, max_new_tokens: 256,
                  tools: {calculator: {kind: calculator}}}
    """
    while (turn := await chat.turn()).calls:
        await chat.use(turn.calls)
