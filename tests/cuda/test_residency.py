"""Memory that is given back and taken again: on a GPU as its driver counts it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from rows import engine, step, weights

from rlgraph.runtime.engines.memory import offload
from rlgraph.runtime.engines.memory.offload import FileCopy, PinnedCopy, Residency

pytestmark = pytest.mark.usefixtures("one_rank")

LARGE = 2**32  # bytes


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied to the host and back, in order."""
    found: list[str] = []
    for kind in (PinnedCopy, FileCopy):
        for way in ("write", "read"):
            own = getattr(kind, way)

            def noted(self: Any, storages: Any, own: Any = own, way: str = way) -> None:
                found.append(way)
                own(self, storages)

            monkeypatch.setattr(kind, way, noted)
    return found


def test_what_comes_back_is_what_went(memory: torch.device, model: str, copies: list[str]) -> None:
    trained, beside = engine(model, memory), engine(model, memory)
    step(trained)
    step(beside)
    trained.offload(["optimizer", "parameters"])
    assert trained.away == {"optimizer", "parameters"}
    held = offload.distinct_storages(trained.parameters)
    assert not held, "all memory of the parameters is given back"
    trained.reload(["parameters", "optimizer"])
    step(trained)
    step(beside)
    for name, tensor in weights(beside).items():
        torch.testing.assert_close(weights(trained)[name], tensor, rtol=1e-5, atol=1e-6)
    assert copies == ["write", "write", "read", "read"]


def test_what_has_not_changed_is_not_copied_again(
    memory: torch.device, model: str, copies: list[str]
) -> None:
    trained = engine(model, memory)
    step(trained)
    for _ in range(2):
        trained.offload(["parameters"])
        trained.reload(["parameters"])
    assert copies == ["write", "read", "read"]
    step(trained)
    trained.offload(["parameters"])
    assert copies[-1] == "write"


def goes_and_comes_back(away: Residency, tensors: list[torch.Tensor], sums: list[float]) -> None:
    """Offload and reload ``LARGE`` bytes: the driver gets them meanwhile, and the numbers return."""
    before, _ = torch.cuda.mem_get_info()
    away.offload(["optimizer"])
    after, _ = torch.cuda.mem_get_info()
    assert after - before >= 0.95 * LARGE
    away.reload(["optimizer"])
    assert [float(tensor.double().sum()) for tensor in tensors] == sums


def test_the_driver_has_the_memory_back(gpu: torch.device) -> None:
    tensors = [torch.randn(LARGE // 64, device=gpu) for _ in range(16)]
    sums = [float(tensor.double().sum()) for tensor in tensors]
    goes_and_comes_back(Residency("test", gpu, {"optimizer": lambda: tensors}), tensors, sums)


def test_with_the_saver_it_comes_back_to_the_same_addresses(gpu: torch.device) -> None:
    pytest.importorskip("torch_memory_saver")
    tensors = [torch.randn(LARGE // 64, device=gpu) for _ in range(16)]
    sums = [float(tensor.double().sum()) for tensor in tensors]
    away = Residency("test", gpu, {"optimizer": lambda: tensors})
    places = []
    for _ in range(3):
        goes_and_comes_back(away, tensors, sums)
        places.append([tensor.data_ptr() for tensor in tensors])
    assert places[0] == places[1] == places[2]
    before, _ = torch.cuda.mem_get_info()
    tensors.clear()
    del away
    gc.collect()
    assert torch.cuda.mem_get_info()[0] - before >= 0.95 * LARGE, "what nobody holds any more is given back"
