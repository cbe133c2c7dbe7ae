"""One episode: an agent's requests, answered by the engine and recorded."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlgraph.nodes.agent.chat import WaitedFor, text_of_turn
from rlgraph.nodes.agent.parsers import ToolCall, beside_calls
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.endpoint.message import Message, SentCall
from rlgraph.nodes.endpoint.prompts import HistoryWriter
from rlgraph.nodes.endpoint.recording import Match, Recording
from rlgraph.nodes.endpoint.request import AgentRequest, RequestError, SentAnswer
from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.thinking import split_thinking
from rlgraph.ops import Generation, Request, Sampling

REPEATABLE = 16  # the last requests that a client may send again
CONTEXT_END = "context_length_exceeded"  # OpenAI's code where a conversation is too long
CallParser = Callable[[str], list[ToolCall]]


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        max_tokens: the most tokens of a prompt and its answer together.
        max_turn_tokens: the most tokens of an answer; None: as many as are left.
        max_turns: the most answers.
    """

    max_tokens: int
    max_turn_tokens: int | None
    max_turns: int


@dataclass(eq=False)
class Episode:
    """One agent's work on one task.

    Invariants:
        - It answers requests until it is closed; its key then opens nothing.
        - ``error`` is the first failure that is not the client's; the run ends with it.
        - ``answered`` has, by the id of each response, the history that a later request may go on with.
    """

    number: int  # of the sample, in the whole batch
    seed: int
    engine: RequestBatcher
    prompts: HistoryWriter
    parser: CallParser
    limits: EpisodeLimits
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    recording: Recording = field(default_factory=Recording)
    answered: dict[str, AgentRequest] = field(default_factory=dict)
    turns: int = 0
    truncated: bool = False
    closed: bool = False
    error: Exception | None = None
    counts: Counter[str] = field(default_factory=Counter)  # by name, as retried or malformed_calls
    spans: list[WaitedFor] = field(default_factory=list)
    repeatable: OrderedDict[bytes, asyncio.Task[list[SentAnswer]]] = field(default_factory=OrderedDict)

    async def answer(self, asked: AgentRequest, digest: bytes, is_retry: bool) -> list[SentAnswer]:
        """Return the answers to a request; one that is sent again gets those that it got, or would have got.

        Raises:
            RequestError: it can't be answered, and why.
        """
        known = self.repeatable.get(digest)
        if is_retry and known is not None:
            self.counts["retried"] += 1
            return await asyncio.shield(known)
        task = asyncio.ensure_future(self._answer(asked))
        task.add_done_callback(_retrieve_error)
        self.repeatable[digest] = task
        if len(self.repeatable) > REPEATABLE:
            self.repeatable.popitem(last=False)
        return await asyncio.shield(task)  # a client that hangs up does not end it: it may ask again

    def before(self, response_id: str | None) -> AgentRequest | None:
        """Return the request and the answer of an earlier response, which a request goes on with.

        Raises:
            RequestError: there is none of that id.
        """
        if response_id is None:
            return None
        if response_id not in self.answered:
            raise RequestError(f"this episode has no response {response_id!r}", "not_found", 404)
        return self.answered[response_id]

    def prompt_length(self, asked: AgentRequest) -> int:
        """Return how many tokens a request's prompt has, without recording it.

        Raises:
            RequestError: its messages can't be written.
        """
        return len(self._prompt(self.recording.match(asked.history, asked.tools_text), asked)[0])

    def close(self) -> None:
        """Answer nothing any more."""
        self.closed = True
        for task in self.repeatable.values():
            task.cancel()

    @property
    def response(self) -> str:
        """Return the text of the last answer."""
        return self.recording.answers[-1].history[-1].text if self.recording.answers else ""

    def seconds_of(self, activity: str) -> float:
        """Return how long an activity took: generation."""
        return sum(end - start for name, start, end in self.spans if name == activity)

    async def _answer(self, asked: AgentRequest) -> list[SentAnswer]:
        self._check_open()
        match = self.recording.match(asked.history, asked.tools_text)
        try:
            prompt, behind, new_ids, reason = self._prompt(match, asked)
        except RequestError:
            self.counts["refused"] += 1
            raise
        limit = self._limit(len(prompt), asked)
        self.counts["left_out"] += len(asked.left_out)  # settings that the run does not follow
        context_end = self.recording.read(new_ids, behind)
        if reason:
            self.recording.reasons[reason] += 1
        if asked.samples > 1:
            self.recording.reasons["again"] += asked.samples - 1
        sampling = self._sampling(asked)
        calls = [self._draw(prompt, limit, sampling) for _ in range(asked.samples)]
        answers = []
        for drawn in await self._timed("generation", asyncio.gather(*calls)):
            answers.append(self._record(asked, match, context_end, len(prompt), drawn))
        return answers

    def _check_open(self) -> None:
        if self.error is not None:
            raise RequestError(f"the run has failed: {self.error}", "run_failed", 500)
        if self.closed:
            raise RequestError("this episode is over", "episode_over", 401)

    def _prompt(self, match: Match, asked: AgentRequest) -> tuple[list[int], int, list[int], str]:
        """Return a prompt, behind which recorded token its new ids stand, these, and why they begin a row."""
        answer, reason = match.answer, match.reason
        if answer is not None and match.new_messages:
            path = self.recording.path(answer.end)
            try:
                ids = self.prompts.behind(match.new_messages, path[-1])
                return [*path, *ids], answer.end, ids, reason
            except TemplateError:
                reason = reason or "template"
        try:
            ids = self.prompts.whole(asked.history, asked.tools)
        except TemplateError as error:
            raise RequestError(str(error), "template_error") from error
        return ids, -1, ids, reason

    def _limit(self, prompt_tokens: int, asked: AgentRequest) -> int:
        """Return the most tokens of an answer behind a prompt.

        Raises:
            RequestError: there is no room, or no turn left.
        """
        if self.turns + asked.samples > self.limits.max_turns:
            self.truncated = True
            law = f"the episode has had its {self.limits.max_turns} turns (max_turns)"
            raise RequestError(law, "too_many_turns")
        room = self.limits.max_tokens - prompt_tokens
        if room < 1:
            self.truncated = True
            law = f"the messages have {prompt_tokens} tokens; the episode allows {self.limits.max_tokens}"
            raise RequestError(f"{law} (max_tokens)", CONTEXT_END)
        return min(room, self.limits.max_turn_tokens or room, asked.max_tokens or room)

    def _sampling(self, asked: AgentRequest) -> Sampling | None:
        """Return how a request's tokens are drawn, where it asks for more than the run's own settings."""
        base = self.engine.sampling
        if not asked.stop:
            return None
        return replace(base, stop=[*base.stop, *asked.stop])

    async def _draw(self, prompt: Sequence[int], limit: int, sampling: Sampling | None) -> Generation:
        turn = self.turns
        self.turns += 1
        request = Request(tuple(prompt), [self.seed + turn], str(self.seed), limit)
        try:
            return await self.engine.generate((self.number, turn), request, sampling)
        except Exception as error:
            self.error = self.error or error
            raise RequestError(f"the engine failed: {error}", "engine_failed", 500) from error

    def _record(
        self, asked: AgentRequest, match: Match, context_end: int, prompt_tokens: int, drawn: Generation
    ) -> SentAnswer:
        number = len(self.recording.answers)
        text = self._text(drawn, asked)
        message = self._message(text, number, asked)
        self.recording.write(match.history, message, asked.tools_text, context_end, drawn)
        finish = "tool_calls" if message.calls else "stop"
        if not drawn.is_whole:
            finish = "length"
        response_id = f"{number}-{secrets.token_hex(8)}"
        self.answered[response_id] = replace(asked, history=(*match.history, message))
        texts: list[str] = []
        if asked.wants_logprobs:
            texts = [self.prompts.tokenizer.decode([token]) for token in drawn.tokens]
        return SentAnswer(response_id, message, finish, prompt_tokens, drawn, texts)

    def _text(self, drawn: Generation, asked: AgentRequest) -> str:
        """Return what an answer says: without its end token, or the text that ended it."""
        text = text_of_turn(self.prompts.tokenizer, drawn, self.engine.sampling.stop_token_ids)
        if drawn.finish == "text":
            places = [text.find(stop) for stop in asked.stop if stop in text]
            text = text[: min(places)] if places else text
        return text

    def _message(self, text: str, number: int, asked: AgentRequest) -> Message:
        """Return an answer as a message: what it thinks, says and calls.

        A call that can't be read is left in the text.
        """
        thinking, said = split_thinking(text)
        parsed = self.parser(text) if asked.tools else []
        malformed = [call for call in parsed if call.error]
        self.counts["calls"] += len(parsed)
        self.counts["malformed_calls"] += len(malformed)
        if parsed and not malformed:
            said = beside_calls(said)
        calls = []
        for place, call in enumerate(parsed):
            if not call.error:
                # nine letters and digits: the templates of Mistral take no other ids
                calls.append(SentCall(f"{number:05d}{place:04d}", call.name, _json(call.arguments)))
        return Message("assistant", said.strip(), thinking.strip(), tuple(calls))

    async def _timed(self, activity: str, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
        start = time.time()
        try:
            return await work
        finally:
            self.spans.append((activity, start, time.time()))


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False, separators=(",", ":"))


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Take note of a task's error, so that asyncio does not call it lost where its client has gone."""
    if not task.cancelled():
        task.exception()
