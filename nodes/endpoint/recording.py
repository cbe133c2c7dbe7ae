"""The record of one episode: every token that the policy read and wrote, as a tree.

    read    system, question                          0 1 2 3
    written the policy's answer 0                             4 5
    read    a tool's result                                       6 7
    written answer 1                                                  8 9
    read    another result: the agent went back                   10
    written answer 2                                                  11 12

Each token names the token before it. A path from the root to an answer is exactly what the engine read and
wrote for it, so a path is a row to train on; tokens that paths share are recorded once.

A request's history is matched to recorded answers by meaning (``message.difference``). Where a history
continues an answer, its prompt is the tokens of that answer's path and those of the new messages. Where it
does not simply do so, the record counts why, by comparing it with the answer that has most in common with it:

    first           the first request of the episode
    system          another system prompt
    tools           other tools
    edited_turn     a turn of the policy says something else, or is not one of its own
    struck_turn     a turn of the policy is missing
    thinking        a turn's thinking is another
    edited_message  a message of somebody else says something else, or is missing
    went_back       the history ends before the last answer, or continues an earlier one
    again           the same history once more
    template        the chat template can't write the new messages alone
    another         nothing in common, as of a sub-agent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlgraph.nodes.endpoint.message import Message, difference
from rlgraph.ops import Generation

ROOT = -1  # the parent of a first token


@dataclass(frozen=True)
class RecordedAnswer:
    """An answer of the policy, and where it stands in the record.

    Attributes:
        number: answers are counted from 0 in an episode.
        history: the messages that it answers, and itself as the last one.
        tools: the tools that were offered to it, as JSON.
        context_end: the last token that it read.
        end: its last token.
    """

    number: int
    history: Sequence[Message]
    tools: str
    context_end: int
    end: int


@dataclass(frozen=True)
class Match:
    """The place of a request's history in the record.

    Attributes:
        answer: the last answer that the history continues; None: it continues none.
        new_messages: the messages of the history behind that answer.
        history: all messages, those up to the answer as they were recorded.
        reason: why its row is a new one; "" where it goes on with one.
    """

    answer: RecordedAnswer | None
    new_messages: Sequence[Message]
    history: Sequence[Message]
    reason: str


@dataclass
class Recording:
    """The tokens of one episode.

    Invariants:
        - ``tokens``, ``parents``, ``calls``, ``logprobs`` and ``versions`` have one value per token, and
          are only ever added to; a token's parent stands before it.
        - ``calls`` is the number of the answer that wrote a token, and -1 for a token that was read.
        - ``children`` has each token by its parent and id; of equal ones the first.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # nats; 0 for a token that was read
    versions: list[int] = field(default_factory=list)  # of the weights; -1 for a token that was read
    answers: list[RecordedAnswer] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # why rows began
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    def match(self, history: Sequence[Message], tools: str) -> Match:
        """Return where a history stands, which offers these tools."""
        answer = self._continued(history, tools)
        if answer is None:
            return Match(None, history, history, self._reason(None, history, tools))
        new_messages = history[len(answer.history) :]
        recorded_history = (*answer.history, *new_messages)
        return Match(answer, new_messages, recorded_history, self._reason(answer, history, tools))

    def path(self, end: int) -> list[int]:
        """Return the ids of the tokens from the root to a place."""
        ids = []
        place = end
        while place != ROOT:
            ids.append(self.tokens[place])
            place = self.parents[place]
        return ids[::-1]

    def read(self, ids: Sequence[int], behind: int = ROOT) -> int:
        """Record that the policy read tokens behind a place; return the place of the last.

        Tokens that are recorded there already are taken for these.
        """
        place = behind
        for token in ids:
            known = self.children.get((place, token))
            place = self._add(place, token, -1, 0.0, -1) if known is None else known
        return place

    def write(
        self, history: Sequence[Message], said: Message, tools: str, context_end: int, drawn: Generation
    ) -> RecordedAnswer:
        """Record what the policy wrote behind a place, as its answer to a history."""
        number = len(self.answers)
        place = context_end
        versions = drawn.versions or [-1] * len(drawn.tokens)
        for token, logprob, version in zip(drawn.tokens, drawn.logprobs, versions, strict=True):
            place = self._add(place, token, number, logprob, version)
        answer = RecordedAnswer(number, (*history, said), tools, context_end, place)
        self.answers.append(answer)
        return answer

    def _add(self, parent: int, token: int, call: int, logprob: float, version: int) -> int:
        place = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.calls.append(call)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.children.setdefault((parent, token), place)
        return place

    def _continued(self, history: Sequence[Message], tools: str) -> RecordedAnswer | None:
        """Return the answer that most of a history leads to; of several the last."""
        best = None
        for answer in self.answers:
            length = len(answer.history)
            if answer.tools != tools or length > len(history):
                continue
            if best is not None and length < len(best.history):
                continue
            if _common(answer.history, history) == length:
                best = answer
        return best

    def _reason(self, answer: RecordedAnswer | None, history: Sequence[Message], tools: str) -> str:
        """Return why a history begins a row; "" where it goes on with the row of an answer."""
        if not self.answers:
            return "first"
        if answer is not None:
            new_messages = history[len(answer.history) :]
            has_new_turns = any(message.role == "assistant" for message in new_messages)
            if not new_messages or self._is_continued(answer):
                return "went_back"
            return "edited_turn" if has_new_turns else ""

        def nearness(known: RecordedAnswer) -> tuple[int, bool, bool, int]:
            common = _common(known.history, history)
            has_same_system = _system(known.history) == _system(history)
            is_the_same = len(known.history) == len(history) + 1
            return common, has_same_system, is_the_same, known.number

        return _change(max(self.answers, key=nearness), history, tools)

    def _is_continued(self, answer: RecordedAnswer) -> bool:
        """Return whether another answer was given behind this one."""
        length = len(answer.history)
        for later in self.answers[answer.number + 1 :]:
            if len(later.history) > length and later.history[length - 1] is answer.history[-1]:
                return True
        return False


def _system(history: Sequence[Message]) -> str:
    """Return what the system prompt at the beginning of a history says; "" where there is none."""
    return history[0].said if history[0].role == "system" else ""


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Return how many messages at the beginning of two histories mean the same."""
    count = 0
    for recorded, sent in zip(one, other, strict=False):
        if recorded is not sent and difference(recorded, sent):
            break
        count += 1
    return count


def _change(answer: RecordedAnswer, history: Sequence[Message], tools: str) -> str:
    """Return what is different in a history that does not continue an answer, from what the answer saw."""
    common = _common(answer.history, history)
    length = len(answer.history)
    if common in (length, len(history)) and answer.tools != tools:
        return "tools"
    if common == len(history):
        return "again" if common == length - 1 else "went_back"
    before, now = answer.history[common], history[common]
    if "system" in (before.role, now.role):
        return "system"
    if before.role == "assistant":
        if now.role != "assistant":
            return "struck_turn"
        return "thinking" if difference(before, now) == "thinking" else "edited_turn"
    has_common_question = any(message.role != "system" for message in history[:common])
    return "edited_message" if has_common_question else "another"
