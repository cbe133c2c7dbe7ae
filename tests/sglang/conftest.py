"""A real SGLang, where this interpreter has one (see `make sglang`): one server for all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

HERE, ANYWHERE = "tests/sglang/", "test_router"
# the files of the tests that share a server, which one of pytest's processes then runs
SHARE = ("addresses", "agent", "engine", "enough", "openai", "pool", "states", "stays", "train_engine")
SHARE += ("without_copy",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process files of tests, and all that share a server to the same one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "server" if file.removeprefix(f"{HERE}test_").removesuffix(".py") in SHARE else file

    return OneServer(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(
            reason="no SGLang in this environment; `make sglang` makes one and runs these tests"
        )
        for item in items:
            if item.nodeid.startswith(HERE) and ANYWHERE not in item.nodeid:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random tied model and a tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    folder, vocabulary = tmp_path_factory.mktemp("model"), 64
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=True, eos_token_id=1, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, vocabulary)}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture
def fakes() -> Iterator[object]:
    """Two servers that keep SGLang's rules and compute nothing."""
    from fake import Fake

    made = [Fake(), Fake()]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def model(path: str) -> object:
    """The model as transformers has it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="session")
def engine(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """With a server that all tests share."""
    from rlgraph.runtime.engines.sglang.engine import SglangEngine

    made = SglangEngine(path, logs=tmp_path_factory.mktemp("logs"), max_rows=4, restarts=100)
    yield made
    made.close()


@pytest.fixture
def awake(engine: object, model: object, request: pytest.FixtureRequest) -> object:
    """The engine awake with the model's weights as version 0, whatever a test before did."""
    assert request.path.stem.removeprefix("test_") in SHARE, "name its file in SHARE"
    engine.abort()
    if engine.sleeping:
        engine.wake(sorted(engine.sleeping))
    engine.load_weights(model.named_parameters(), 0)
    return engine
