"""SGLang serves an adapter beside the weights of its files: syncs bring that alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fake import Fake
from test_train_engine import REQUESTS, TEMPERATURE, generated, objective

from rlgraph.costs.lora_size import adapter_sizes
from rlgraph.costs.model_size import size_of
from rlgraph.ops import Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.engines.sglang.options import words, wrong
from rlgraph.runtime.engines.sglang.supervisor import SglangSupervisor
from rlgraph.syntax.model_settings import Lora

pytestmark = pytest.mark.filterwarnings("default")
LORA = {"rank": 3, "alpha": 6.0, "targets": "all-linear"}
LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def train(path: str, alone: None) -> FsdpEngine:
    return FsdpEngine.of(path, optimizer={"lr": 1e-2}, lora=LORA)


@pytest.fixture
def served(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangEngine]:
    """An engine whose servers are fakes on one port, the next where one is lost: ``supervisor.fakes``."""
    fakes: list[Fake] = []

    def begin(self: SglangSupervisor, before: object = None) -> SimpleNamespace:
        while fakes and fakes[-1].server.fileno() >= 0:  # until its port is free
            threading.Event().wait(0.01)
        fake = Fake(port=fakes[-1].server.server_port if fakes else 0)
        fakes.append(fake)
        return SimpleNamespace(
            client=fake.client,
            log=tmp_path / "log",
            port=SimpleNamespace(close=lambda: None),
            wait=lambda timeout: None,
            is_alive=lambda: not fake.dead,
            obituary=lambda: "lost",
            last_lines=lambda: "",
            close=lambda: None if fake.dead else fake.close(),
        )

    monkeypatch.setattr(SglangSupervisor, "begin", begin)
    made = SglangEngine(path, logs=tmp_path, max_rows=4, start_timeout=5.0, adapter=LORA)
    made.supervisor.fakes = fakes
    yield made
    made.close()


def test_a_sync_brings_the_adapter_under_its_version(
    served: SglangEngine, train: FsdpEngine, path: str
) -> None:
    (fake,) = served.supervisor.fakes
    for version in (0, 1, 7):
        served.load_weights(train.adapter(), version)
        for many in served.generate(REQUESTS, Sampling(4)):
            assert all(one.versions == [version] * 4 for one in many)
        assert fake.adapters == [f"version-{version}"] and fake.version == str(version)
        (flat,) = served.supervisor.weight_copies
        assert flat.flat.nbytes == 4 * sum(adapter_sizes(size_of(path), Lora.model_validate(LORA)))
    named = [body["lora_path"] for call, body in fake.calls if call == "generate"]
    assert named == [f"version-{version}" for version in (0, 1, 7) for _ in range(6)]
    (first, *_) = [body for call, body in fake.calls if call == "load_lora_adapter_from_tensors"]
    assert first["config_dict"] == {
        "peft_type": "LORA", "r": 3, "lora_alpha": 6.0, "target_modules": LAYERS, "bias": "none",
    }  # fmt: skip
    order = [call for call, _ in fake.calls if call.endswith(("adapter", "tensors", "version"))]
    assert order[-3:] == ["unload_lora_adapter", "load_lora_adapter_from_tensors", "update_weight_version"]


def test_a_server_that_is_lost_gets_the_adapter_again(served: SglangEngine, train: FsdpEngine) -> None:
    served.load_weights(train.adapter(), 2)
    (before,) = served.supervisor.fakes
    before.dies_after = 2
    answers = served.generate(REQUESTS, Sampling(4))
    assert all(one.versions == [2] * 4 for many in answers for one in many)
    _, after = served.supervisor.fakes
    assert before.dead and after.adapters == ["version-2"] and served.supervisor.left == 2


def test_what_an_adapter_can_not_is_refused(served: SglangEngine, train: FsdpEngine) -> None:
    served.load_weights(train.adapter(), 0)
    with pytest.raises(RuntimeError, match="an adapter alone, so weights can't sleep"):
        served.sleep(["weights", "kv"])
    served.sleep(["kv"])
    served.wake(["kv"])
    served.calls.unanswered.add(SampleRequest({}, None))
    with pytest.raises(RuntimeError, match="1 samples are in flight; abort them before sleep"):
        served.sleep(["kv"])
    served.calls.unanswered.clear()


@pytest.mark.slow
def test_the_installed_sglang_takes_the_settings(served: SglangEngine) -> None:
    launch = served.supervisor.launch
    for device in ("cpu", "cuda"):
        settings = Launch("some/model", device, "bfloat16", 1, 4096, 8, content=launch.content).settings()
        assert not wrong(settings)
        line = words(settings)
        at = line.index("--lora-target-modules")
        assert line[at + 1 : at + 8] == LAYERS and line[line.index("--max-lora-rank") + 1] == "3"
        assert settings["load_format"] == "auto" and ("lora_backend" in settings) == (device == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "lost"])
def test_log_probs_are_those_of_the_adapted_model(
    path: str, train: FsdpEngine, tmp_path: Path, lost: bool
) -> None:
    engine = SglangEngine(path, logs=tmp_path, max_rows=4, adapter=LORA)
    ref = FsdpEngine.of(path, frozen=True, base=train)
    try:
        base = set()
        for version in range(4):
            engine.load_weights(train.adapter(), version)
            assert engine.supervisor.client.adapters() == [f"version-{version}"]
            if version == 2 and lost:
                os.killpg(engine.supervisor.server.process.pid, signal.SIGKILL)
            batch, own = generated(engine)
            columns = batch["tokens"], batch["loss_mask"], TEMPERATURE
            assert (train.logprobs(*columns).values - own).abs().max() < 1e-4
            gap = (ref.logprobs(*columns).values - own).abs().max()
            assert gap > 1e-2 if version else gap < 1e-4
            base.add(str(engine.checksums()))
            train.update(batch, objective, torch.arange(len(batch["tokens"].lengths)), 6)
        assert len(base) == 1 and engine.supervisor.left == (2 if lost else 3)
    finally:
        engine.close()
