"""On a GPU: what sleeping frees, and that weights come back by a sync through CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TOKENS = 1 << 20  # of the cache
REQUESTS = [Request([5, 6, 7], [1, 2, 3]), Request([8, 9], [4])]


@pytest.fixture
def model(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda")


@pytest.fixture
def engine(path: str, tmp_path: Path) -> Iterator[SglangEngine]:
    made = SglangEngine(path, "cuda", "bfloat16", logs=tmp_path, max_cached_tokens=TOKENS)
    yield made
    made.close()


def free() -> int:
    """Bytes of the GPU that nobody holds."""
    return int(torch.cuda.mem_get_info()[0])


def test_sleep_frees_memory_and_a_sync_brings_the_weights(
    engine: SglangEngine, model: torch.nn.Module
) -> None:
    engine.load_weights(model.named_parameters(), 0)
    sums, before = engine.checksums(), free()
    engine.sleep(["kv", "weights"])
    cache = TOKENS * 2 * 2 * 2 * 16 * 2  # tokens, keys and values, layers, heads, width of a head, bytes
    assert free() - before > 0.9 * cache
    engine.wake(["weights"])
    engine.load_weights(model.named_parameters(), 1)
    engine.wake(["kv"])
    assert engine.checksums() == sums
    for many in engine.generate(REQUESTS, Sampling(20)):
        assert all(one.tokens and {*one.versions} == {1} for one in many)
