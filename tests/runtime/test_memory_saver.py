"""Memory under torch-memory-saver: what is asked of it, on a stand-in that keeps its rules on a CPU.

Of a GPU's pages the addresses stay and the contents go. So does it here: a pause writes NaN over what was
allocated in a region, and a storage that is resized in no region has left it. A pause of what is paused, or
a resume of what is not, ends the process there and fails here. On a GPU, ``tests/cuda`` runs the library.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_embedded import CONFIGS, engine_of, requests_of, save
from test_offload import ADAM, ALL, same, update, write_model

from rlgraph.ops import Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.memory import saver
from rlgraph.runtime.engines.memory.saver import SavedMemory


class StandIn:
    """torch_memory_saver, as far as it is used here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.pages: dict[str, list[torch.UntypedStorage]] = {}
        self.paused: set[str] = set()
        self.tag = ""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if self.tag and size:
                self.pages[self.tag].append(storage)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        assert tag not in self.pages, "pages belong to one part for one while"
        self.pages[tag], self.tag = [], tag
        yield
        self.tag = ""

    def pause(self, tag: str) -> None:
        assert tag in self.pages and tag not in self.paused
        self.paused.add(tag)
        self.calls.append(("pause", tag))
        for storage in self.pages[tag]:
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).fill_(0xFF)

    def resume(self, tag: str) -> None:
        self.paused.remove(tag)
        self.calls.append(("resume", tag))


@pytest.fixture(scope="module")
def path(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("saver"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(monkeypatch)
    monkeypatch.setattr(saver, "memory_saver", lambda device: made)
    return made


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def memory_of(engine: FsdpEngine, part: str) -> list[int]:
    return addresses([t.to_local() if hasattr(t, "to_local") else t for t in engine.residency.groups[part]()])


def test_a_train_engine_is_resized_once_and_paused_from_then_on(path: str, stand_in: StandIn) -> None:
    engine, still = (FsdpEngine.of(path, optimizer=ADAM) for _ in range(2))
    for _ in range(2):
        assert update(engine) == update(still)
    engine.offload(ALL)
    assert not stand_in.calls, "the first time there are no pages yet"
    engine.reload(ALL)
    assert [len(pages) > 10 for pages in stand_in.pages.values()] == [True, True]
    places = {part: memory_of(engine, part) for part in ALL}
    for _ in range(2):
        engine.offload(ALL)
        assert torch.stack([p.sum() for p in still.parameters]).isfinite().all()
        assert all(p.isnan().all() for p in engine.parameters), "what is paused holds nothing"
        assert {part: memory_of(engine, part) for part in ALL} == places
        engine.reload(ALL)
        assert {part: memory_of(engine, part) for part in ALL} == places
        assert update(engine) == update(still)
        same(engine, still)
    assert [call for call, _ in stand_in.calls] == ["pause", "pause", "resume", "resume"] * 2


def test_moments_that_come_later_get_pages_of_their_own(path: str, stand_in: StandIn) -> None:
    """An optimizer that never stepped has nothing to page; the one that stepped has."""
    engine, still = (FsdpEngine.of(path, optimizer=ADAM) for _ in range(2))
    for turn in range(3):
        engine.offload(ALL)
        engine.reload(ALL)
        assert len(stand_in.pages) == (1 if turn == 0 else 2)
        assert update(engine) == update(still)
        same(engine, still)


def test_other_storages_leave_the_pages(stand_in: StandIn) -> None:
    tensors = [torch.arange(8.0), torch.arange(4.0)]
    memory = SavedMemory(torch.device("cpu"))
    memory.give([tensor.untyped_storage() for tensor in tensors])
    assert SavedMemory.paused("cpu") == 0, "torch no longer counts what is resized"
    memory.take()
    memory.give([tensors[0].untyped_storage()])
    assert stand_in.paused == {*stand_in.pages}, "both have left, and the pages are given back"
    assert tensors[0].untyped_storage().nbytes() == 0
    memory.take()
    assert len(stand_in.pages) == 2
    memory.give([tensors[0].untyped_storage()])
    assert SavedMemory.paused("cpu") == 32, "torch counts it still"
    memory.take()
    assert SavedMemory.paused("cpu") == 0


def test_pages_of_what_is_gone_are_given_back(stand_in: StandIn) -> None:
    """Else every engine of a process would leave its memory behind."""
    memory = SavedMemory(torch.device("cpu"))
    tensor = torch.arange(8.0)
    for _ in range(2):
        memory.give([tensor.untyped_storage()])
        memory.take()
    assert not stand_in.paused
    del memory
    gc.collect()
    assert stand_in.paused == {*stand_in.pages}


def test_an_embedded_engine_keeps_its_addresses(tmp_path: Path, stand_in: StandIn) -> None:
    engine, other = (engine_of(save(tmp_path, CONFIGS["qwen2"])) for _ in range(2))
    wanted = other.generate(requests_of(), Sampling(8))
    for turn in range(3):
        engine.sleep(["weights"])
        engine.wake(["weights"])
        places = addresses([*engine.weights.values()])
        engine.load_pretrained()
        assert engine.generate(requests_of(), Sampling(8)) == wanted
        assert addresses([*engine.weights.values()]) == places
        assert [call for call, _ in stand_in.calls] == ["pause", "resume"] * turn


def test_it_is_used_on_a_gpu_alone_and_not_with_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(torch_memory_saver=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_memory_saver", library)
    library.__spec__ = object()
    chosen = saver.memory_saver.__wrapped__
    assert chosen("cpu") is None
    assert chosen("cuda") is library.torch_memory_saver
    assert library.torch_memory_saver.hook_mode == "torch"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert chosen("cuda") is None
