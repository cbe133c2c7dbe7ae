"""One of two workers whose devices a fake server spans; `test_fences.py` runs two of these.

    python fences.py RANK PORT URL KEY MODEL FOLDER

A clock that both and the server share numbers what happens; the second worker is slow.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlgraph.runtime.engines.sglang import groups, supervisor
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.engine import SglangEngine

SLOW = 0.5  # seconds that the second worker takes to give its memory back


def main(rank: int, port: int, url: str, key: str, path: str, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    seen: list[tuple[str, int]] = []

    def note(what: str) -> None:
        seen.append((what, store.add("clock", 1)))

    def give_back() -> None:
        time.sleep(SLOW * rank)
        note("released")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", give_back)
        patch.setattr(supervisor, "Server", lambda *_: server(Client(url, key)))
        moves(sglang(path, folder), note)
        handles(sglang(path, folder), rank)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def server(client: Client) -> Any:
    """In the place of one that a worker starts: that of the test."""
    nothing = {name: lambda *_: None for name in ("wait", "close")}
    return SimpleNamespace(client=client, is_alive=lambda: True, port=SimpleNamespace(close=int), **nothing)


def sglang(path: str, folder: str) -> SglangEngine:
    """This worker's engine: the first of the two leads."""
    options: dict[str, Any] = {"logs": Path(folder), "max_cached_tokens": 1 << 16}
    return groups.sglang_engine(path, device="cpu", group=2, pool=dist.group.WORLD, **options)


def moves(engine: SglangEngine, note: Any) -> None:
    """Sleep and wake, as on a GPU."""
    engine.device = "cuda"
    for name, move in (("slept", engine.sleep), ("woke", engine.wake)):
        move(["kv"])
        note(name)
    engine.close()


def handles(engine: SglangEngine, rank: int) -> None:
    """A sync of weights that are each worker's own number."""
    values = {"model.norm.weight": float(rank), "model.embed_tokens.weight": 10.0 + rank}
    own = [(name, torch.full((3, 2), value)) for name, value in values.items()]
    engine.load_weights(own, 4)
    assert engine.version == 4
    engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
