"""Conversations on a real engine: tokens in are tokens out, limits hold, neighbours change nothing."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flattened import call_op
from rlgraph.errors import RunError
from rlgraph.nodes.agent.chat import Chat, single_turn, tool_loop
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import Conversations, agent
from rlgraph.nodes.rollout.rollout import rollout
from rlgraph.nodes.score.segment import contexts
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Generation, Loop, Parser, Request, Sampling, Tool
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

PROMPTS = [[3, 20, 21, 1, 4], [3, 22, 1, 4], [3, 23, 24, 25, 1, 4]]


class Recorded(TransformersEngine):
    """The embedded engine, with a list of what it read and wrote, a line a sample."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seen: list[tuple[list[int], list[int]]] = []

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, enough: Any = None, stays: bool = False
    ) -> list[list[Generation]]:
        made = super().generate(requests, sampling, enough, stays)
        for request, many in zip(requests, made, strict=True):
            self.seen += [(list(request.prompt), list(one.tokens)) for one in many]
        return made


def recorded(folder: Path) -> Recorded:
    """With a model of random weights in ``folder``, whose tokens are bytes and words."""
    make_model(folder, seed=0)
    made = Recorded(str(folder))
    made.load_pretrained()
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A model of random weights, one in eight of whose tokens ends a turn, so that turns do end."""
    made = recorded(tmp_path_factory.mktemp("model"))
    made.stops = torch.tensor([1, *range(8, 288, 8)])
    return made


def context(rows: Sequence[int] = (0, 1, 2), seed: int = 0) -> Context:
    return Context("rollout", seed, iteration=3, rows=list(rows), total_rows=len(PROMPTS))


def converse(engine: Any, rows: Sequence[int] = (0, 1, 2), seed: int = 0, **attributes: Any) -> Conversations:
    engine.seen = []
    prompt = Ragged.of([PROMPTS[row] for row in rows], torch.int64)
    out = call_op(agent, engine, context(rows, seed), prompt, **{"max_new_tokens": 40, **attributes})
    assert isinstance(out, Conversations)
    return out


def always(text: str) -> list[ToolCall]:
    """Two calls in every turn."""
    return [ToolCall("echo", {"text": text}), ToolCall("echo", {"text": "again"})]


def tool(body: Callable[..., Any], **attributes: Any) -> Tool:
    return Tool(body, attributes, {})


def looped(body: Callable[..., Any], **attributes: Any) -> Loop:
    return Loop(body, attributes, {})


ALWAYS = Parser(always, {}, {})


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 3),
    answer=st.text(st.sampled_from("ab<|end|>é"), max_size=12),
    max_new_tokens=st.integers(1, 80),
    max_turns=st.integers(1, 4),
    max_turn_tokens=st.one_of(st.none(), st.integers(1, 9)),
    max_calls=st.integers(1, 5),
    max_result_tokens=st.integers(1, 9),
)
def test_what_comes_out_is_what_the_engine_read_and_wrote(
    engine: Recorded, seed: int, n: int, answer: str, **limits: Any
) -> None:
    def echo(text: str) -> str:
        return answer

    out = converse(engine, seed=seed, n=n, tools={"echo": tool(echo)}, parser=ALWAYS, **limits)
    whole, mask, logprobs = (column.tolist() for column in out[:3])
    unread = list(engine.seen)
    for row, ids in enumerate(whole):
        start = len(PROMPTS[row // n])
        assert ids[:start] == PROMPTS[row // n]
        assert len(ids) - start <= limits["max_new_tokens"]
        turns, at, numbers = 0, start, out.turn[row].tolist()
        while at < len(ids):  # each turn's prompt is all before it, and what it wrote stands behind it
            turn = next(one for one in unread if one[0] == ids[:at] and one[1] == ids[at : at + len(one[1])])
            unread.remove(turn)
            end = at + len(turn[1])
            assert mask[row][at:end] == [True] * (end - at)
            turns, at = turns + 1, end
            while at < len(ids) and not mask[row][at]:
                assert logprobs[row][at] == 0
                at += 1
            assert {*numbers[end - len(turn[1]) : at]} == {turns}  # what answers a turn is of it
        assert not any(numbers[:start])
        assert not any(mask[row][:start]) and not any(logprobs[row][:start])
        assert turns == out.turns[row] <= limits["max_turns"]
        assert out.tool_calls[row] <= limits["max_calls"]
        assert sum(mask[row]) <= (limits["max_turn_tokens"] or 80) * turns
    assert unread == []
    assert out.group.tolist() == [row // n for row in range(3 * n)]


def test_an_error_of_the_engine_is_of_a_batch_and_says_so_once(
    engine: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: Any) -> list[list[Generation]]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "generate", generate)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        converse(engine, n=4)
    assert raised.value.__notes__ == ["it was in a batch of 12 turns"]


def test_one_turn_is_what_rollout_samples(engine: Recorded) -> None:
    prompt = Ragged.of(PROMPTS, torch.int64)
    ctx = context()
    plain = call_op(rollout, engine, ctx, prompt, n=4, max_new_tokens=12, top_p=0.9)
    out = converse(engine, n=4, max_new_tokens=12, top_p=0.9, loop=looped(single_turn))
    for name, column in plain._asdict().items():
        other = getattr(out, name, None)
        if isinstance(column, Ragged):
            assert torch.equal(column.values, other.values) and torch.equal(column.offsets, other.offsets)
        else:
            assert torch.equal(column, other) if isinstance(column, torch.Tensor) else column == other
    metrics = {name: value for name, value in ctx.metrics.items() if name != "rollout/truncated"}
    again = context()
    call_op(agent, engine, again, prompt, n=4, max_new_tokens=12, top_p=0.9)
    assert metrics.items() <= again.metrics.items()


def test_a_sample_depends_on_no_neighbour(engine: Recorded) -> None:
    def echo(text: str) -> str:
        return text[:3]

    attributes = {"n": 2, "tools": {"echo": tool(echo)}, "parser": ALWAYS}
    together = converse(engine, **attributes)
    alone = [converse(engine, rows=[row], **attributes) for row in range(3)]
    assert together.tokens.tolist() == [ids for one in alone for ids in one.tokens.tolist()]
    assert together.responses == [text for one in alone for text in one.responses]
    apart = torch.cat([one.rollout_logprobs.values for one in alone])
    assert torch.allclose(together.rollout_logprobs.values, apart, atol=1e-5)


def test_how_long_tools_take_changes_no_bit(engine: Recorded) -> None:
    def run(pause: float) -> Conversations:
        drawn = random.Random(pause)

        def echo(text: str) -> str:
            time.sleep(drawn.random() * pause)
            return text[:3]

        return converse(engine, n=4, tools={"echo": tool(echo)}, parser=ALWAYS)

    fast, slow = run(0.0), run(0.05)
    assert torch.equal(fast.tokens.values, slow.tokens.values)
    assert torch.equal(fast.rollout_logprobs.values, slow.rollout_logprobs.values)


def test_limits(engine: Recorded) -> None:
    def echo(text: str) -> str:
        return "0123456789"

    tools = {"echo": tool(echo)}
    one = converse(engine, max_new_tokens=400, max_turns=1, tools=tools, parser=ALWAYS)
    assert one.turns.tolist() == [1, 1, 1] and one.truncated.all() and not one.tool_calls.any()
    few = converse(
        engine, max_new_tokens=400, max_turns=3, max_calls=3, tools=tools, parser=ALWAYS, max_result_tokens=6
    )
    read = [engine.tokenizer.decode(ids) for ids in few.tokens.tolist()]
    assert few.tool_calls.tolist() == [3, 3, 3]
    assert all(text.count("<|tool|>01...9<|end|>") == 3 for text in read)  # the middle of each is cut
    assert all(
        text.count("<|tool|>error: n...d<|end|>") == 1 for text in read
    )  # "error: no more than 3 calls ..."


def test_without_tools_or_calls_a_turn_is_the_last(engine: Recorded) -> None:
    out = converse(engine, max_new_tokens=400, parser=ALWAYS)
    assert out.turns.tolist() == [1, 1, 1] and not out.truncated.any()
    ended = [ids[-1] in engine.stops for ids in out.tokens.tolist()]
    assert ended == [True] * 3


def test_a_loop_of_ones_own_speaks_for_others(engine: Recorded) -> None:
    async def persist(chat: Chat, answer: str, *, tries: int) -> None:
        for _ in range(tries):
            turn = await chat.turn()
            if turn.text == answer:
                return
            chat.say("user", f"not {answer}")

    loop = Loop(persist, {"tries": 2}, {"answer": ["a", "b", "c"]})
    out = converse(engine, max_new_tokens=300, loop=loop)
    for ids, answer in zip(out.tokens.tolist(), "abc", strict=True):
        assert engine.tokenizer.decode(ids).count(f"<|user|>not {answer}<|end|><|assistant|>") == 2
    assert out.turns.tolist() == [2, 2, 2]


def test_segments_are_the_contexts_that_the_engine_read(engine: Recorded) -> None:
    def echo(text: str) -> str:
        return text[:2]

    decode, mark = engine.tokenizer.decode, "e"
    loop, tools = looped(tool_loop, forget=mark), {"echo": tool(echo)}
    found = converse(engine, n=3, max_new_tokens=80, tools=tools, parser=ALWAYS, loop=loop, forgets=True)
    ctx = Context("segments", 0, 0, over="segments")
    made = contexts(ctx, found.tokens, found.loss_mask, found.forgotten, most=8)
    rows = made.segment_tokens.tolist()
    assert len(rows) > len(found.tokens) == int((made.segment_count > 0).sum())
    trained = {(tuple(row[:end]), end) for row in rows for end in range(len(row) + 1)}
    read = [(tuple(prompt) + tuple(new), len(prompt) + len(new)) for prompt, new in engine.seen]
    assert {*read} <= trained
    assert sum(len(new) for _, new in engine.seen) == int(made.segment_mask.values.sum())
    hidden = [found.tokens[row][found.forgotten[row] > 0].tolist() for row in range(len(found.tokens))]
    assert any(hidden) and all(mark in decode(ids[-1:]) for ids in hidden if ids)


def test_a_loop_forgets_only_where_the_rollout_says_so(engine: Recorded) -> None:
    async def forgetful(chat: Chat) -> None:
        await chat.turn()
        chat.forget(0, 1)

    with pytest.raises(RunError, match="forgets: true"):
        converse(engine, loop=looped(forgetful))


def test_turns_of_one_sample_may_be_asked_for_at_the_same_time(engine: Recorded) -> None:
    """Two conversations of the loop's own making, of which the better is kept: both are in one round."""

    async def best_of_two(chat: Chat) -> None:
        other = replace(chat, seed=chat.seed + 1000, tokens=[], written=[], logprobs=[])
        await asyncio.gather(chat.turn(), other.turn())
        if sum(other.logprobs) > sum(chat.logprobs):
            chat.tokens, chat.written, chat.logprobs = other.tokens, other.written, other.logprobs

    out = converse(engine, max_new_tokens=200, loop=looped(best_of_two))
    assert len(engine.seen) == 6
    assert out.turns.tolist() == [1, 1, 1]


def test_a_turn_that_is_given_up_holds_nobody_up(engine: Recorded) -> None:
    """One conversation stops waiting for its turn; the others' round has begun to form, and goes on."""

    async def impatient(chat: Chat) -> None:
        assert await chat.use([]) == []
        if chat.number == 0:
            turn = asyncio.ensure_future(chat.turn())
            await asyncio.sleep(0)
            turn.cancel()
            return
        await chat.turn()

    out = converse(engine, max_new_tokens=100, loop=looped(impatient))
    assert out.tokens.lengths.tolist()[0] == len(PROMPTS[0])
    assert len(engine.seen) == 2 and all(out.responses[1:])


def test_an_error_ends_all_conversations_and_frees_their_tools(engine: Recorded) -> None:
    freed: list[str] = []

    class Held:
        """A tool that holds something."""

        def execute(self, text: str) -> str:
            return "x"

        def release(self) -> None:
            freed.append("x")

    async def breaks(chat: Chat) -> None:
        turn = await chat.turn()
        await chat.use(turn.calls)
        raise RuntimeError("the loop is wrong")

    tools = {"echo": tool(Held)}
    with pytest.raises(RuntimeError, match="the loop is wrong"):
        converse(engine, max_new_tokens=300, tools=tools, parser=ALWAYS, loop=looped(breaks))
    assert "x" in freed
    engine.sleep(["weights"])
    with pytest.raises(RuntimeError, match="weights are asleep"):
        converse(engine)
    engine.wake(["weights"])
    engine.load_pretrained()


class Overlapping:
    """An engine each of whose calls waits until all of a number are there."""

    overlaps, version = True, 0

    def __init__(self, engine: TransformersEngine, calls: int) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.together, self.lock = threading.Barrier(calls, timeout=60), threading.Lock()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation]]:
        self.together.wait()
        with self.lock:
            return self.engine.generate(requests, sampling)


def test_an_engine_whose_calls_overlap_gets_each_as_it_comes(engine: Recorded) -> None:
    rounds = converse(engine, n=4)
    calls = converse(Overlapping(engine, 12), n=4)
    assert rounds.tokens.tolist() == calls.tokens.tolist()


def test_conversations_of_no_rows(engine: Recorded) -> None:
    out = converse(engine, rows=[])
    assert [len(column) for column in out] == [0] * len(out)
