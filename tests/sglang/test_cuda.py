"""On a GPU: what sleeping frees, and that weights come back by a sync through CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
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


def test_an_adapter_is_served_beside_the_weights(path: str, tmp_path: Path) -> None:
    lora = {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = FsdpEngine.of(path, optimizer={"lr": 1e-2}, lora=lora)
    with torch.no_grad():
        for parameter in train.parameters:
            parameter.add_(0.02)  # an adapter that begins as nothing would add nothing
    held = {name: tensor.to("cuda") for name, tensor in train.adapter("bfloat16")}
    merged = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    merged.load_state_dict(dict(train.weights()), strict=False)
    dist.destroy_process_group()
    engine = SglangEngine(path, "cuda", "bfloat16", logs=tmp_path, max_cached_tokens=TOKENS, adapter=lora)
    try:
        for version in (0, 1):
            engine.load_weights(held.items(), version)
            engine.sleep(["kv"])
            engine.wake(["kv"])
            for request, many in zip(REQUESTS, engine.generate(REQUESTS, Sampling(20)), strict=True):
                for one in many:
                    assert {*one.versions} == {version}
                    ids = torch.tensor([[*request.prompt, *one.tokens]])
                    scores = merged(ids).logits[0].log_softmax(-1)[len(request.prompt) - 1 : -1]
                    own = scores[torch.arange(len(one.tokens)), torch.tensor(one.tokens)]
                    assert (own - torch.tensor(one.logprobs)).abs().max() < 0.2
    finally:
        engine.close()
