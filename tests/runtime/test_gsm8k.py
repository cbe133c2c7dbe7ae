"""Real text: the shipped grpo and ppo on GSM8K questions, two FSDP ranks, with a tokenizer made here.

The questions are not part of the project; the tests skip where they are not beside the checkout.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the GSM8K questions at {DATA}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer, and the questions as jsonl and as parquet."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()][:600]
    (folder / "first.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:300]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[300:]), folder / "second.parquet")
    make_model(folder / "model", [row["question"] for row in rows])
    return folder


def make_model(folder: Path, texts: list[str]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def run(graph: str, files: Path, *more: str, expect: int = 0, timeout: int = 300) -> str:
    settings = [
        f"models.policy.path={files / 'model'}",
        f"prompts.files=[{files / 'first.jsonl'}, {files / 'second.parquet'}]",
        "prompts.batch=6",
        "rollout.n=2",
        "rollout.max_new_tokens=24",
        "update_policy.minibatches=2",
        "schedule.iterations=2",
    ]
    command = [sys.executable, "-m", "rlgraph", "run", graph, *settings, *more, "--devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("graph", ["grpo", "ppo"])
def test_two_iterations_on_two_ranks(graph: str, files: Path, tmp_path: Path) -> None:
    more = ["update_critic.minibatches=2"] if graph == "ppo" else []
    run(graph, files, "prompts.max_prompt_tokens=120", *more, "--run-dir", str(tmp_path / graph))
    lines = metrics(tmp_path / graph)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["tokens/generated"] > 6 * 2
        assert 0 < line["data/overlong"] < 0.5  # some of the questions are over 120 tokens
        assert 0 <= line["reward/mean"] <= 1
        assert line["update_policy/skipped"] == 0
    if graph == "ppo":
        assert lines[0]["update_critic/loss"] > 0
        assert lines[0]["update_policy/grad_norm"] > 0
    sample = json.loads((tmp_path / graph / "samples" / "step-000002.jsonl").read_text().splitlines()[0])
    assert sample["tokens"].startswith("<|user|>")
    assert sample["answer"].replace(",", "").lstrip("-").isdigit()  # what stood behind ####


@pytest.mark.slow
def test_a_question_longer_than_the_context_is_named_before_anything_starts(
    files: Path, tmp_path: Path
) -> None:
    text = run(
        "grpo", files, "prompts.max_prompt_tokens=null", "rollout.max_new_tokens=200",
        "--run-dir", str(tmp_path / "run"), expect=1,
    )  # fmt: skip
    assert "the context of policy is 256" in text
    assert ".jsonl:" in text or ".parquet:" in text
    assert "drop the longer ones by prompts.max_prompt_tokens=56" in text
    assert not (tmp_path / "run").exists()
