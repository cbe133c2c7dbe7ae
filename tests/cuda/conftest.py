"""Where tests of devices run: on a GPU, and without one on the far device (``helpers/far.py``) or the CPU.

``make cuda`` runs this folder with nothing but torch, transformers and some wheels: no Ray, no SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import far
from rlgraph.runtime.demo import make_tokenizer, model_config


def _there(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(params=["far", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU, or the device that refuses what a GPU refuses and computes on the CPU."""
    _there(request.param)
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with far.device():
        yield far.DEVICE


@pytest.fixture(params=["cpu", "cuda"])
def memory(request: pytest.FixtureRequest) -> torch.device:
    """A device whose memory can be given back: the far device has none of its own."""
    _there(request.param)
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    """For what a CPU has nothing like."""
    _there("cuda")
    return torch.device("cuda")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank, as a worker of one device has it."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{tmp_path_factory.mktemp('store')}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0) if on_gpu else None,
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of the demo's model, with grouped queries, random weights and its tokenizer."""
    from transformers import Qwen2ForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    config = model_config(tokenizer)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub of SGLang, for this process and those that it starts."""
    stub = str(Path(__file__).parent / "stub")
    monkeypatch.syspath_prepend(stub)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([stub, os.environ.get("PYTHONPATH", "")]))
