"""What SGLang says of its tokens, beside what the train engine says, over updates and syncs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling, Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = pytest.mark.filterwarnings("default")
REQUESTS = [Request([5, 6, 7], [1, 2, 3]), Request([8, 9], [4]), Request([11] * 9, [5, 6])]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


def generated(engine: SglangEngine) -> tuple[dict[str, Ragged], torch.Tensor]:
    """Samples as columns, and the log-probs that came with them."""
    answers = engine.generate(REQUESTS, Sampling(12, TEMPERATURE))
    pairs = [(request.prompt, one) for request, many in zip(REQUESTS, answers, strict=True) for one in many]
    tokens = Ragged.of([[*prompt, *one.tokens] for prompt, one in pairs])
    mask = [[False] * len(prompt) + [True] * len(one.tokens) for prompt, one in pairs]
    own = [[0.0] * len(prompt) + list(one.logprobs) for prompt, one in pairs]
    return {"tokens": tokens, "loss_mask": Ragged.of(mask, torch.bool)}, Ragged.of(own, torch.float32).values


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, {"rank": 3, "alpha": 6.0, "targets": "all-linear"}], ids=["weights", "adapters"]
)
def test_log_probs_agree_before_and_after_ten_syncs(
    awake: SglangEngine, path: str, alone: None, lora: dict[str, Any] | None
) -> None:
    train = FsdpEngine.of(path, optimizer={"lr": 1e-2}, lora=lora)
    sums = set()
    for version in range(11):
        awake.load_weights(train.weights(), version)
        batch, own = generated(awake)
        found = train.logprobs(batch["tokens"], batch["loss_mask"], TEMPERATURE).values
        assert (found - own).abs().max() < 1e-4
        sums.add(str(awake.checksums()))
        rows = torch.arange(len(batch["tokens"].lengths))
        train.update(batch, objective, rows, len(rows))
    assert len(sums) == 11
