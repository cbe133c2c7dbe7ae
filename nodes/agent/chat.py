"""A conversation as tokens: what the policy wrote, what others said, and the limits that end it.

    prompt            question, tools                  read
    chat.turn()       <tool_call>...</tool_call>       written: loss_mask is true
    chat.use(calls)   what the tools answered          read
    chat.turn()       the answer                       written

Ids only ever join the end: each turn's prompt is all that came before, as it was written and read.

An agent loop is an async function that leads a conversation: one shipped below, or ``my_loops.py:name``.
Parameters behind ``chat`` are columns of the node, with the value of this conversation's prompt; those behind
the * are attributes.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlgraph.errors import RunError
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.agent.template import TemplatePieces
from rlgraph.nodes.agent.toolbox import Toolbox
from rlgraph.nodes.support.chat_template import CutSide, cut
from rlgraph.ops import Generation, Request

WaitedFor = tuple[str, float, float]  # generation or tools, and from when to when: seconds since the epoch
MARK = "..."  # replaces the part of an answer that was cut


class LimitReached(Exception):
    """The conversation has no room to go on: its agent loop ends here, and the sample is truncated."""


@dataclass(frozen=True)
class ChatLimits:
    """Limits at which a conversation ends. Tokens of tools and users count as well as those of the policy."""

    max_new_tokens: int
    max_turn_tokens: int | None
    max_turns: int
    max_calls: int
    max_result_tokens: int
    truncate: CutSide
    forgets: bool = False


@dataclass(frozen=True)
class Turn:
    """A turn of the policy: its text without the end token, the calls in it, and its ids."""

    text: str
    calls: Sequence[ToolCall]
    tokens: Sequence[int]


@dataclass
class Chat:
    """One sample's conversation. An agent loop calls ``turn``, ``use`` and ``say``; the rest is for reading.

    Invariants:
    * ``tokens``, ``written``, ``logprobs``, ``versions``, ``forgotten`` and ``turn_of`` have one value per
      token behind the prompt, and tokens are only ever added at the end;
    * ``tokens`` stays below ``limits.max_new_tokens`` by at least one where a turn is still to be written.

    Example:
        async def loop(chat: Chat) -> None:
            while (turn := await chat.turn()).calls:
                await chat.use(turn.calls)
    """

    number: int  # the sample's, in the whole batch
    prompt: Sequence[int]
    seed: int
    engine: RequestBatcher
    pieces: TemplatePieces
    tools: Toolbox
    parser: Callable[[str], list[ToolCall]]
    limits: ChatLimits
    tokens: list[int] = field(default_factory=list)  # ids behind the prompt
    written: list[bool] = field(default_factory=list)  # true where the policy wrote the token
    logprobs: list[float] = field(default_factory=list)  # nats per token, 0 where others speak
    versions: list[int] = field(default_factory=list)  # of the weights that drew it; -1 where others speak
    forgotten: list[int] = field(default_factory=list)  # the row's length when it was forgotten; 0: never
    turn_of: list[int] = field(default_factory=list)  # the turn that wrote a token, or that it answers
    turns: int = 0
    calls: int = 0
    response: str = ""  # text of the newest turn
    truncated: bool = False
    spans: list[WaitedFor] = field(default_factory=list)  # what it waited for

    async def turn(self) -> Turn:
        """Let the policy write a turn.

        Raises:
            LimitReached: there is no turn or token left, or this turn came to the limit before its end.
        """
        room = self.limits.max_new_tokens - len(self.tokens)
        if self.turns == self.limits.max_turns or room < 1:
            raise LimitReached
        limit = min(room, self.limits.max_turn_tokens or room)
        request = Request(
            (*self.prompt, *self.visible_tokens), [self.seed + self.turns], str(self.seed), limit
        )
        turn_key = (self.number, self.turns)
        self.turns += 1
        turn = self.turns
        generation = await self._timed("generation", self.engine.generate(turn_key, request))
        self._join(generation.tokens, turn, generation)
        self.response = self.pieces.tokenizer.decode(list(generation.tokens), skip_special_tokens=True)
        if not generation.is_whole:
            raise LimitReached
        text = text_of_turn(self.pieces.tokenizer, generation, self.engine.sampling.stop_token_ids)
        calls = self.parser(text) if self.tools.offers else []
        return Turn(text, calls, list(generation.tokens))

    async def use(self, calls: Sequence[ToolCall]) -> list[str]:
        """Run calls at the same time, and let the policy read the answers in their order.

        Calls beyond ``max_calls`` are answered with an error. Without calls nothing is read.

        Raises:
            LimitReached: no turn is left in which to read them, or no room for them.
        """
        if not calls:
            return []
        if self.turns == self.limits.max_turns:
            raise LimitReached
        remaining = max(self.limits.max_calls - self.calls, 0)
        refused = f"error: no more than {self.limits.max_calls} calls are allowed"
        answers = await self._timed("tools", asyncio.gather(*map(self.tools.run, calls[:remaining])))
        answers = [*answers, *[refused] * (len(calls) - remaining)]
        self.calls += min(len(calls), remaining)
        messages = []
        for call in calls:
            is_known = call.name in self.tools.offers
            messages.append(("tool", call.name if is_known else "unknown"))
        self._read(messages, answers)
        return answers

    def say(self, role: str, text: str) -> None:
        """Let the policy read a message, such as one of role ``user``. Its own turn must have ended.

        Raises:
            LimitReached: there is no room for it.
        """
        self._read([(role, "")], [text])

    async def _timed(self, activity: str, waiting: Awaitable[Any]) -> Any:
        start = time.time()
        try:
            return await waiting
        finally:
            self.spans.append((activity, start, time.time()))

    def seconds_of(self, activity: str) -> float:
        """Return how long the conversation waited for an activity: generation or tools."""
        return sum(end - start for name, start, end in self.spans if name == activity)

    @property
    def visible_tokens(self) -> list[int]:
        """Return the ids behind the prompt that the policy has not forgotten."""
        return [token for token, length in zip(self.tokens, self.forgotten, strict=True) if not length]

    def forget(self, first: int, end: int) -> None:
        """Let later turns not see ``tokens[first:end]``, such as the thinking of a turn or an old answer.

        Raises:
            RunError: the rollout says nothing of it: ``forgets: true``.
        """
        if not self.limits.forgets:
            raise RunError(
                "the agent loop forgets tokens; set: {ROLLOUT.forgets: true}, and train on segments"
            )
        length = len(self.prompt) + len(self.tokens)
        self.forgotten[first:end] = [earlier or length for earlier in self.forgotten[first:end]]

    def _read(self, messages: Sequence[tuple[str, str]], texts: Sequence[str]) -> None:
        """Let the policy read messages (role and name), of which those of tools are cut to their limit."""
        limits = self.limits
        contents = [self.pieces.content(text) for text in texts]
        if messages[0][0] == "tool":
            mark = self.pieces.content(MARK)
            contents = [cut(ids, limits.max_result_tokens, limits.truncate, mark) for ids in contents]
        ids = self.pieces.between(messages, contents, (*self.prompt, *self.visible_tokens)[-1])
        if len(self.tokens) + len(ids) >= limits.max_new_tokens:
            raise LimitReached
        self._join(ids, self.turns)

    def _join(self, ids: Sequence[int], turn: int, new_ids: Generation | None = None) -> None:
        self.tokens += ids
        self.forgotten += [0] * len(ids)
        self.turn_of += [turn] * len(ids)
        self.written += [new_ids is not None] * len(ids)
        self.logprobs += new_ids.logprobs if new_ids else [0.0] * len(ids)
        self.versions += new_ids.versions if new_ids else [-1] * len(ids)


def text_of_turn(tokenizer: Any, generation: Generation, stop_token_ids: Collection[int]) -> str:
    """Return what a turn says: without its end token, but with one of the graph that is text."""
    tokens = list(generation.tokens)
    if generation.finish == "stop":
        is_of_graph = tokens[-1] in stop_token_ids
        is_special = tokens[-1] in tokenizer.all_special_ids
        if is_special or not is_of_graph:
            tokens = tokens[:-1]
    return str(tokenizer.decode(tokens))


async def single_turn(chat: Chat) -> None:
    """The policy answers once; tools are shown but not run.

    Example:
        rollout: {op: rollout.agent, model: policy, loop: {kind: single_turn}, max_new_tokens: 256}
    """
    await chat.turn()


async def tool_loop(chat: Chat, *, forget: str | None = None) -> None:
    """The policy writes turns until one calls no tool (ReAct, arXiv 2210.03629).

    The calls of a turn run at the same time.

    Attributes:
        forget: the text that ends a turn's thinking, such as "</think>": later turns see only what follows
            it. It needs ``forgets: true``. null: they see everything.

    Example:
        rollout: {op: rollout.agent, model: policy, loop: {kind: tool_loop}, max_new_tokens: 256,
                  tools: {calculator: {kind: calculator}}}
    """
    decode = chat.pieces.tokenizer.decode
    while (turn := await chat.turn()).calls:
        if forget and forget in turn.text:
            ids = list(turn.tokens)
            turn_start = len(chat.tokens) - len(ids)
            end = bisect_left(range(len(ids)), True, key=lambda n: str(forget) in decode(ids[:n]))
            chat.forget(turn_start, turn_start + end)
        await chat.use(turn.calls)
