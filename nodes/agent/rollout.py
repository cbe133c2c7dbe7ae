"""Sampling conversations: an agent loop leads each, a serve engine writes the policy's turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.errors import shortened, visible
from rlgraph.nodes.agent.chat import Chat, ChatLimits
from rlgraph.nodes.agent.live_chats import LiveChat, LiveChats, conversation
from rlgraph.nodes.agent.parsers import hermes
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.agent.template import TemplatePieces
from rlgraph.nodes.agent.toolbox import OfferedTool, Toolbox
from rlgraph.nodes.rollout.rollout import (
    CUT,
    SAMPLING,
    Penalty,
    Repetition,
    StopId,
    StopText,
    repeats,
    response_limits,
    seed,
)
from rlgraph.nodes.support.lazy import numpy, torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.user_call import DaemonThreads
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
    token_versions: int64[samples, tokens] | None


@op(
    makes="samples",
    times="n",
    rows="each",
    leaves=1,
    leaves_with="chunk",
    when={**CUT, "forgotten": "forgets", "token_versions": "chunk"},
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
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None,
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
    chunk: AtLeastOne | None = None,
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

    With ``chunk``, as where generation streams, conversations that go on when a round ends stay on their
    worker, tools and all, and go on in the next one, with newer weights where there are such. A group goes
    on to the next step once all its conversations have ended. On the embedded engine a round is one call for
    at most so many tokens of each turn that waits for it; those that wait for tools go on in a later one. On
    servers it ends with the first group, or after a second, and cuts nothing. Either ends early where weights
    or other devices wait for it. With ``order: in_order``, and where nothing streams, no round of the
    embedded engine depends on time: it is one call for all, and what tools answer to that.
    ``token_versions`` says which version of the weights drew each token, and is -1 on what others wrote;
    ``tokens/generated`` counts those of groups that have ended. A conversation whose worker is lost, or whose
    run is resumed, begins anew from its prompt. All of it is for steps before a filter with ``refill``.

    Attributes:
        n: conversations per prompt, at least 1.
        max_new_tokens: the most tokens behind the prompt, of all turns and what tools answer together.
        max_total_tokens: the most tokens of a conversation, its prompt among them; null: no bound of its own.
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
        chunk: the most tokens of a turn that a round draws; null: a round ends with the last conversation.

    Example:
        rollout: {op: rollout.agent, model: policy, n: 8, max_new_tokens: 512,
                  tools: {calculator: {kind: calculator}}}
    """
    rows = [int(row) * n + k for row in ctx.rows for k in range(n)]
    counts = (max_new_tokens, max_turn_tokens, max_turns, max_calls, max_result_tokens)
    limits = ChatLimits(*counts, truncate, forgets)
    offers, pieces = OfferedTool.of(tools or {}), TemplatePieces(model.tokenizer, template_options)
    sampling = Sampling(
        *(max_new_tokens, temperature, top_p, top_k, min_p, stop, stop_token_ids),
        *(repetition_penalty, presence_penalty, frequency_penalty, min_new_tokens),
        *(regex, json_schema),
    )
    prompt_ids = prompt.tolist()
    behind = response_limits(ctx, prompt_ids, max_new_tokens, max_total_tokens)

    def begin(number: int, engine: RequestBatcher, threads: Executor) -> Chat:
        return Chat(
            number=rows[number],
            prompt=prompt_ids[number // n],
            seed=seed(ctx.seed, ctx.iteration, ctx.node, rows[number]),
            engine=engine,
            pieces=pieces,
            tools=Toolbox(offers, number // n, threads, tool_timeout),
            parser=parser.body if parser else hermes,
            limits=replace(limits, max_new_tokens=behind[number // n]),
        )

    if chunk and ctx.resumes:
        if "live" not in ctx.session:
            ctx.session["live"] = LiveChats(RequestBatcher(model, sampling, chunk), parallel)
        live = ctx.session["live"]
        live.engine.sampling = sampling
        keys = ctx.begun[0].tolist() if ctx.begun else []
        new, is_due = partial(begin, engine=live.engine, threads=live.threads), ctx.is_due
        held = live.round(keys, len(rows), n, new, loop, is_due if ctx.yields else None)
        ended = _leave(ctx, [held[first : first + n] for first in range(0, len(held), n)])
        chats, rewards = [one.chat for one in ended], [one.reward.result() for one in ended]
    else:
        engine, threads = RequestBatcher(model, sampling), DaemonThreads(parallel)
        chats = [begin(number, engine, threads) for number in range(len(rows))]
        try:
            rewards = asyncio.run(_all(engine, chats, n, loop))
        finally:
            engine.close()
            threads.shutdown(wait=False, cancel_futures=True)
    _record(ctx, chats)
    return _columns(chats, n, rewards)


def _leave(ctx: Context, groups: Sequence[Sequence[LiveChat]]) -> list[LiveChat]:
    """Leave the groups in which a conversation goes on; return those of the others."""
    whole = [all(one.reward.done() for one in group) for group in groups]
    keys = [one.key for group, ended in zip(groups, whole, strict=True) for one in group if not ended]
    ctx.leave(numpy.flatnonzero(whole), torch.tensor(keys, dtype=torch.int64))
    return [one for group, ended in zip(groups, whole, strict=True) for one in group if ended]


async def _all(engine: RequestBatcher, chats: Sequence[Chat], n: int, loop: Loop | None) -> list[float]:
    engine.going_on.update(chat.number for chat in chats)
    every = asyncio.gather(*(conversation(chat, n, loop) for chat in chats))
    rewards, _ = await asyncio.gather(every, engine.in_step())
    return rewards


def _columns(chats: Sequence[Chat], n: int, rewards: Sequence[float]) -> Conversations:
    masks = [[False] * len(chat.prompt) + chat.written for chat in chats]
    logprobs = [[0.0] * len(chat.prompt) + chat.logprobs for chat in chats]
    return Conversations(
        tokens=Ragged.of([[*chat.prompt, *chat.tokens] for chat in chats], torch.int64),
        loss_mask=Ragged.of(masks, torch.bool),
        rollout_logprobs=Ragged.of(logprobs, torch.float32),
        responses=[chat.response for chat in chats],
        group=torch.tensor([chat.number // n for chat in chats], dtype=torch.int64),
        truncated=torch.tensor([chat.truncated for chat in chats], dtype=torch.bool),
        turn=Ragged.of([[0] * len(chat.prompt) + chat.turn_of for chat in chats], torch.int16),
        turns=torch.tensor([chat.turns for chat in chats], dtype=torch.int64),
        tool_calls=torch.tensor([chat.calls for chat in chats], dtype=torch.int64),
        tool_rewards=torch.tensor(rewards, dtype=torch.float32),
        forgotten=Ragged.of([[0] * len(chat.prompt) + chat.forgotten for chat in chats], torch.int64),
        token_versions=Ragged.of([[-1] * len(chat.prompt) + chat.versions for chat in chats], torch.int64),
    )


def _record(ctx: Context, chats: Sequence[Chat]) -> None:
    metrics: Mapping[str, list[float]] = {
        "length": [sum(chat.written) for chat in chats],
        "prompt_length": [len(chat.prompt) for chat in chats],
        "turns": [chat.turns for chat in chats],
        "tool_calls": [chat.calls for chat in chats],
    }
    for name, values in metrics.items():
        ctx.record(f"rollout/{name}", values)
    ctx.record("rollout/length_", metrics["length"], kind=("std", "min", "max", "p10", "p50", "p90", "p99"))
    ctx.record("rollout/turns_", metrics["turns"], kind=("min", "max"))
    ctx.record("rollout/repetitive", [repeats(chat.response) for chat in chats], kind="share")
    for what in ("generation", "tools"):
        waited = [sum(end - start for name, start, end in chat.spans if name == what) for chat in chats]
        ctx.record(f"perf/{what}_seconds/", waited, kind=("mean", "max"))
    ctx.spans = [(f"sample {chat.number}", *span) for chat in chats[:TRACED] for span in chat.spans]
    ctx.record("rollout/truncated", [chat.truncated for chat in chats], kind="share")
    ctx.record("rollout/called", [chat.calls > 0 for chat in chats], kind="share")
    broken = [(chat, why) for chat in chats for why in chat.tools.broken]
    for chat, why in broken[:1]:
        first = f"the first, of sample {chat.number}: {visible(shortened(why))}"
        log.warning(f"{len(broken)} calls of tools raised or were late; {first}")
    errors, calls = sum(chat.tools.errors for chat in chats), sum(chat.calls for chat in chats)
    ctx.record("rollout/tool_errors", errors, calls, kind="share", over="calls")
    generated = [sum(chat.written) for chat in chats]
    ctx.record("tokens/generated", generated, kind="sum", over="tokens")
