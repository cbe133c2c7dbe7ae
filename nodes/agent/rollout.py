"""Sampling conversations: an agent loop leads each, a serve engine writes the policy's turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.errors import shortened, visible
from rlgraph.nodes.agent.chat import Chat, ChatLimits, LimitReached, tool_loop
from rlgraph.nodes.agent.parsers import hermes
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.agent.template import TemplatePieces
from rlgraph.nodes.agent.toolbox import OfferedTool, Toolbox, row_of
from rlgraph.nodes.rollout.rollout import (
    CUT,
    SAMPLING,
    Penalty,
    Repetition,
    StopId,
    StopText,
    repeats,
    seed,
)
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Loop, Parser, Sampling, ServeEngine, Tool, op
from rlgraph.ops.column_types import boolean, float32, int64, prompt_tokens, prompts, samples, text, tokens

log = logging.getLogger(__name__)
TRACED = 32  # conversations on a device whose times a timeline has
AtLeastOne = Annotated[int, Field(ge=1)]


class Conversations(NamedTuple):
    """The columns that ``rollout.agent`` writes."""

    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]
    rollout_logprobs: float32[samples, tokens]
    responses: text[samples]
    group: int64[samples]
    truncated: boolean[samples]
    turn: int64[samples, tokens]
    turns: int64[samples]
    tool_calls: int64[samples]
    tool_rewards: float32[samples]
    forgotten: int64[samples, tokens] | None


@op(
    makes="samples",
    times="n",
    rows="each",
    when={**CUT, "forgotten": "forgets"},
    stores={"turn": "int16"},
    assumes=("grammar",),
    roles={**SAMPLING, "contexts": "forgets", "turns": "max_turns"},
)
def agent(
    model: ServeEngine,
    ctx: Context,
    prompt: int64[prompts, prompt_tokens],
    *,
    n: AtLeastOne = 1,
    max_new_tokens: AtLeastOne,
    temperature: NonNegativeFloat = 1.0,
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0,
    top_k: Annotated[int, Field(ge=0)] = 0,
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0,
    stop: list[StopText] = [],  # noqa: B006 - never changed
    stop_token_ids: list[StopId] = [],  # noqa: B006 - likewise
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Penalty = 0.0,
    frequency_penalty: Penalty = 0.0,
    min_new_tokens: Annotated[int, Field(ge=0)] = 0,
    regex: str | None = None,
    json_schema: dict[str, Any] | None = None,
    loop: Loop | None = None,
    tools: dict[str, Tool] | None = None,
    parser: Parser | None = None,
    max_turns: Annotated[int, Field(ge=1, le=32767)] = 8,
    max_turn_tokens: AtLeastOne | None = None,
    max_calls: AtLeastOne = 16,
    max_result_tokens: AtLeastOne = 256,
    truncate: Literal["left", "right", "middle"] = "middle",
    tool_timeout: PositiveFloat = 30.0,
    parallel: AtLeastOne = 64,
    template_options: dict[str, Any] | None = None,
    forgets: bool = False,
) -> Conversations:
    """Sample ``n`` conversations from each prompt: turns of the policy, and what tools answer to them.

    ``tokens`` are the very ids that the engine read and wrote, in order; no turn is tokenised again. What
    others say is tokenised once and joined by what the chat template writes around it. ``loss_mask`` is
    true on what the policy wrote, end tokens included, and ``rollout_logprobs`` are 0 elsewhere. ``turn``
    is t from the first token of the policy's turn t up to its next, so on what answers that turn too, and 0
    in the prompt. ``responses`` is the text of the last turn. A sample is ``truncated`` where a limit ended
    it. A call that can't be read, names no tool, fails or is late is answered with ``error: ...``.
    ``tool_rewards`` is the sum of what the ``reward`` methods of the sample's tools return. Random numbers
    as of ``rollout``, those of turn t of a sample from its seed + t. Tools that are not async run in
    threads, and a late one goes on to its end. Records ``rollout/length`` (tokens that the policy wrote),
    ``rollout/prompt_length``, ``rollout/truncated``, ``rollout/repetitive`` (of last turns),
    ``rollout/turns``, ``rollout/called`` (the fraction of samples that call a tool), ``rollout/tool_calls``
    (calls per sample), ``rollout/tool_errors`` (the fraction of calls that fail), ``tokens/generated`` (a
    total), and how many seconds a conversation waited for the policy and for tools. ReAct: arXiv 2210.03629.

    Attributes:
        n: conversations per prompt, at least 1.
        max_new_tokens: the most tokens behind the prompt, of all turns and what tools answer together.
        temperature: what the logits are divided by; 0 takes the most likely token.
        top_p: the smallest set of tokens with this probability is kept; 1 keeps all.
        top_k: how many of the most likely tokens are kept; 0 keeps all.
        min_p: tokens less likely than this share of the most likely one are dropped; 0 keeps all.
        stop: texts that end a turn; the one that does is part of it, with the whole of its last token.
        stop_token_ids: tokens that end a turn, by their ids; the one that does is part of it.
        repetition_penalty: by how much tokens that the turn has become less likely; 1: not at all.
        presence_penalty: what is taken off the logits of such tokens.
        frequency_penalty: what is taken off them for each time that they came.
        min_new_tokens: how many tokens a turn has at least before its end token.
        regex: a regular expression that a turn is one of (sglang).
        json_schema: a JSON schema that a turn is an instance of (sglang).
        loop: who speaks when; by default tool_loop, turns until one calls no tool.
        tools: what the policy may call, by the names that it calls them by. To show them in the prompt, give
            data.prompts `tools: "${nodes.ROLLOUT.tools}"`.
        parser: how calls stand in the text; by default hermes.
        max_turns: turns of the policy, 1 to 32767.
        max_turn_tokens: the most tokens of one turn, which ends the conversation there; null: as many as are
            left.
        max_calls: calls per conversation; those beyond are answered with an error.
        max_result_tokens: the most tokens of what a tool answers to one call.
        truncate: which side of a longer answer is cut: left, right or middle.
        tool_timeout: seconds that a call may take, above 0.
        parallel: calls of tools that are not async at a time, on a device.
        template_options: what the chat template is given beside messages, as of data.prompts.
        forgets: whether the loop may let later turns not see earlier tokens (``chat.forget``). ``tokens`` are
            all of them then; ``forgotten`` is the length of the row from which on each is unseen, 0 where it
            is always seen. ``segment.contexts`` makes rows of what the policy saw.

    Example:
        rollout: {op: rollout.agent, model: policy, n: 8, max_new_tokens: 512,
                  tools: {calculator: {kind: calculator}}}
    """
    rows = [row * n + k for row in ctx.rows for k in range(n)]
    counts = (max_new_tokens, max_turn_tokens, max_turns, max_calls, max_result_tokens)
    limits = ChatLimits(*counts, truncate, forgets)
    offers, pieces = OfferedTool.of(tools or {}), TemplatePieces(model.tokenizer, template_options)
    sampling = Sampling(
        *(max_new_tokens, temperature, top_p, top_k, min_p, stop, stop_token_ids),
        *(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens),
        *(regex, json_schema),
    )
    engine = RequestBatcher(model, sampling, len(rows))
    threads = ThreadPoolExecutor(parallel)
    prompt_ids = prompt.tolist()
    chats = [
        Chat(
            number=number,
            prompt=prompt_ids[number // n],
            seed=seed(ctx.seed, ctx.iteration, ctx.node, row),
            engine=engine,
            pieces=pieces,
            tools=Toolbox(offers, number // n, threads, tool_timeout),
            parser=parser.body if parser else hermes,
            limits=limits,
        )
        for number, row in enumerate(rows)
    ]
    try:
        rewards = asyncio.run(_all(chats, rows, n, loop))
    finally:
        engine.close()
        threads.shutdown(wait=False, cancel_futures=True)
    _record(ctx, chats, rows)
    return _columns(chats, [row // n for row in rows], rewards)


async def _all(chats: Sequence[Chat], rows: Sequence[int], n: int, loop: Loop | None) -> list[float]:
    return await asyncio.gather(*(_named(chat, row, n, loop) for chat, row in zip(chats, rows, strict=True)))


async def _named(chat: Chat, row: int, n: int, loop: Loop | None) -> float:
    """Hold one conversation; what it raises says which it was."""
    try:
        return await _lead(chat, loop)
    except Exception as error:
        if not any(note.startswith("it was in ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"it was in sample {row}, which is of prompt {row // n}, in turn {chat.turns}")
        raise


async def _lead(chat: Chat, loop: Loop | None) -> float:
    """Hold one conversation; return the reward that its tools give it."""
    lead = partial(loop.body, **row_of(loop, chat.tools.row, ("chat",))) if loop else tool_loop
    try:
        try:
            await lead(chat)
        except LimitReached:
            chat.truncated = True
        finally:
            chat.engine.leave()
        return await chat.tools.reward()
    finally:
        await chat.tools.release()


def _columns(chats: Sequence[Chat], group: Sequence[int], rewards: Sequence[float]) -> Conversations:
    masks = [[False] * len(chat.prompt) + chat.written for chat in chats]
    logprobs = [[0.0] * len(chat.prompt) + chat.logprobs for chat in chats]
    return Conversations(
        tokens=Ragged.of([[*chat.prompt, *chat.tokens] for chat in chats], torch.int64),
        loss_mask=Ragged.of(masks, torch.bool),
        rollout_logprobs=Ragged.of(logprobs, torch.float32),
        responses=[chat.response for chat in chats],
        group=torch.tensor(group, dtype=torch.int64),
        truncated=torch.tensor([chat.truncated for chat in chats], dtype=torch.bool),
        turn=Ragged.of([[0] * len(chat.prompt) + chat.turn_of for chat in chats], torch.int16),
        turns=torch.tensor([chat.turns for chat in chats], dtype=torch.int64),
        tool_calls=torch.tensor([chat.calls for chat in chats], dtype=torch.int64),
        tool_rewards=torch.tensor(rewards, dtype=torch.float32),
        forgotten=Ragged.of([[0] * len(chat.prompt) + chat.forgotten for chat in chats], torch.int64),
    )


def _record(ctx: Context, chats: Sequence[Chat], rows: Sequence[int]) -> None:
    metrics: Mapping[str, list[float]] = {
        "length": [sum(chat.written) for chat in chats],
        "prompt_length": [len(chat.prompt) for chat in chats],
        "turns": [chat.turns for chat in chats],
        "tool_calls": [chat.calls for chat in chats],
    }
    for name, values in metrics.items():
        ctx.record(f"rollout/{name}", values)
    ctx.record("rollout/length_", metrics["length"], kind=("std", "min", "max"))
    ctx.record("rollout/turns_", metrics["turns"], kind=("min", "max"))
    ctx.record("rollout/repetitive", [repeats(chat.response) for chat in chats], kind="share")
    for what in ("generation", "tools"):
        waited = [sum(end - start for name, start, end in chat.spans if name == what) for chat in chats]
        ctx.record(f"perf/{what}_seconds/", waited, kind=("mean", "max"))
    ctx.spans = [(f"sample {rows[chat.number]}", *span) for chat in chats[:TRACED] for span in chat.spans]
    ctx.record("rollout/truncated", [chat.truncated for chat in chats], kind="share")
    ctx.record("rollout/called", [chat.calls > 0 for chat in chats], kind="share")
    broken = [(chat, why) for chat in chats for why in chat.tools.broken]
    for chat, why in broken[:1]:
        first = f"the first, of sample {rows[chat.number]}: {visible(shortened(why))}"
        log.warning(f"{len(broken)} calls of tools raised or were late; {first}")
    errors, calls = sum(chat.tools.errors for chat in chats), sum(chat.calls for chat in chats)
    ctx.record("rollout/tool_errors", errors, calls, kind="share", over="calls")
    generated = [sum(chat.written) for chat in chats]
    ctx.record("tokens/generated", generated, kind="sum", over="tokens")
