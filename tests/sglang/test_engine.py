"""The engine over a real SGLang server on the CPU: samples, syncs, states, faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from rlgraph.engines import Generation, Request, Sampling
from rlgraph.errors import RunError
from rlgraph.runtime.serve.sglang.engine import SglangEngine

VOCABULARY = 64
REQUESTS = [Request([5, 6, 7], [1, 2, 3]), Request([8, 9], [4]), Request([11] * 9, [5, 6])]
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random tied model and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=True, eos_token_id=1, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture(scope="module")
def engine(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    made = SglangEngine(path, logs=tmp_path_factory.mktemp("logs"), max_rows=4)
    yield made
    made.close()


@pytest.fixture
def awake(engine: SglangEngine, model: torch.nn.Module) -> SglangEngine:
    """The engine awake with the model's weights as version 0, whatever a test before did."""
    if not engine.server.is_alive():
        engine.restart()
    if engine.away:
        engine.wake(sorted(engine.away))
    engine.load_weights(model.named_parameters(), 0)
    return engine


@pytest.fixture
def model(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def gap(model: torch.nn.Module, request: Request, made: Generation, temperature: float = 1.0) -> float:
    """How far a generation's log-probs are from those of a plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt, *made.tokens]])).logits[0]
    scores = torch.log_softmax(logits / temperature, -1)[len(request.prompt) - 1 : -1]
    own = scores[torch.arange(len(made.tokens)), torch.tensor(made.tokens)]
    return float((own - torch.tensor(made.logprobs)).abs().max())


def assert_agrees(engine: SglangEngine, model: torch.nn.Module, temperature: float = 1.0) -> None:
    answers = engine.generate(REQUESTS, Sampling(12, temperature))
    assert [len(many) for many in answers] == [len(request.seeds) for request in REQUESTS]
    for request, many in zip(REQUESTS, answers, strict=True):
        for made in many:
            assert gap(model, request, made, temperature) < 1e-4
            assert 1 <= len(made.tokens) <= 12 and made.finish == (
                "stop" if made.tokens[-1] == 1 else "length"
            )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_a_plain_forward(
    awake: SglangEngine, model: torch.nn.Module, temperature: float
) -> None:
    assert_agrees(awake, model, temperature)


def test_greedy_is_generate_of_transformers(awake: SglangEngine, model: torch.nn.Module) -> None:
    for request, (made, *_) in zip(REQUESTS, awake.generate(REQUESTS, Sampling(10, 0.0)), strict=True):
        prompt = torch.tensor([request.prompt])
        expected = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert list(made.tokens) == expected[0, len(request.prompt) :].tolist()


def test_samples_of_a_prompt_differ(awake: SglangEngine) -> None:
    (many,) = awake.generate([Request([5, 6], list(range(16)))], Sampling(12, 1.5))
    assert len({tuple(made.tokens) for made in many}) > 8


def test_log_probs_agree_before_and_after_ten_syncs(awake: SglangEngine, model: torch.nn.Module) -> None:
    before = awake.checksums()
    for version in range(1, 11):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        awake.load_weights(model.named_parameters(), version)
        assert awake.version == version
        assert_agrees(awake, model)
    assert awake.checksums() != before
    awake.load_weights(model.named_parameters(), 11)
    assert awake.checksums()["ranks"] == awake.checksums()["ranks"]


def test_weights_at_its_path(engine: SglangEngine, awake: SglangEngine, path: str) -> None:
    engine.load_pretrained()
    assert_agrees(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def test_tokens_of_other_weights_are_refused(awake: SglangEngine) -> None:
    awake.version = 7
    with pytest.raises(RunError, match=r"generated with weights \{'0'\}, not with 7"):
        awake.generate(REQUESTS, Sampling(2))


@pytest.mark.parametrize(
    ("prompt", "tokens", "law"), [([], 4, "0 prompt tokens"), ([5] * 120, 9, "more than the model's context")]
)
def test_requests_that_can_not_be(awake: SglangEngine, prompt: list[int], tokens: int, law: str) -> None:
    with pytest.raises(ValueError, match=law):
        awake.generate([Request(prompt, [0])], Sampling(tokens))


def test_states_are_kept_whatever_comes(awake: SglangEngine, model: torch.nn.Module) -> None:
    class States(RuleBasedStateMachine):
        """Random interleavings; the model of it all is the set of parts that sleep."""

        @initialize()
        def begin(self) -> None:
            if awake.away:
                awake.wake(sorted(awake.away))
            self.asleep: set[str] = set()
            awake.load_weights(model.named_parameters(), 0)
            self.version = 0

        @rule(parts=st.sampled_from([["kv"], ["weights"], ["weights", "kv"]]))
        def sleep(self, parts: list[str]) -> None:
            if not self.asleep & {*parts}:
                awake.sleep(parts)
                self.asleep |= {*parts}
                self.version = -1 if "weights" in parts else self.version
            else:
                with pytest.raises(RuntimeError):
                    awake.sleep(parts)
            assert awake.away == self.asleep and awake.version == self.version

        @rule(parts=st.sampled_from([["kv"], ["weights"], ["weights", "kv"]]))
        def wake(self, parts: list[str]) -> None:
            if {*parts} <= self.asleep:
                awake.wake(parts)
                self.asleep -= {*parts}
            else:
                with pytest.raises(RuntimeError):
                    awake.wake(parts)
            assert awake.away == self.asleep

        @rule(version=st.integers(0, 50))
        def sync(self, version: int) -> None:
            if "weights" in self.asleep:
                with pytest.raises(RuntimeError, match="asleep"):
                    awake.load_weights(model.named_parameters(), version)
            else:
                awake.load_weights(model.named_parameters(), version)
                self.version = version

        @rule()
        def generate(self) -> None:
            if self.asleep or self.version < 0:
                with pytest.raises(RuntimeError):
                    awake.generate(REQUESTS, Sampling(2))
            else:
                assert_agrees(awake, model)

    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    slow = settings(max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(States, settings=slow)


def test_a_server_that_was_killed_is_started_anew(awake: SglangEngine, model: torch.nn.Module) -> None:
    os.killpg(awake.server.process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="the SGLang server"):
        awake.generate(REQUESTS, Sampling(4))
    awake.restart()
    with pytest.raises(RuntimeError, match="no weights yet"):
        awake.generate(REQUESTS, Sampling(4))
    awake.load_weights(model.named_parameters(), 3)
    assert_agrees(awake, model)


def test_a_server_that_does_not_come_up_ends_with_its_last_lines(tmp_path: Path, path: str) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text(Path(path, name).read_text())
    with pytest.raises(RunError, match=r"ended \(.*\)\n    the end of .*sglang-0.log"):
        SglangEngine(str(tmp_path / "model"), logs=tmp_path)


def test_nothing_is_left_behind(path: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import os, sys; from pathlib import Path\n"
        "from rlgraph.runtime.serve.sglang.engine import SglangEngine\n"
        "engine = SglangEngine(sys.argv[1], logs=Path(sys.argv[2]))\n"
        "print(engine.server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    group = int(done.stdout.split()[-1])
    for _ in range(600):
        if not members(group):
            return
        signal.sigtimedwait([], 0.1)
    raise AssertionError(f"processes of the server are left: {members(group)}")


def members(group: int) -> list[int]:
    """The processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
