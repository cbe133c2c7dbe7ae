"""Two real servers of one pool, each with an engine that looks after it, as two devices have them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from test_engine import ENDLESS, generating

from rlgraph.ops import Sampling
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def other(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """Another device's engine, with a server of its own."""
    made = SglangEngine(path, logs=tmp_path_factory.mktemp("logs"), max_rows=4, devices=["1"], restarts=1)
    yield made
    made.close()


@pytest.fixture
def pair(awake: SglangEngine, other: SglangEngine) -> Iterator[tuple[SglangEngine, SglangEngine]]:
    """Both, each of which sends requests to both servers, its own first."""
    own, its = awake.supervisor.client, other.supervisor.client
    awake.reach([own, its])
    other.reach([its, own])
    yield awake, other
    awake.reach([own])


def sync(pair: tuple[SglangEngine, SglangEngine], model: torch.nn.Module, version: int) -> list[object]:
    """Every engine brings its own server to new weights; the servers' checksums then."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    for engine in pair:
        engine.load_weights(model.named_parameters(), version)
    for engine in pair:  # the first leaves the other's server out until that has them
        until_both_are_up(engine)
    return pair[0].checksums()


def until_both_are_up(engine: SglangEngine) -> None:
    while engine.calls.router.up != {0, 1}:
        threading.Event().wait(0.05)


def test_checksums_agree_after_every_sync(
    pair: tuple[SglangEngine, SglangEngine], model: torch.nn.Module
) -> None:
    seen = []
    for version in range(1, 5):
        first, second = sync(pair, model, version)
        assert first == second and first not in seen
        assert [client.version() for client in pair[0].calls.clients] == [str(version)] * 2
        seen.append(first)
    for engine in pair:
        answers = engine.generate(ENDLESS, Sampling(5, 0.0))
        assert {version for (one,) in answers for version in one.versions} == {4}


def test_what_a_killed_server_had_goes_to_the_other(
    pair: tuple[SglangEngine, SglangEngine], model: torch.nn.Module
) -> None:
    engine, lost = pair
    sync(pair, model, 7)
    undisturbed = engine.generate(ENDLESS, Sampling(200, 0.0))
    with generating(engine, ENDLESS, Sampling(200, 0.0)) as made:
        while {flight.server for flight in engine.calls.flying.values()} != {0, 1}:
            threading.Event().wait(0.01)
        os.killpg(lost.supervisor.server.process.pid, signal.SIGKILL)
        answers = made.result()
        assert engine.calls.router.up == {0}  # it was not waited for
    assert [[one.tokens for one in many] for many in answers] == [
        [one.tokens for one in many] for many in undisturbed
    ]
    assert {version for (one,) in answers for version in one.versions} == {7}
    until_both_are_up(engine)  # it was started anew, and has those weights
    first, second = engine.checksums()
    assert first == second and lost.supervisor.left == 0
