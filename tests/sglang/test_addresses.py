"""Servers that run already: a real one, which another engine started, and fakes beside it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake import Fake

from rlgraph.compiler import compile_graph
from rlgraph.costs import limits
from rlgraph.costs.dtypes import WIDTH
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sync_buckets
from rlgraph.errors import RunError
from rlgraph.ir.plan import Target
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.cluster.failures import LostError, failure
from rlgraph.runtime.engines.servers import calls
from rlgraph.runtime.engines.servers.endpoint import UnknownError
from rlgraph.runtime.engines.sglang import supervisor, weights
from rlgraph.runtime.engines.sglang.client import FIRST
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.groups import sender
from rlgraph.runtime.engines.weights import transports
from rlgraph.runtime.engines.weights.transfer import Weights
from rlgraph.runtime.engines.weights.transports import RemoteTransport
from rlgraph.runtime.messages.errors import ServerLostError

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]
REQUESTS = [Request([5, 6, 7], [1, 2, 3]), Request([8, 9], [4]), Request([11] * 9, [5, 6])]


def reaching(path: str, folder: Path, fakes: list[Fake], rows: int = 4) -> SglangEngine:
    return SglangEngine(
        path,
        servers=[fake.client for fake in fakes],
        transport="disk",
        sync_folder=str(folder),
        max_rows=rows,
    )


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_a_real_one_is_synced(
    awake: SglangEngine, path: str, model: torch.nn.Module, tmp_path: Path, way: str
) -> None:
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    expected = awake.checksums()
    awake.load_weights(((name, tensor + 1) for name, tensor in weights.items()), 2)
    assert awake.checksums() != expected
    other = SglangEngine(path, servers=[awake.supervisor.client], transport=way, sync_folder=str(tmp_path))
    for version in (3, 4):
        other.load_weights(weights.items(), version)
        assert {*other.generate(REQUESTS[:1], Sampling(3))[0][0].versions} == {version}
    assert other.checksums() == expected
    other.sleep(["kv", "weights"])
    other.wake(["weights"])
    other.load_weights(weights.items(), 5)
    other.wake(["kv"])
    assert other.generate(REQUESTS[:1], Sampling(3))
    other.close()
    assert awake.supervisor.server.is_alive() and not [*tmp_path.iterdir()]


def test_conversations_stay_and_the_limit_holds(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    engine = reaching(path, tmp_path, fakes, rows=6)  # so no server is too full for a conversation
    engine.load_weights(model.named_parameters(), 0)
    turns = [[Request([talk], [0], conversation=f"talk {talk}") for talk in range(2, 8)] for _ in range(3)]
    for requests in turns:
        assert all(len(one.tokens) == 5 for (one,) in engine.generate(requests, Sampling(5)))
    talks = [{tuple(prompt) for prompt in fake.prompts} for fake in fakes]
    assert len(talks[0] | talks[1]) == 6 and not talks[0] & talks[1]
    engine.generate([Request([9], range(40))], Sampling(3))
    assert sum(fake.served for fake in fakes) == 3 * 6 + 40 and max(fake.most for fake in fakes) <= 6
    engine.close()


def test_samples_of_a_prompt_go_to_one_server(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    engine = reaching(path, tmp_path, fakes, rows=100)  # so no server is full
    engine.load_weights(model.named_parameters(), 0)
    engine.generate([Request([first], range(5)) for first in range(2, 8)], Sampling(3))
    prompts = [{tuple(prompt) for prompt in fake.prompts} for fake in fakes]
    assert [len(own) for own in prompts] == [3, 3] and not prompts[0] & prompts[1]
    assert not engine.calls.router.homes  # they have no next turn
    engine.generate([Request([9], range(40))], Sampling(3))  # one alone is no reason to leave others idle
    assert [fake.served for fake in fakes] == [15 + 20] * 2
    engine.close()


def test_a_sample_that_takes_too_long_is_asked_for_again_elsewhere_and_not_for_ever(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    options = {"transport": "disk", "sync_folder": str(tmp_path), "max_rows": 4}
    clients = [fake.client for fake in fakes]
    engine = SglangEngine(path, servers=clients, **options, request_timeout=2, request_retries=20)
    engine.load_weights(model.named_parameters(), 0)
    fakes[0].paused = True  # it takes requests, and answers none
    answers = engine.generate(REQUESTS, Sampling(5))
    assert all(len(one.tokens) == 5 for many in answers for one in many)
    assert fakes[0].prompts and fakes[0].gone and not fakes[1].gone
    engine.close()
    fakes[1].paused = True
    engine = SglangEngine(path, servers=clients, **options, request_timeout=0.2, request_retries=2)
    engine.version = 0
    law = r"no sample in 0.2 s \(request_timeout\), 3 times"
    with pytest.raises(RunError, match=law):
        engine.generate(REQUESTS[1:2], Sampling(5))
    engine.close()
    for fake in fakes:
        fake.paused = False


def test_what_a_server_never_saw_is_asked_for_again_where_new_weights_come(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_ABORTS", 5)
    engine = reaching(path, tmp_path, fakes)
    engine.load_weights(model.named_parameters(), 0)
    fakes[0].paused = True
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(engine.generate, REQUESTS, Sampling(5))
        while not fakes[0].prompts:
            threading.Event().wait(0.01)
        engine.calls.hold([0, 1], 1)
        fakes[0].paused = False
        engine.calls.hold([], 1)
        assert all(len(one.tokens) == 5 for many in made.result() for one in many)
    engine.close()


@pytest.mark.parametrize("size", ["dp_size", "pp_size"])
def test_several_copies_in_one_server_are_refused(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake], size: str
) -> None:
    fakes[1].info[size] = 2
    engine = reaching(path, tmp_path, fakes)
    with pytest.raises(RunError, match=rf"{fakes[1].client.url} has {size} 2; .*\n  start it with --tp-size"):
        engine.load_weights(model.named_parameters(), 0)
    assert {fake.version for fake in fakes} == {FIRST}
    engine.close()


def test_what_a_lost_server_had_goes_to_another(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    fakes[0].dies_after = 6
    engine = reaching(path, tmp_path, fakes)
    engine.load_weights(model.named_parameters(), 0)
    requests = [Request([first], [0, 1]) for first in range(2, 12)]
    answers = engine.generate(requests, Sampling(20))
    assert [[len(one.tokens) for one in many] for many in answers] == [[20, 20]] * 10
    assert fakes[0].dead == "as it was told" and engine.calls.router.up == {1}
    engine.load_weights(model.named_parameters(), 1)  # of those that answer
    assert {*engine.generate(requests, Sampling(1))[9][1].versions} == {1}
    engine.close()


def test_one_that_was_started_anew_is_left_out_until_it_has_the_weights(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    engine = reaching(path, tmp_path, fakes)
    engine.load_weights(model.named_parameters(), 3)
    fakes[0].version = FIRST
    for one in engine.generate(REQUESTS, Sampling(5)):
        assert {*one[0].versions} == {3}
    assert fakes[0].served and engine.calls.router.up == {1}
    fakes[1].version = FIRST
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(engine.generate, REQUESTS, Sampling(5))
        while engine.calls.router.up or fakes[1].running:  # what it draws is of one version
            threading.Event().wait(0.01)
        fakes[1].version = "3"
        assert {*made.result()[0][0].versions} == {3}
    engine.load_weights(model.named_parameters(), 4)
    engine.reach([fake.client for fake in fakes], patience=0.5)
    for fake in fakes:
        fake.version = FIRST
    law = r"with weights 4, after 0.5 s\n  http\S* has weights default\n  http\S* has weights default"
    with pytest.raises(ServerLostError, match=law):
        engine.generate(REQUESTS, Sampling(5))
    engine.close()


def test_a_version_without_sessions_is_synced_without(
    path: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    fake = Fake(unknown=["begin_weight_update", "end_weight_update"])
    engine = reaching(path, tmp_path, [fake])
    engine.load_weights(model.named_parameters(), 6)
    assert {*engine.generate(REQUESTS[1:2], Sampling(5))[0][0].versions} == {6}
    with pytest.raises(UnknownError, match="refused begin_weight_update: 404"):
        fake.client.post("begin_weight_update", {})
    engine.close()
    fake.close()


def test_one_that_missed_a_sync_is_left_out(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    leader = reaching(path, tmp_path, fakes)
    follower = SglangEngine(path, servers=[fake.client for fake in fakes], leads=False, max_rows=4)
    leader.load_weights(model.named_parameters(), 1)
    fakes[0].version = "0"  # as if it had not answered then
    follower.load_weights(model.named_parameters(), 1)
    assert len(follower.generate(REQUESTS, Sampling(5))) == len(REQUESTS)
    assert not fakes[0].served
    fakes[0].version = "1"
    while follower.calls.router.up != {0, 1}:
        threading.Event().wait(0.01)
    follower.close()
    leader.close()


def test_no_server_is_left(path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]) -> None:
    engine = reaching(path, tmp_path, fakes)
    engine.load_weights(model.named_parameters(), 0)
    engine.reach([fake.client for fake in fakes], patience=0.5)
    for fake in fakes:
        fake.dies_after = 2
    law = r"no SGLang server answers any more with weights 0, after 0.5 s\n  http\S* does not answer\n  http"
    with pytest.raises(ServerLostError, match=law) as caught:
        engine.generate(REQUESTS, Sampling(9))
    assert isinstance(failure("", "", caught.value), LostError)  # so schedule.restarts starts the run anew
    with pytest.raises(ServerLostError, match="no SGLang server answers at http"):
        engine.load_weights(model.named_parameters(), 1)
    engine.close()


class Threads:
    """Peers that are threads of one process, the first of which sends."""

    device = "cpu"

    def __init__(self, count: int) -> None:
        self.barrier, self.note = threading.Barrier(count), None

    def tell(self, note: Any) -> Any:
        if note is not None:
            self.note = note
        self.barrier.wait(60)
        return self.note

    def wait(self) -> None:
        self.barrier.wait(60)


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_a_trainer_on_another_pool_sends_to_servers_itself(
    awake: SglangEngine, path: str, model: torch.nn.Module, tmp_path: Path, way: str
) -> None:
    expected, url = awake.checksums(), awake.supervisor.client.url
    awake.load_weights(((name, tensor + 1) for name, tensor in model.named_parameters()), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(awake.supervisor.client.variable, awake.supervisor.client.key)
        peers, trainer = Threads(3), sender([url], "cpu", way, str(tmp_path))
    # of the pool that generates: one that leads, and one that only generates
    pool = [
        SglangEngine(path, servers=[awake.supervisor.client], transport="", leads=leads)
        for leads in (True, False)
    ]
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    ends = [RemoteTransport(peers, trainer), RemoteTransport(peers, None), RemoteTransport(peers, None)]
    for version in (3, 4):
        with ThreadPoolExecutor(3) as threads:
            sent = threads.submit(ends[0].send, Weights(version, iter(named)))
            loads = [
                threads.submit(engine.load_weights, end.receive(version).tensors, version)
                for engine, end in zip(pool, ends[1:], strict=True)
            ]
            for call in (sent, *loads):
                call.result()
        assert awake.checksums() == expected
        for engine in pool:
            assert {*engine.generate(REQUESTS[:1], Sampling(3))[0][0].versions} == {version}
    for closed in (*pool, ends[0]):
        closed.close()
    assert awake.supervisor.server.is_alive() and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("way", ["ipc", "broadcast", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_servers_get_the_bytes_of_the_plan(
    awake: SglangEngine,
    path: str,
    model: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    dtype: str,
) -> None:
    monkeypatch.setattr(limits, "BUCKET", 2**14)
    there = "models.policy.serve.sglang.addresses=[http://one:30000]"
    chosen = [
        f"models.policy.path={path}",
        f"models.policy.serve.dtype={dtype}",
        "models.policy.serve.engine=sglang",
    ]
    chosen += {
        "ipc": [],
        "broadcast": [there],
        "disk": [there, f"models.policy.serve.sync_folder={tmp_path}"],
    }[way]
    plan = compile_graph("grpo", chosen, 1, target=Target("h100-8"))
    (step,) = (step for step in plan.steps if step.kind == "sync")
    sizes: list[int] = []
    flat_of, broadcast, save = supervisor.flat_of, weights.dist.broadcast, transports.save_file

    def mapped(bucket: Any, *where: Any) -> Any:
        sizes.append(flat_of(bucket, *where).flat.nbytes)
        return flat_of(bucket, *where)

    def sent(flat: torch.Tensor, *args: Any, **group: Any) -> None:
        sizes.append(flat.nbytes)
        broadcast(flat, *args, **group)

    def written(tensors: dict[str, torch.Tensor], file: Path) -> None:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save(tensors, file)

    monkeypatch.setattr(supervisor, "flat_of", mapped)
    monkeypatch.setattr(weights.dist, "broadcast", sent)
    monkeypatch.setattr(transports, "save_file", written)
    far = [
        SglangEngine(
            path, dtype=dtype, servers=[awake.supervisor.client], transport=way, sync_folder=str(tmp_path)
        )
    ]
    engine = awake if way == "ipc" else far[0]
    monkeypatch.setattr(engine, "dtype", getattr(torch, dtype))
    engine.load_weights(model.named_parameters(), 3)
    assert step.action.path == way and sum(sizes) == size_of(path).parameters * WIDTH[dtype]
    assert (len(sizes), dtype) == sync_buckets(plan, step.action) and len(sizes) > 5
    far[0].close()
