"""What ends a sample, texts of any tokens and tokens by their ids, in every kind of rollout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agent import PROMPTS, Recorded, context, converse, recorded, tool

from flattened import call_op
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import agent
from rlgraph.nodes.rollout.partial import _draw_round, _has_ended, partial
from rlgraph.nodes.rollout.rollout import rollout
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Parser, Sampling
from rlgraph.ops.interfaces import Generation, Request
from rlgraph.runtime.demo_tools import ROLES
from rlgraph.runtime.engines.transformers.sampling import draw
from rlgraph.runtime.engines.transformers.stop_texts import StopTexts
from rlgraph.runtime.run import run_graph

LETTERS = "0123456789:, aeinort"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A model that seldom ends by itself."""
    return recorded(tmp_path_factory.mktemp("model"))


def cut(engine: Recorded, tokens: Sequence[int], stop: Sequence[str]) -> int:
    """How many tokens there are up to the first at which a text is whole, decoding all each time."""
    decode = engine.tokenizer.decode
    found = (n for n in range(1, len(tokens) + 1) if any(text in decode(list(tokens[:n])) for text in stop))
    return next(found, len(tokens))


def sampled(engine: Recorded, stop: list[str], op: Callable[..., Any] = rollout) -> Any:
    return call_op(op, engine, context(), Ragged.of(PROMPTS, torch.int64), n=4, max_new_tokens=40, stop=stop)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(stop=st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=2), min_size=1, max_size=3))
def test_a_sample_ends_with_the_first_token_that_makes_a_text_whole(
    engine: Recorded, stop: list[str]
) -> None:
    requests = [Request(prompt, [3, 4, 5]) for prompt in PROMPTS]
    whole = engine.generate(requests, Sampling(24))
    ended = engine.generate(requests, Sampling(24, stop=stop))
    for before, after in zip(chain(*whole), chain(*ended), strict=True):
        kept = cut(engine, before.tokens, stop)
        assert list(after.tokens) == list(before.tokens[:kept])
        assert list(after.logprobs) == pytest.approx(before.logprobs[:kept], abs=1e-4)
        by_text = any(text in engine.tokenizer.decode(list(after.tokens)) for text in stop)
        own = after.tokens[-1] in engine.stops.tolist()
        assert after.finish == ("stop" if own else "text" if by_text else "length")


def test_a_text_may_be_many_tokens_and_a_character_several(engine: Recorded) -> None:
    """Bytes of one character come as tokens of their own, which decode to nothing alone."""
    tokenizer = engine.tokenizer
    for text in ("é!", "日本", "</tool_call>"):
        ids = tokenizer(f"x {text} y", add_special_tokens=False).input_ids
        looks = StopTexts(tokenizer, [text], torch.device("cpu"))
        ends = [n for n in range(1, len(ids) + 1) if looks.stand_in(ids[:n])]
        first = next(n for n in range(1, len(ids) + 1) if text in tokenizer.decode(ids[:n]))
        assert ends[0] == first
        assert first - 1 in looks.candidates(torch.tensor(ids)).tolist()


def test_columns_have_the_text_and_it_is_trained_on(engine: Recorded) -> None:
    out = sampled(engine, ["a", "e"])
    decode, found = engine.tokenizer.decode, 0
    rows = zip(out.tokens.tolist(), out.loss_mask.tolist(), out.truncated.tolist(), strict=True)
    for row, (tokens, mask, limit) in enumerate(rows):
        first = len(PROMPTS[row // 4])
        assert mask == [False] * first + [True] * (len(tokens) - first)
        assert not {*"ae"} & {*decode(tokens[first:-1])}
        found += bool({*"ae"} & {*decode(tokens[first:])}) and not limit
    assert found > 4


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_partial_rollouts_find_a_text_that_lies_across_two_rounds(engine: Recorded, chunk: int) -> None:
    decode = engine.tokenizer.decode
    plain = engine.generate([Request(PROMPTS[0], [9])], Sampling(24))[0][0]
    text = decode(list(plain.tokens[6:9]))
    expected = cut(engine, plain.tokens, [text])
    assert 6 < expected <= 9
    samples, rounds = [Generation()], 0
    while not _has_ended(samples[0], 24):
        sampling = Sampling(chunk, stop=[text])
        _draw_round(engine, [PROMPTS[0]], samples, [9], [24], sampling, 1, False, lambda: False)
        rounds += 1
    assert list(samples[0].tokens) == list(plain.tokens[:expected]) and samples[0].finish == "text"
    assert rounds == -(-expected // chunk)


def test_partial_without_rounds_is_rollout(engine: Recorded) -> None:
    a, b = (sampled(engine, ["7", "t"], op) for op in (rollout, partial))
    assert a.tokens.tolist() == b.tokens.tolist() and a.truncated.tolist() == b.truncated.tolist()


def test_a_turn_that_a_text_ends_is_closed_by_what_is_read(engine: Recorded) -> None:
    """The end token of the template, which the policy did not write, is read and not trained on."""

    def echo(text: str) -> str:
        return "ok"

    calls = Parser(lambda text: [ToolCall("echo", {"text": "a"})], {}, {})
    out = converse(engine, tools={"echo": tool(echo)}, parser=calls, stop=["a", "e", "1"], max_turns=2)
    (end,) = engine.tokenizer("<|end|>", add_special_tokens=False).input_ids
    turned = 0
    for tokens, mask, turn in zip(
        out.tokens.tolist(), out.loss_mask.tolist(), out.turn.tolist(), strict=True
    ):
        first = [i for i, (own, number) in enumerate(zip(mask, turn, strict=True)) if own and number == 1]
        if 2 in turn and tokens[first[-1]] != end:
            turned += 1
            assert tokens[first[-1] + 1] == end and not mask[first[-1] + 1]
    assert turned


def test_min_p_drops_what_is_far_less_likely_than_the_most_likely() -> None:
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log().expand(4000, 5)
    numbers = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = draw(logits, numbers, Sampling(1, min_p=0.3))
    share = tokens.bincount(minlength=5) / 4000
    assert share[3:].tolist() == [0, 0]
    assert share[:3].tolist() == pytest.approx([0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85], abs=0.03)
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[tokens])  # before the cut


def test_a_run_ends_its_samples_there(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    given = ["models.policy.path=demo_files/model", "prompts.batch=8", "update_policy.minibatches=1"]
    given += ["rollout.stop=['1','2','3']", "rollout.min_p=0.01", "eval.every=0"]
    run_graph("demo", given, 1, steps=1, inline=True, run_dir=Path("run"))
    text = Path("run/samples/step-000001.jsonl").read_text()
    responses = [json.loads(line)["responses"] for line in text.splitlines()]
    assert any(response[-1:] in "123" for response in responses)
    assert not any(digit in response[:-1] for response in responses for digit in "123")


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(ids=st.lists(st.integers(2, 287), min_size=1, max_size=40))
def test_a_sample_ends_with_the_first_token_of_an_id(engine: Recorded, ids: list[int]) -> None:
    requests, ends = [Request(prompt, [3, 4, 5]) for prompt in PROMPTS], {*ids, *engine.stops.tolist()}
    whole = engine.generate(requests, Sampling(24))
    ended = engine.generate(requests, Sampling(24, stop_token_ids=ids))
    for before, after in zip(chain(*whole), chain(*ended), strict=True):
        kept = next((n for n, token in enumerate(before.tokens, 1) if token in ends), len(before.tokens))
        assert list(after.tokens) == list(before.tokens[:kept])
        assert list(after.logprobs) == pytest.approx(before.logprobs[:kept], abs=1e-4)
        assert after.finish == ("stop" if after.tokens[-1] in ends else "length")


IDS = list(range(8, 288, 8))


@pytest.mark.parametrize("op", [rollout, partial])
def test_columns_have_the_token_that_ended_a_sample(engine: Recorded, op: Callable[..., Any]) -> None:
    prompts = Ragged.of(PROMPTS, torch.int64)
    out = call_op(
        op, engine, context(), prompts, n=4, max_new_tokens=40, stop_token_ids=IDS, min_new_tokens=3
    )
    ends, by_id = {*IDS, *engine.stops.tolist()}, 0
    rows = zip(out.tokens.tolist(), out.loss_mask.tolist(), out.truncated.tolist(), strict=True)
    for row, (tokens, mask, limit) in enumerate(rows):
        first = len(PROMPTS[row // 4])
        assert mask == [False] * first + [True] * (len(tokens) - first)
        assert not ends & {*tokens[first:-1]} and limit == (tokens[-1] not in ends)
        assert len(tokens) - first > 3
        by_id += tokens[-1] in IDS
    assert by_id > 4


def test_rounds_do_not_take_up_again_what_an_id_has_ended(engine: Recorded) -> None:
    given: dict[str, Any] = {"n": 6, "max_new_tokens": 24, "stop_token_ids": IDS}
    prompts = Ragged.of(PROMPTS[:1], torch.int64)
    whole = call_op(rollout, engine, context([0]), prompts, **given)
    longest = max(sum(mask) for mask in whole.loss_mask.tolist())
    rounds, begun, ended = -(-longest // 2), (), []
    for _ in range(rounds):
        ctx = replace(context([0]), resumes=True, begun=begun)
        out = call_op(partial, engine, ctx, prompts, chunk=2, **given)
        begun = ctx.left
        ended.append(int(begun[3].sum()) if not len(ctx.whole) else 6)
    assert 0 < ended[1] < ended[-2] < ended[-1] == 6
    assert out.tokens.tolist() == whole.tokens.tolist()
    assert out.truncated.tolist() == whole.truncated.tolist()


def test_a_turn_says_the_token_that_ended_it_unless_that_is_special(engine: Recorded) -> None:
    said: list[str] = []

    def calls(text: str) -> list[ToolCall]:
        said.append(text)
        return []

    def echo(text: str) -> str:
        return text

    decode, special = engine.tokenizer.decode, [*map(engine.tokenizer.convert_tokens_to_ids, ROLES)]
    given = {"tools": {"echo": tool(echo)}, "parser": Parser(calls, {}, {})}
    out = converse(engine, n=24, stop_token_ids=[*IDS, *special], **given)
    rows = zip(out.tokens.tolist(), out.loss_mask.tolist(), out.truncated.tolist(), strict=True)
    turns = [[*compress(tokens, mask)] for tokens, mask, limit in rows if not limit]
    assert {*IDS} & (ends := {ids[-1] for ids in turns}) and {*special} & ends
    assert sorted(said) == sorted(decode(ids if ids[-1] in IDS else ids[:-1]) for ids in turns)


SETTINGS = {
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "stop": ["zz"],
    "stop_token_ids": [9],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "min_new_tokens": 2,
}


@pytest.mark.parametrize("op", [rollout, partial, agent])
def test_an_engine_is_told_every_setting(
    engine: Recorded, op: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, generate = [], engine.generate
    monkeypatch.setattr(engine, "generate", lambda r, s, *more: (told.append(s), generate(r, s, *more))[1])
    prompts = Ragged.of(PROMPTS, torch.int64)
    call_op(op, engine, context(), prompts, max_new_tokens=5, temperature=0.7, **SETTINGS)
    assert {*map(str, told)} == {str(Sampling(max_new_tokens=5, temperature=0.7, **SETTINGS))}


@pytest.mark.parametrize("op", [rollout, partial])
def test_no_end_token_comes_before_so_many(engine: Recorded, op: Callable[..., Any]) -> None:
    prompts, changed = Ragged.of(PROMPTS, torch.int64), {"min_new_tokens": 20, "repetition_penalty": 1.3}
    plain, long = (
        call_op(op, engine, context(), prompts, n=8, max_new_tokens=30, **more) for more in ({}, changed)
    )
    lengths = [[sum(mask) for mask in out.loss_mask.tolist()] for out in (plain, long)]
    assert min(lengths[0]) <= 20 < min(lengths[1])


@pytest.mark.parametrize("chunk", [2, 5])
def test_rounds_count_the_tokens_that_earlier_ones_drew(engine: Recorded, chunk: int) -> None:
    requests = [Request(prompt, [9]) for prompt in PROMPTS]
    whole = [many[0] for many in engine.generate(requests, Sampling(24, min_new_tokens=9))]
    samples = [Generation() for _ in PROMPTS]
    while not all(_has_ended(sample, 24) for sample in samples):
        sampling = Sampling(chunk, min_new_tokens=9)
        seeds, limits = [9] * len(PROMPTS), [24] * len(PROMPTS)
        _draw_round(engine, PROMPTS, samples, seeds, limits, sampling, len(PROMPTS), False, lambda: False)
    assert [list(sample.tokens) for sample in samples] == [list(one.tokens) for one in whole]


def test_a_turn_has_the_tokens_that_it_has_to_have(engine: Recorded) -> None:
    short, out = (converse(engine, tools={}, max_turns=1, **more) for more in ({}, {"min_new_tokens": 12}))
    turns = [[sum(mask) for mask in each.loss_mask.tolist()] for each in (short, out)]
    limits = out.truncated.tolist()
    assert min(turns[0]) <= 12
    assert all(length > 12 or limit for length, limit in zip(turns[1], limits, strict=True))
