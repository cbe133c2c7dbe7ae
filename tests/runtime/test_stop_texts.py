"""Texts that end a sample, whatever tokens they are made of, in every kind of rollout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agent import PROMPTS, Recorded, context, converse, recorded, tool

from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.rollout.partial import _ended, _go_on, partial
from rlgraph.nodes.rollout.rollout import rollout
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Parser, Sampling
from rlgraph.ops.interfaces import Generation, Request
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
    return op(engine, context(), Ragged.of(PROMPTS, torch.int64), n=4, max_new_tokens=40, stop=stop)


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
    samples, rounds = [Generation((), (), "abort")], 0
    while not _ended(samples[0], 24):
        _go_on(engine, [PROMPTS[0]], samples, [9], 24, Sampling(chunk, stop=[text]), 1)
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


@pytest.mark.parametrize("op", [rollout, partial])
def test_no_end_token_comes_before_so_many(engine: Recorded, op: Callable[..., Any]) -> None:
    prompts, changed = Ragged.of(PROMPTS, torch.int64), {"min_new_tokens": 20, "repetition_penalty": 1.3}
    plain, long = (op(engine, context(), prompts, n=8, max_new_tokens=30, **more) for more in ({}, changed))
    lengths = [[sum(mask) for mask in out.loss_mask.tolist()] for out in (plain, long)]
    assert min(lengths[0]) <= 20 < min(lengths[1])


@pytest.mark.parametrize("chunk", [2, 5])
def test_rounds_count_the_tokens_that_earlier_ones_drew(engine: Recorded, chunk: int) -> None:
    requests = [Request(prompt, [9]) for prompt in PROMPTS]
    whole = [many[0] for many in engine.generate(requests, Sampling(24, min_new_tokens=9))]
    samples = [Generation((), (), "abort") for _ in PROMPTS]
    while not all(_ended(sample, 24) for sample in samples):
        sampling = Sampling(chunk, min_new_tokens=9)
        _go_on(engine, PROMPTS, samples, [9] * len(PROMPTS), 24, sampling, len(PROMPTS))
    assert [list(sample.tokens) for sample in samples] == [list(one.tokens) for one in whole]


def test_a_turn_has_the_tokens_that_it_has_to_have(engine: Recorded) -> None:
    short, out = (converse(engine, tools={}, max_turns=1, **more) for more in ({}, {"min_new_tokens": 12}))
    turns = [[sum(mask) for mask in each.loss_mask.tolist()] for each in (short, out)]
    limits = out.truncated.tolist()
    assert min(turns[0]) <= 12
    assert all(length > 12 or limit for length, limit in zip(turns[1], limits, strict=True))
