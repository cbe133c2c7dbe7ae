"""Who does what before whom where a server spans two workers' devices, and what a plan's moves release."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake import KEY, Fake

from demo_files import make_demo_files
from rlgraph.compiler import compile_graph
from rlgraph.ir.actions import MoveEngine
from rlgraph.ir.plan import Plan, Target
from rlgraph.runtime.engines.sglang import engine as module
from rlgraph.runtime.engines.sglang import groups
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.weights.transports import Handover
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker import engine_host
from rlgraph.runtime.worker.process_groups import Groups
from share import families

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]
ONES = Path(__file__).parent.parent / "runtime" / "ones.yaml"
MOVES = {"release_memory_occupation": "slept", "resume_memory_occupation": "woke"}


class Clocked(Fake):
    """Takes its time to move memory, and notes when; reads the buckets that it is sent."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store = store
        self.began: dict[str, int] = {}
        self.moved: dict[str, int] = {}
        self.read: list[list[tuple[str, float]]] = []
        super().__init__()
        self.info = {"max_total_num_tokens": 1 << 16}

    def answer(self, call: str, body: dict[str, Any]) -> tuple[int, Any]:
        if call in MOVES:
            self.began[MOVES[call]] = self.store.add("clock", 1)
            time.sleep(0.5)
            self.moved[MOVES[call]] = self.store.add("clock", 1)
        if call == "update_weights_from_tensor":
            self.read += map(opened, body["serialized_named_tensors"])
        return super().answer(call, body)


def opened(handle: str) -> list[tuple[str, float]]:
    """The tensors behind a handle, and the value of the first number of each."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    held = MultiprocessingSerializer.deserialize(handle)
    bucket = FlattenedTensorBucket(flattened_tensor=held["flattened_tensor"], metadata=held["metadata"])
    return [(name, float(tensor.flatten()[0])) for name, tensor in bucket.reconstruct_tensors()]


@pytest.fixture(scope="module")
def two(
    path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Clocked, list[dict[str, int]]]]:
    """The server of two workers (`fences.py`), and when each of them did what."""
    folder = tmp_path_factory.mktemp("two")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fake = Clocked(store)
    script = [sys.executable, str(Path(__file__).with_name("fences.py"))]
    args = [str(store.port), fake.client.url, fake.client.key, path, str(folder)]
    workers = [subprocess.Popen([*script, str(rank), *args]) for rank in range(2)]
    assert [worker.wait(300) for worker in workers] == [0, 0]
    yield fake, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    fake.close()


@pytest.mark.parametrize(("move", "turn"), [("slept", 0), ("woke", 1)])
def test_all_release_then_the_leader_posts_then_all_go_on(two: Any, move: str, turn: int) -> None:
    fake, seen = two
    for events in seen:
        released = [at for what, at in events if what == "released"]
        (done,) = (at for what, at in events if what == move)
        assert len(released) == len(MOVES)
        assert released[turn] < fake.began[move] < fake.moved[move] < done


def test_each_rank_reads_the_copy_of_its_own_worker(two: Any) -> None:
    fake, _ = two
    assert fake.read == [
        [("model.norm.weight", rank), ("model.embed_tokens.weight", 10.0 + rank)] for rank in range(2)
    ]
    assert fake.version == "4" and not fake.session


class Training:
    """Stands for a train engine: says when it takes memory."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        self.events.append("takes")
        yield "model.norm.weight", torch.zeros(1)

    def offload(self, parts: tuple[str, ...]) -> None: ...

    def reload(self, parts: tuple[str, ...]) -> None:
        self.events.append("takes")


def planned(name: str) -> Plan:
    """A shipped graph with models of 14B, as `test_clusters_golden.py` has them, and SGLang."""
    settings = []
    for model, plan in compile_graph(name).models.items():
        at = f"models.{model}"
        settings.append(f"{at}.path=Qwen/Qwen2.5-14B")
        settings += [f"{at}.train.dtype=bfloat16", f"{at}.train.recompute=true"] if plan.train else []
        settings += [f"{at}.serve.dtype=bfloat16", f"{at}.serve.engine=sglang"] if plan.serve else []
    return compile_graph(name, settings, target=Target("h100-8"))


def events_of(plan: Plan, pool: str, path: str, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """What two iterations of a pool take, release and wake, through real engines over fake servers."""
    events: list[str] = []
    fakes: list[Fake] = []

    def served(self: Any, name: str, *_: Any) -> SglangEngine:
        fakes.append(Fake())
        return SglangEngine(
            path, "cuda", servers=[fakes[-1].client], transport="disk", sync_folder=str(folder / name)
        )

    retake = Client.retake
    patch.setattr(engine_host.EngineHost, "_served", served)
    patch.setattr(engine_host.EngineHost, "_trainer", lambda *_: Training(events))
    patch.setattr(module, "release", lambda device: events.append("releases"))
    patch.setattr(engine_host, "release", lambda device: events.append("releases"))
    patch.setattr(Client, "retake", lambda *args: (events.append("wakes"), retake(*args)))
    engines = engine_host.EngineHost(plan, pool, "cuda", Groups(None, {}, {}, {}), folder)
    by_id = {step.id: step for step in plan.steps}
    for version in range(2):
        for step in (by_id[number] for number in plan.slot):
            if pool not in (step.pool, step.source):
                continue
            if isinstance(step.action, MoveEngine):
                engines.move(step.action)
            elif step.kind == "sync":
                (model,) = step.models
                if pool == (step.source or step.pool):
                    events.append("takes")
                if pool == step.pool:
                    engines.serve[model].load_weights([("model.norm.weight", torch.zeros(1))], version)
            elif step.run and step.run.engine == "train":
                events.append("takes")
    assert not any(fake.dead for fake in fakes)
    engines.close()
    for fake in fakes:
        fake.close()
    return events


@pytest.mark.parametrize("name", families())
def test_between_what_takes_memory_and_a_wake_all_is_released(name: str, path: str, tmp_path: Path) -> None:
    plan, total = planned(name), 0
    for pool in plan.pools:
        with pytest.MonkeyPatch.context() as patch:
            events = events_of(plan, pool, path, tmp_path, patch)
        taken = False
        for event in events:
            taken = event == "takes" or (taken and event != "releases")
            assert not (taken and event == "wakes"), f"{pool} wakes amid {events}"
        wakes = [step for step in plan.steps if step.kind == "wake" and step.pool == pool]
        assert events.count("wakes") == 2 * len(wakes)
        total += len(wakes)
    generating = {step.pool for step in plan.steps if step.generates}
    training = {step.pool for step in plan.steps if step.run and step.run.engine == "train"}
    assert bool(total) == bool(generating & training)  # on a pool of its own nothing sleeps


def test_a_run_releases_after_what_takes_memory_and_prints_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_demo_files(tmp_path / "demo_files")
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(tmp_path / "demo_files"))
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    fake, events = Fake(), list[str]()
    monkeypatch.setattr(engine_host, "release", events.append)
    monkeypatch.setattr(engine_host.EngineHost, "notes", lambda self: ("a server holds less",))
    settings = [
        f"models.policy.serve.sglang.addresses=[{fake.client.url}]",
        "models.policy.serve.engine=sglang",
    ]
    settings += [f"models.policy.serve.sync_folder={tmp_path}", "schedule.iterations=2"]
    settings += ["models.policy.serve.max_rows=8", "rollout.max_new_tokens=2"]
    folder = run_graph(str(ONES), settings, 1, run_dir=tmp_path / "run", inline=True)
    fake.close()
    plan = json.loads((folder / "plan.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    wanted = 0
    for steps, ran in (("steps", "reward/mean"), ("eval_steps", "eval/accuracy")):
        takes = [step for step in plan[steps] if step["kind"] == "sync" or step["engine"] == "train"]
        wanted += len(takes) * sum(ran in json.loads(line) for line in lines)
    assert events == ["cpu"] * wanted and wanted > 6
    assert "note: a server holds less\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("graph", "device", "keeps"), [("ones", "cuda", False), ("ones", "cpu", True), ("ones_two", "cuda", True)]
)
def test_a_gpu_that_trains_a_model_keeps_no_copy_of_its_weights_and_syncs_again(
    graph: str, device: str, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Losing(SimpleNamespace):
        """Loses its server in the first sync."""

        version, syncs = -1, 0
        tokenizer, overlaps, notes = None, True, ()
        generate = abort = sleep = wake = settle = close = lambda *_: None  # what else a worker may call

        def load_weights(self, named: Any, version: int) -> None:
            self.syncs += len(list(named))
            self.version = version if self.syncs > 1 else -1

    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(tmp_path))
    monkeypatch.setattr(groups, "sglang_engine", lambda path, **options: Losing(**options))
    monkeypatch.setattr(engine_host.EngineHost, "_trainer", lambda *_: Training([]))
    plan = compile_graph(str(ONES.with_name(f"{graph}.yaml")), ["models.policy.serve.engine=sglang"], 1)
    pool = plan.models["policy"].serve.pool
    mesh = SimpleNamespace(get_group=lambda: None)
    joined = Groups(mesh, {}, {"policy": Handover()}, {"policy": "ipc"})
    engines = engine_host.EngineHost(plan, pool, device, joined, tmp_path)
    assert engines.serve["policy"].keeps == keeps
    if graph == "ones":
        engines.sync("policy", 0)
        engines.sync("policy", 0)
        assert engines.serve["policy"].syncs == 2 and engines.serve["policy"].version == 0
