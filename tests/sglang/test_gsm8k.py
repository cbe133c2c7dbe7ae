"""Real text with SGLang: the shipped grpo on GSM8K questions, two FSDP ranks and a server over both."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

EMBEDDED = Path(__file__).parents[1] / "runtime" / "test_gsm8k.py"


def embedded() -> ModuleType:
    """The module of the same tests with the embedded engine."""
    spec = importlib.util.spec_from_file_location("embedded_gsm8k", EMBEDDED)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gsm8k = embedded()
files = gsm8k.files
pytestmark = gsm8k.pytestmark


@pytest.mark.nightly
def test_two_ranks_and_tensor_parallel_2(files: Path, tmp_path: Path) -> None:
    config = Qwen2Config.from_pretrained(files / "model", num_key_value_heads=2)  # one for each rank
    Qwen2ForCausalLM(config).save_pretrained(files / "model")
    gsm8k.run(
        "grpo",
        files,
        "prompts.max_prompt_tokens=120",
        "models.policy.serve.engine=sglang",
        "models.policy.serve.tensor_parallel=2",
        "--run-dir",
        str(tmp_path / "run"),
        timeout=580,
    )
    lines = gsm8k.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["tokens/generated"] > 6 * 2
        assert line["update_policy/rollout_gap_max"] < 1e-4
        assert line["update_policy/skipped"] == 0
