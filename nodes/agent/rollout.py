"""Sampling conversations: an agent loop leads each, a serve engine writes the policy's turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat

from rlgraph.errors import shortened, visible
from rlgraph.nodes.agent.chat import Chat, ChatLimits
from rlgraph.nodes.agent.live_chats import LiveChat, LiveChats, conversation
from rlgraph.nodes.agent.parsers import hermes
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.agent.template import TemplatePieces
from rlgraph.nodes.agent.toolbox import OfferedTool, Toolbox
from rlgraph.nodes.rollout.response_metrics import record_responses
from rlgraph.nodes.rollout.rollout import seed
from rlgraph.nodes.rollout.sampling import (
    CUTS_WITH_TEMPERATURE,
    SAMPLING_ROLES,
    AtLeastOne,
    Grammar,
    ResponseLimits,
    SamplingAttributes,
)
from rlgraph.nodes.support.lazy import numpy, torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.user_call import DaemonThreads
from rlgraph.ops import Context, Loop, Parser, Sampling, ServeEngine, Tool, op
from rlgraph.ops.column_types import boolean, float32, int64, prompt_tokens, prompts, samples, text, tokens

log = logging.getLogger(__name__)
TRACED = 32  # conversations on a device whose times a timeline has
BeginChat = Callable[[int, RequestBatcher, Executor], Chat]  # from a sample's place on this device


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
    when={**CUTS_WITH_TEMPERATURE, "forgotten": "forgets", "token_versions": "chunk"},
    stores={"turn": "int16"},
    assumes=("grammar",),
    roles={**SAMPLING_ROLES, "contexts": "forgets", "turns": "max_turns"},
)
def agent(
    model: ServeEngine,
    ctx: Context,
    prompt: int64[prompts, prompt_tokens],
    *,
    limits: ResponseLimits,
    sampling: SamplingAttributes,
    grammar: Grammar,
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
    """Sample ``n`` conversations from each prompt: turns of the policy and the answers of tools.

    ``tokens`` are exactly the ids that the engine read and wrote, in order; no turn is tokenised again.
    Messages from others are tokenised once, together with what the chat template writes around them.
    ``loss_mask`` is true on what the policy wrote, including end tokens, and ``rollout_logprobs`` are 0
    elsewhere. ``turn`` is t from the first token of the policy's turn t to the start of its next turn, so it
    covers the answers to that turn too; it is 0 in the prompt. ``responses`` is the text of the last turn. A
    sample is ``truncated`` if a limit ended it. A call that can't be parsed, names an unknown tool, fails or
    times out is answered with ``error: ...``. ``tool_rewards`` is the sum of the values that the ``reward``
    methods of the sample's tools return. Random numbers are as for ``rollout``; turn t of a sample uses its
    seed + t. Tools that are not async run in threads, where a call that timed out still runs to its end.
    Records ``rollout/length`` (tokens that the policy wrote), ``rollout/prompt_length``,
    ``rollout/truncated``, ``rollout/repetitive`` (of last turns), ``rollout/turns``, ``rollout/called`` (the
    fraction of samples that call a tool), ``rollout/tool_calls`` (calls per sample), ``rollout/tool_errors``
    (the fraction of calls that fail), ``tokens/generated`` (a total), and the seconds for which a
    conversation waited for the policy and for tools; with ``forgets``, ``rollout/forgot``, how often a
    conversation forgot tokens. ReAct: arXiv 2210.03629.

    With ``chunk``, which is set when generation streams, conversations that are unfinished when a round ends
    stay on their worker, along with their tools, and continue in the next round, with newer weights if there
    are any. A group moves on to the next step once all its conversations have ended. On the embedded engine a
    round is one call for at most ``chunk`` tokens of each turn that is waiting for the engine; conversations
    that wait for tools continue in a later round. On servers a round ends with the first group, or after a
    second, and cuts no turn. Either kind of round ends early if new weights or other devices wait for it.
    With ``order: in_order``, and when nothing streams, rounds of the embedded engine don't depend on time: a
    round is one call for all conversations and the answers of tools to it. ``token_versions`` is the version
    of the weights that drew each token, and -1 on what others wrote; ``tokens/generated`` counts the tokens
    of groups that have ended. A conversation starts again from its prompt if its worker is lost or its run is
    resumed. ``chunk`` is for steps before a filter with ``refill``.

    Attributes:
        n: conversations per prompt, at least 1.
        max_new_tokens: the most tokens after the prompt: all turns and the answers of tools together.
        max_total_tokens: the most tokens of a conversation, including its prompt; null: no such limit.
        stop: texts that end a turn; the text is part of the turn, up to the end of the token that completes
            it.
        stop_token_ids: ids of tokens that end a turn; the token is part of the turn.
        repetition_penalty: by how much tokens that are already in the turn become less likely; 1: not at all.
        min_new_tokens: the fewest tokens of a turn before its end token.
        regex: a regular expression that every turn matches (sglang only).
        json_schema: a JSON schema that every turn conforms to (sglang only).
        loop: the function that decides who speaks when; by default tool_loop: turns until one calls no tool.
        tools: the tools that the policy may call, by the names that it uses. To show them in the prompt, give
            data.prompts ``tools: "${nodes.ROLLOUT.tools}"``.
        parser: how calls are written in the text; by default hermes.
        max_turns: turns of the policy, 1 to 32767.
        max_turn_tokens: the most tokens of one turn; a turn that reaches it ends the conversation. null: as
            many as are left.
        max_calls: the most calls per conversation; further calls are answered with an error.
        max_result_tokens: the most tokens of a tool's answer to one call.
        truncate: where a longer answer is cut: left, right or middle.
        tool_timeout: seconds that a call may take, above 0.
        parallel: concurrent calls per device to tools that are not async.
        template_options: further arguments of the chat template, as for data.prompts.
        forgets: whether the loop may hide earlier tokens from later turns (``chat.forget``). ``tokens`` still
            holds all of them; ``forgotten`` is the length of the row from which a token is hidden, 0 if it
            never is. ``segment.contexts`` makes rows of what the policy saw.
        chunk: the most tokens of a turn that one round draws; null: a round ends with the last conversation.

    Example:
        rollout: {op: rollout.agent, model: policy, n: 8, max_new_tokens: 512,
                  tools: {calculator: {kind: calculator}}}
    """
    n = limits.n
    rows = []  # of each sample its number in the whole batch
    for row in ctx.rows:
        rows += [int(row) * n + k for k in range(n)]
    prompt_ids = prompt.tolist()
    longest = limits.of_prompts(ctx, prompt_ids)
    settings = sampling.settings(limits.max_new_tokens, grammar)
    offers = OfferedTool.of(tools or {})
    template_pieces = TemplatePieces(model.tokenizer, template_options)
    chat_limits = ChatLimits(
        max_new_tokens=limits.max_new_tokens,
        max_turn_tokens=max_turn_tokens,
        max_turns=max_turns,
        max_calls=max_calls,
        max_result_tokens=max_result_tokens,
        truncate=truncate,
        forgets=forgets,
    )

    def begin(place: int, engine: RequestBatcher, threads: Executor) -> Chat:
        return Chat(
            number=rows[place],
            prompt=prompt_ids[place // n],
            seed=seed(ctx.seed, ctx.iteration, ctx.node, rows[place]),
            engine=engine,
            pieces=template_pieces,
            tools=Toolbox(offers, place // n, threads, tool_timeout),
            parser=parser.body if parser else hermes,
            limits=replace(chat_limits, max_new_tokens=longest[place // n]),
        )

    if chunk and ctx.resumes:
        live = _live_chats(ctx, model, settings, chunk, parallel)
        chats, rewards = _go_on(ctx, live, len(rows), n, begin, loop)
    else:
        chats, rewards = _converse_to_the_end(model, settings, parallel, len(rows), n, begin, loop)
    _record(ctx, chats)
    return _columns(chats, n, rewards)


def _live_chats(ctx: Context, model: ServeEngine, sampling: Sampling, chunk: int, parallel: int) -> LiveChats:
    """Return the node's conversations on this worker, which outlive a call of the op."""
    live = ctx.session.get("live")
    if not isinstance(live, LiveChats):
        live = LiveChats(RequestBatcher(model, sampling, chunk), parallel)
        ctx.session["live"] = live
    live.engine.sampling = sampling
    return live


def _go_on(
    ctx: Context, live: LiveChats, samples: int, n: int, begin: BeginChat, loop: Loop | None
) -> tuple[list[Chat], list[float]]:
    """Drive conversations for a round; return those of the groups that have ended, and their tool rewards."""
    keys = ctx.begun[0].tolist() if ctx.begun else []
    is_due = ctx.is_due if ctx.yields else None

    def begin_here(place: int) -> Chat:
        return begin(place, live.engine, live.threads)

    chats = live.round(keys, samples, n, begin_here, loop, is_due)
    groups = [chats[start : start + n] for start in range(0, len(chats), n)]
    ended = _leave_unfinished(ctx, groups)
    rewards = [live_chat.reward.result() for live_chat in ended]
    return [live_chat.chat for live_chat in ended], rewards


def _leave_unfinished(ctx: Context, groups: Sequence[Sequence[LiveChat]]) -> list[LiveChat]:
    """Leave the groups in which a conversation goes on to the next round; return those of the others."""
    ended: list[LiveChat] = []
    ended_groups = []
    unfinished_keys = []
    for number, group in enumerate(groups):
        has_ended = all(live_chat.reward.done() for live_chat in group)
        if has_ended:
            ended_groups.append(number)
            ended += group
        else:
            unfinished_keys += [live_chat.key for live_chat in group]
    ctx.leave(numpy.array(ended_groups, numpy.int64), torch.tensor(unfinished_keys, dtype=torch.int64))
    return ended


def _converse_to_the_end(
    model: ServeEngine,
    sampling: Sampling,
    parallel: int,
    samples: int,
    n: int,
    begin: BeginChat,
    loop: Loop | None,
) -> tuple[list[Chat], list[float]]:
    """Hold conversations from their prompts to their ends; return them and their tool rewards."""
    engine, threads = RequestBatcher(model, sampling), DaemonThreads(parallel)
    chats = [begin(place, engine, threads) for place in range(samples)]
    try:
        return chats, asyncio.run(_all(engine, chats, n, loop))
    finally:
        engine.close()
        threads.shutdown(wait=False, cancel_futures=True)


async def _all(engine: RequestBatcher, chats: Sequence[Chat], n: int, loop: Loop | None) -> list[float]:
    engine.going_on.update(chat.number for chat in chats)
    conversations = asyncio.gather(*(conversation(chat, n, loop) for chat in chats))
    rewards, _ = await asyncio.gather(conversations, engine.in_step())
    return rewards


def _columns(chats: Sequence[Chat], n: int, rewards: Sequence[float]) -> Conversations:
    tokens = []
    masks = []
    logprobs = []
    turn_of = []
    forgotten = []
    versions = []
    for chat in chats:
        prompt_tokens = len(chat.prompt)
        tokens.append([*chat.prompt, *chat.tokens])
        masks.append([False] * prompt_tokens + chat.written)
        logprobs.append([0.0] * prompt_tokens + chat.logprobs)
        turn_of.append([0] * prompt_tokens + chat.turn_of)
        forgotten.append([0] * prompt_tokens + chat.forgotten)
        versions.append([-1] * prompt_tokens + chat.versions)
    return Conversations(
        tokens=Ragged.of(tokens, torch.int64),
        loss_mask=Ragged.of(masks, torch.bool),
        rollout_logprobs=Ragged.of(logprobs, torch.float32),
        responses=[chat.response for chat in chats],
        group=torch.tensor([chat.number // n for chat in chats], dtype=torch.int64),
        truncated=torch.tensor([chat.truncated for chat in chats], dtype=torch.bool),
        turn=Ragged.of(turn_of, torch.int16),
        turns=torch.tensor([chat.turns for chat in chats], dtype=torch.int64),
        tool_calls=torch.tensor([chat.calls for chat in chats], dtype=torch.int64),
        tool_rewards=torch.tensor(rewards, dtype=torch.float32),
        forgotten=Ragged.of(forgotten, torch.int64),
        token_versions=Ragged.of(versions, torch.int64),
    )


def _record(ctx: Context, chats: Sequence[Chat]) -> None:
    lengths = [sum(chat.written) for chat in chats]
    record_responses(
        ctx,
        lengths=lengths,
        prompt_lengths=[len(chat.prompt) for chat in chats],
        truncated=[chat.truncated for chat in chats],
        responses=[chat.response for chat in chats],
    )
    turns = [chat.turns for chat in chats]
    ctx.record("rollout/turns", turns)
    ctx.record("rollout/turns_", turns, kind=("min", "max"))
    ctx.record("rollout/called", [chat.calls > 0 for chat in chats], kind="share")
    ctx.record("rollout/tool_calls", [chat.calls for chat in chats])
    forgets = any(chat.limits.forgets for chat in chats)
    if forgets:
        forgot = [len({*chat.forgotten} - {0}) for chat in chats]
        ctx.record("rollout/forgot", forgot)
        ctx.record("rollout/forgot_", forgot, kind=("min", "max"))
    tool_errors = sum(chat.tools.errors for chat in chats)
    tool_calls = sum(chat.calls for chat in chats)
    ctx.record("rollout/tool_errors", tool_errors, tool_calls, kind="share", over="calls")
    ctx.record("tokens/generated", lengths, kind="sum", over="tokens")
    for activity in ("generation", "tools"):
        seconds = [chat.seconds_of(activity) for chat in chats]
        ctx.record(f"perf/{activity}_seconds/", seconds, kind=("mean", "max"))
    spans = []
    for chat in chats[:TRACED]:
        spans += [(f"sample {chat.number}", *span) for span in chat.spans]
    ctx.spans = spans
    broken = []
    for chat in chats:
        broken += [(chat.number, reason) for reason in chat.tools.broken]
    if broken:
        number, reason = broken[0]
        description = f"the first, of sample {number}: {visible(shortened(reason))}"
        log.warning(f"{len(broken)} calls of tools raised or were late; {description}")
