"""A server beside the trainer: it sleeps and wakes after a real update, and weights reach its memory.

The server is a process of its own (``stub/sglang/launch_server.py``) behind the real client, engine and
supervisor. On a GPU its memory is under torch_memory_saver, which ends the process where it can't have its
memory back; so the trainer must have given back what it cached. On a CPU calls, bytes and checksums are the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import engine, step

pytestmark = pytest.mark.usefixtures("one_rank")

pytest.importorskip("aiohttp", reason="SGLang's client speaks to servers by aiohttp")

CACHED = 30 * 2**30  # bytes that an update leaves in the trainer's allocator
SMALL = 2**20


@pytest.fixture
def cache(memory: torch.device, monkeypatch: pytest.MonkeyPatch, on_path: None) -> int:
    """Bytes of the server's keys and values: with what the trainer has cached, more than the GPU has."""
    found = SMALL
    if memory.type == "cuda":
        pytest.importorskip("torch_memory_saver")
        _, total = torch.cuda.mem_get_info()
        if total < 1.5 * CACHED:
            pytest.skip("needs a GPU of 45 GiB")
        found = total - CACHED // 2
    monkeypatch.setenv("RLGRAPH_STUB_CACHE", str(found))
    return found


@pytest.fixture
def server(cache: int, memory: torch.device, model: str, tmp_path: Path) -> Iterator[Any]:
    from rlgraph.runtime.engines.sglang.engine import SglangEngine

    dtype = "bfloat16" if memory.type == "cuda" else "float32"
    made = SglangEngine(model, memory.type, dtype, logs=tmp_path, restarts=0)
    yield made
    made.close()


def leave_cached(device: torch.device) -> None:
    """What a large update leaves behind: memory that torch keeps, and nothing holds."""
    if device.type == "cuda":
        blocks = [torch.empty(CACHED // 16, dtype=torch.uint8, device=device) for _ in range(16)]
        del blocks
        assert torch.cuda.memory_reserved() >= CACHED


def bytes_held(server: Any) -> int:
    """By the server's own account."""
    (client,) = server.calls.clients
    return int(client.look("server_info")["bytes"])


def test_it_wakes_after_an_update_that_left_memory_cached(
    server: Any, cache: int, memory: torch.device, model: str
) -> None:
    trained = engine(model, memory)
    server.load_weights(trained.weights(), 0)
    sums, awake = server.checksums(), bytes_held(server)
    assert len(sums[0][0]["checksums"]) > 20
    for version in (1, 2):
        free = torch.cuda.mem_get_info()[0] if memory.type == "cuda" else 0
        server.sleep(["kv", "weights"])
        if memory.type == "cuda":
            assert torch.cuda.mem_get_info()[0] - free >= 0.95 * cache
        else:
            assert bytes_held(server) == 0
        step(trained)
        leave_cached(memory)
        server.wake(["weights"])
        server.load_weights(trained.weights(), version)
        leave_cached(memory)
        server.wake(["kv"])
        assert server.supervisor.server.is_alive()
        assert bytes_held(server) == awake
        new = server.checksums()
        assert new != sums, "the update changed weights"
        sums = new
    server.load_weights(trained.weights(), 3)
    assert server.checksums() == sums, "the same weights have the same checksums"


def test_weights_are_whole_and_in_place(server: Any, memory: torch.device, model: str) -> None:
    import hashlib

    trained = engine(model, memory)
    server.load_weights(trained.weights(), 0)
    ((rank,),) = server.checksums()
    for name, tensor in trained.weights():
        raw = tensor.to(server.dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()
        assert rank["checksums"][name] == hashlib.sha256(raw).hexdigest(), name
