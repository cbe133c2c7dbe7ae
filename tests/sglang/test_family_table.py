"""Which families a real SGLang serves on a CPU, tried on tiny random models: its column of docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import build
from test_train_engine import TEMPERATURE, generated, objective

from model_table import REFUSED, ROWS, YES, compare
from rlgraph.errors import RunError
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.preflight import unfit

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.nightly]
# what SGLang 0.5.23 lacks without a GPU: a word of its error, and why
LACKING = {
    "DeepSeek V3": ("Expected size for", "its attention on a CPU takes no latent keys and values"),
    "gpt-oss": ("attention backend", "its attention on a CPU has no sinks"),
    "Qwen3-Next": ("[Tt]riton", "its linear attention is written for GPUs (Triton)"),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def agrees(path: str, logs: Path, **settings: Any) -> None:
    """Log-probs of a server's tokens are the train engine's, before and after an update and a sync."""
    served = SglangEngine(path, logs=logs, max_rows=4, restarts=0, **settings)
    try:
        train = FsdpEngine.of(path, optimizer={"lr": 1e-2}, **settings)
        for version in range(2):
            served.load_weights(train.weights(), version)
            batch, own = generated(served)
            found = train.logprobs(batch["tokens"], batch["loss_mask"], TEMPERATURE).values
            assert (found - own).abs().max() < 1e-4
            rows = torch.arange(len(batch["tokens"].lengths))
            train.update(batch, objective, rows, len(rows))
    finally:
        served.close()


@pytest.mark.parametrize("label", ROWS)
def test_the_page_says_what_is_served(
    alone: None, tmp_path: Path, label: str, request: pytest.FixtureRequest
) -> None:
    path = str(build(tmp_path, ROWS[label]))
    cell = YES, ""
    if law := unfit(ModelFiles(path).config()):
        with pytest.raises(ValueError, match=re.escape(law)):
            agrees(path, tmp_path / "logs")
        cell = REFUSED, law
    elif label in LACKING:
        word, why = LACKING[label]
        with pytest.raises(RunError, match=word):
            agrees(path, tmp_path / "logs")
        cell = "no", f"SGLang 0.5.23 without a GPU: {why}"
    else:
        agrees(path, tmp_path / "logs")
    compare(label, {"SGLang": cell}, request.config.getoption("--bless"))


def test_a_server_reads_the_changed_config(alone: None, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0}
    agrees(str(build(tmp_path, "llama")), tmp_path / "logs", config={"rope_scaling": rope})
