"""Samples that are in flight between calls, across new weights and lost servers, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import fake
import pytest
import torch
from fake import Fake
from test_engine import gap_of, kill

from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.servers import calls
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.engines.sglang.client import STREAMED, Client, generation
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = pytest.mark.filterwarnings("default")
LONG = 3000
PROMPTS = [[first, 12, 13] for first in (5, 6)]
Samples = list[list[Generation]]


def begun() -> Samples:
    """Two samples of each prompt, without a token."""
    return [[Generation() for _ in range(2)] for _ in PROMPTS]


def round_of(engine: SglangEngine, so_far: Samples, longest: int = LONG, ends: int = 1) -> int:
    """Give what has not ended more tokens; how many samples have ended."""
    here = [(i, k) for i, many in enumerate(so_far) for k, one in enumerate(many) if not over(one, longest)]
    requests = []
    for i, k in here:
        done = so_far[i][k].tokens
        whole = [*PROMPTS[i], *done]
        requests.append(Request(whole, [2 * i + k], max_new_tokens=longest - len(done), drawn=len(done)))
    told: list[int] = []

    def enough(ended: Sequence[int]) -> bool:
        told.extend(ended)
        return len(told) >= ends

    for (i, k), (one,) in zip(
        here, engine.generate(requests, Sampling(longest, 1.0), enough, stays=True), strict=True
    ):
        so_far[i][k] = so_far[i][k].followed(one)
    return sum(over(one, longest) for many in so_far for one in many)


def over(one: Generation, longest: int) -> bool:
    return one.is_whole or len(one.tokens) >= longest


def wholes(so_far: Samples) -> list[list[int]]:
    """The tokens of every sample behind those of its prompt."""
    return [[*prompt, *one.tokens] for prompt, many in zip(PROMPTS, so_far, strict=True) for one in many]


def known(so_far: Samples) -> list[int]:
    return [len(one.tokens) for many in so_far for one in many]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies of the requests that are sent."""
    bodies: list[dict[str, Any]] = []
    asked = Client.request_body

    def noted(self: Client, request: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return asked(self, request, body)

    monkeypatch.setattr(Client, "request_body", noted)
    return bodies


@pytest.fixture
def endless(awake: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> SglangEngine:
    """No sample ends before its limit."""
    asked = Client.request_body

    def without_end(self: Client, request: str, body: dict[str, Any]) -> dict[str, Any]:
        return asked(
            self, request, body | {"sampling_params": body["sampling_params"] | {"ignore_eos": True}}
        )

    monkeypatch.setattr(Client, "request_body", without_end)
    monkeypatch.setattr(awake, "stops", [])
    return awake


def goes_on(engine: SglangEngine, so_far: Samples, more: int) -> None:
    """Rounds until every sample has so many tokens more; none loses one."""
    wanted = [count + more for count in known(so_far)]
    while any(has < want for has, want in zip(known(so_far), wanted, strict=True)):
        before = known(so_far)
        assert round_of(engine, so_far) == 0
        assert all(a <= b for a, b in zip(before, known(so_far), strict=True))


def arriving(engine: SglangEngine, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, the last of which come once more tokens are drawn by those before."""

    def drawn() -> int:
        return sum(len(chunk["output_ids"]) for sent in [*engine.calls.unanswered] for chunk in sent.chunks)

    *first, last = model.named_parameters()
    yield from first
    wanted = drawn() + 4 * STREAMED
    while drawn() < wanted:
        threading.Event().wait(0.01)
    yield last


def assert_of(weights: Sequence[torch.nn.Module], so_far: Samples) -> None:
    """Every token has the log-prob that the weights of its version give it."""
    for prompt, many in zip(PROMPTS, so_far, strict=True):
        for one in many:
            assert list(one.versions) == sorted(one.versions)
            assert len(one.tokens) == len(one.logprobs) == len(one.versions)
            for version, model in enumerate(weights):
                first = list(one.versions).index(version)
                part = slice(first, first + list(one.versions).count(version))
                assert gap_of(model, Request(prompt, [0]), one, part) < 1e-4


def give_up(engine: SglangEngine) -> None:
    """The next call asks for nothing, and the servers are told to end what they had."""
    engine.generate([], Sampling(LONG), stays=True)
    while engine.calls.unanswered:
        threading.Event().wait(0.01)
    assert not engine.calls.flying


@pytest.mark.slow
def test_a_stream_across_new_weights(
    endless: SglangEngine, model: torch.nn.Module, sent: list[dict[str, Any]]
) -> None:
    so_far, weights = begun(), [deepcopy(model)]
    goes_on(endless, so_far, 2 * STREAMED)
    assert len(sent) == 4 == len(endless.calls.unanswered)  # in as many rounds as it took
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        told, before = known(so_far), len(sent)
        endless.load_weights(arriving(endless, model), version)
        weights.append(deepcopy(model))
        assert len(endless.calls.unanswered) == 4  # no call asks for them again
        goes_on(endless, so_far, 2 * STREAMED)
        again = sent[before:]
        assert len(again) == 4  # each from all that it had, known or not
        for ids, has in zip(wholes(so_far), told, strict=True):
            (body,) = [one for one in again if one["input_ids"] == ids[: len(one["input_ids"])]]
            assert len(body["input_ids"]) >= 3 + has
            assert body["sampling_params"]["max_new_tokens"] == LONG + 3 - len(body["input_ids"])
    assert_of(weights, so_far)
    give_up(endless)
    assert {one.finish for one in endless.generate([Request([9], range(2))], Sampling(4))[0]} == {"length"}


def test_a_call_ends_with_its_first_sample_and_the_others_go_on(
    endless: SglangEngine, model: torch.nn.Module, sent: list[dict[str, Any]]
) -> None:
    requests = [
        Request(prompt, [0], max_new_tokens=most) for prompt, most in zip(PROMPTS, (3, LONG), strict=True)
    ]
    (short,), (long,) = endless.generate(requests, Sampling(LONG), lambda ended: bool(ended), stays=True)
    assert (len(short.tokens), short.finish, long.finish) == (3, "length", "abort")
    assert len(endless.calls.unanswered) == 1
    while len(long.tokens) < STREAMED:
        rest = Request([*PROMPTS[1], *long.tokens], [0], max_new_tokens=LONG - len(long.tokens))
        long = long.followed(endless.generate([rest], Sampling(LONG), stays=True)[0][0])
    assert len(sent) == 2
    for request, one in zip(requests, (short, long), strict=True):
        assert gap_of(model, request, one, slice(None)) < 1e-4
    give_up(endless)


def test_samples_end_in_whichever_round(
    awake: SglangEngine, model: torch.nn.Module, sent: list[dict[str, Any]]
) -> None:
    so_far = begun()
    while round_of(awake, so_far) < 4:
        pass
    assert len(sent) == 4 and not awake.calls.unanswered
    assert_of([model], so_far)


@pytest.mark.slow
def test_what_a_lost_server_had_goes_on_from_what_was_known(
    endless: SglangEngine, model: torch.nn.Module, sent: list[dict[str, Any]]
) -> None:
    so_far = begun()
    goes_on(endless, so_far, 2 * STREAMED)
    kill(endless)
    goes_on(endless, so_far, 2 * STREAMED)
    has = wholes(so_far)
    assert len(sent) >= 8
    for body in sent[4:]:
        ids = body["input_ids"]
        assert len(ids) >= 3 + 2 * STREAMED and any(ids == one[: len(ids)] for one in has)
    assert_of([model], so_far)
    give_up(endless)


@pytest.mark.slow
def test_sleep_ends_what_stays(endless: SglangEngine, model: torch.nn.Module) -> None:
    so_far = begun()
    goes_on(endless, so_far, STREAMED)
    endless.sleep(["kv"])
    assert not endless.calls.unanswered
    endless.wake(["kv"])
    goes_on(endless, so_far, STREAMED)
    assert_of([model], so_far)
    give_up(endless)


def test_of_servers_that_stream_nothing_samples_go_on_too(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "STEP", 0.05)  # so that none of the long ones ends
    clients = [one.client for one in fakes]
    engine = SglangEngine(path, servers=clients, transport="disk", sync_folder=str(tmp_path), max_rows=4)
    engine.load_weights(model.named_parameters(), 0)
    requests = [Request([5 + i], [i], max_new_tokens=3 if i < 2 else 4000) for i in range(4)]
    ended: list[int] = []

    def enough(now: Sequence[int]) -> bool:
        ended.extend(now)
        return len(ended) >= 2

    monkeypatch.setattr(calls, "STAY_SECONDS", 60.0)
    first = engine.generate(requests, Sampling(4000), enough, stays=True)
    assert [(len(one.tokens), one.finish) for (one,) in first] == [(3, "length")] * 2 + [(0, "abort")] * 2
    assert sum(one.served for one in fakes) == 4 and sorted(ended) == [0, 1]
    # one is given up, the other goes on; new weights end it, and it is asked for from what it has
    monkeypatch.setattr(calls, "STAY_SECONDS", 0.2)
    assert [len(one.tokens) for (one,) in engine.generate(requests[2:3], Sampling(4000), stays=True)] == [0]
    while len(engine.calls.unanswered) > 1:
        threading.Event().wait(0.01)
    assert sum(len(one.running) for one in fakes) == 1 and sum(one.served for one in fakes) == 4
    has = Generation()
    for version in (1, 2):
        while not any(made["versions"] for one in fakes for made in one.running.values()):
            threading.Event().wait(0.01)
        engine.load_weights(model.named_parameters(), version)
        rest = Request([7, *has.tokens], [2], max_new_tokens=4000 - len(has.tokens))
        has = has.followed(engine.generate([rest], Sampling(4000), stays=True)[0][0])
        longest = max((prompt for one in fakes for prompt in one.prompts), key=len)
        assert longest == [7, *has.tokens] and sum(one.served for one in fakes) == 4 + version
    assert {*has.versions} == {0, 1} and list(has.versions) == sorted(has.versions)
    engine.close()


def test_events_have_new_tokens_or_all() -> None:
    client = Client("http://here")

    def event(first: int, end: int) -> dict[str, Any]:
        logprobs = [[-0.5 * token, token, None] for token in range(first, end)]
        meta = {"completion_tokens": end, "output_token_logprobs": logprobs, "weight_version": "3"}
        return {"output_ids": [*range(first, end)], "meta_info": meta}

    for starts in ((0, 4, 9), (0, 0, 0)):
        known: list[dict[str, Any]] = []
        for first, end in zip(starts, (4, 9, 9), strict=True):
            known = [client.joined(known, event(first, end))]
            assert client.tokens(known[0]) == [*range(end)]
            assert len(known[0]["meta_info"]["output_token_logprobs"]) == end


@pytest.mark.parametrize(("last", "limit", "finish"), [(9, 4, "length"), (1, 5, "stop"), (9, 5, "abort")])
def test_what_is_aborted_with_its_last_token_has_ended(last: int, limit: int, finish: str) -> None:
    """Else it would be asked for behind its end, or for no token."""
    body = {"sampling_params": {"stop_token_ids": [1], "max_new_tokens": limit}}
    meta = {"weight_version": "3", "finish_reason": {"type": "abort"}}
    reply = {"output_ids": [7, 8, 7, last], "meta_info": meta | {"output_token_logprobs": [[-1.0]] * 4}}
    made = generation(SampleRequest(body, None, {3}, aborted=True), [reply])
    assert (made.finish, list(made.versions)) == (finish, [3] * 4)
