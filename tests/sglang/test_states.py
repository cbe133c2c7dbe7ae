"""Whatever comes in which order: the same tests on a fake server and on a real one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fake import Fake
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rlgraph.errors import RunError
from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.servers import calls
from rlgraph.runtime.engines.servers.endpoint import UnknownError
from rlgraph.runtime.engines.sglang.client import PARTS, Client
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = pytest.mark.filterwarnings("default")
REQUESTS = [Request([first, 12, 13], [0]) for first in (5, 6, 7, 8, 9, 10)]
SOME = st.sampled_from([["kv"], ["weights"], ["weights", "kv"]])
LONG = 1000


@pytest.fixture(params=["fake", "real"])
def any_engine(
    request: pytest.FixtureRequest, path: str, tmp_path: Path, model: torch.nn.Module
) -> Iterator[SglangEngine]:
    """Over a fake server, or over the real one."""
    if request.param == "real":
        yield request.getfixturevalue("awake")
        return
    fake = Fake()
    made = SglangEngine(path, servers=[fake.client], transport="disk", sync_folder=str(tmp_path), max_rows=4)
    made.load_weights(model.named_parameters(), 0)
    yield made
    made.close()
    assert not fake.dead
    fake.close()


@pytest.fixture
def client(any_engine: SglangEngine) -> Client:
    """Of its server, for calls past the engine."""
    return any_engine.calls.clients[0]


def in_flight(engine: SglangEngine) -> None:
    """Wait until something was sent."""
    while not engine.calls.flying:
        threading.Event().wait(0.01)


def has_arrived(client: Client) -> None:
    """Wait until a request runs on the server: it refuses to flush its cache then."""
    with pytest.raises(RunError, match="refused flush_cache: 400"):
        deque(iter(lambda: client.post("flush_cache", {}), False), 0)


def test_an_update_needs_a_session(client: Client) -> None:
    body = {"serialized_named_tensors": [""], "load_format": "flattened_bucket", "weight_version": "5"}
    with pytest.raises(RunError, match="must run between"):
        client.post("update_weights_from_tensor", body)
    with pytest.raises(RunError, match="no weight-update session is open"):
        client.post("end_weight_update", {})
    client.post("begin_weight_update", {})
    with pytest.raises(RunError, match="already open"):
        client.post("begin_weight_update", {})
    client.begin_update()  # closes what was left open
    client.end_update()


def test_a_call_of_another_version_is_told_from_one_that_is_refused(client: Client) -> None:
    with pytest.raises(UnknownError, match="404"):
        client.post("begin_weight_updates", {})


def test_the_key_is_asked_for(client: Client) -> None:
    with pytest.raises(RunError, match="401"):
        Client(client.url, "another").post("flush_cache", {})
    with pytest.raises(RunError, match="asks for another API key"):
        Client(client.url).version()


def test_what_is_held_comes_back_and_what_comes_waits(any_engine: SglangEngine, client: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(any_engine.generate, REQUESTS[:1], Sampling(LONG, 0.0))
        has_arrived(client)
        client.hold()
        try:
            with pytest.raises(RunError, match="aborted a request"):
                made.result()
            later = pool.submit(any_engine.generate, REQUESTS, Sampling(2, 0.0))
            in_flight(any_engine)
            client.flush()  # nothing runs
            assert not later.done()
        finally:
            client.resume()
        assert {len(one.tokens) for (one,) in later.result()} == {2}


def test_the_version_is_that_of_the_last_sync(
    any_engine: SglangEngine, client: Client, model: torch.nn.Module
) -> None:
    any_engine.load_weights(model.named_parameters(), 12)
    assert client.version() == "12"
    (one,) = any_engine.generate(REQUESTS[:1], Sampling(3, 0.0))[0]
    assert list(one.versions) == [12, 12, 12]


def test_what_a_paused_server_never_saw_is_given_up(
    any_engine: SglangEngine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_ABORTS", 5)
    with ThreadPoolExecutor(1) as pool:
        client.hold()
        try:
            made = pool.submit(any_engine.generate, REQUESTS[:1], Sampling(LONG, 0.0))
            in_flight(any_engine)
            any_engine.abort()
            assert [(one.tokens, one.finish) for (one,) in made.result()] == [((), "abort")]
        finally:
            client.resume()
    any_engine.abort()


@pytest.mark.slow
def test_states_are_kept_whatever_comes(
    any_engine: SglangEngine, client: Client, model: torch.nn.Module
) -> None:
    engine, pool = any_engine, ThreadPoolExecutor(1)

    class States(RuleBasedStateMachine):
        """Random interleavings; the model of it all: what sleeps, the version, what runs."""

        @initialize()
        def begin(self) -> None:
            self.asleep, self.version = set[str](), 0
            self.made, self.promised = None, set[int]()
            engine.load_weights(model.named_parameters(), 0)

        def teardown(self) -> None:
            if self.made:
                engine.abort()
                self.finish()
            if engine.sleeping:
                engine.wake(sorted(engine.sleeping))

        @invariant()
        def is_as_it_should_be(self) -> None:
            assert (engine.sleeping, engine.version) == (self.asleep, self.version)

        def busy(self) -> bool:
            return self.made is not None and not self.made.done()

        def refused(self, action: object, *args: object) -> None:
            with pytest.raises(RuntimeError):
                action(*args)

        @rule(parts=SOME)
        def sleep(self, parts: list[str]) -> None:
            if self.asleep & {*parts} or self.busy():
                self.refused(engine.sleep, parts)
            else:
                engine.sleep(parts)
                self.asleep |= {*parts}
                self.version = -1 if "weights" in parts else self.version

        @rule(parts=SOME)
        def wake(self, parts: list[str]) -> None:
            if {*parts} <= self.asleep:
                engine.wake(parts)
                self.asleep -= {*parts}
            else:
                self.refused(engine.wake, parts)

        @rule(version=st.integers(0, 50))
        def sync(self, version: int) -> None:
            if "weights" in self.asleep:
                self.refused(engine.load_weights, model.named_parameters(), version)
            else:
                engine.load_weights(model.named_parameters(), version)
                self.version = version
                self.promised.add(version)

        @rule()
        def generate(self) -> None:
            if self.asleep or self.version < 0:
                self.refused(engine.generate, REQUESTS, Sampling(2))
            else:
                for (one,) in engine.generate(REQUESTS, Sampling(2, 0.0)):
                    assert list(one.versions) == [self.version] * 2

        @rule()
        def start(self) -> None:
            if self.made is None and not (self.asleep or self.version < 0):
                self.promised = {self.version}
                self.made = pool.submit(engine.generate, REQUESTS, Sampling(LONG, 0.0))
                has_arrived(client)

        @rule()
        def abort(self) -> None:
            engine.abort()
            if self.made:
                self.finish()

        def finish(self) -> None:
            answers: list[list[Generation]] = self.made.result(120)
            assert len(answers) == len(REQUESTS)
            for (one,) in answers:
                assert one.finish in ("abort", "length") and {*one.versions} <= self.promised
                assert len(one.tokens) == len(one.logprobs) == len(one.versions)
            self.made = None

    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    few = settings(max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(States, settings=few)
    pool.shutdown()
    assert {*PARTS} >= engine.sleeping
