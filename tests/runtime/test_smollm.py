"""Real text through real weights: SmolLM2-135M-Instruct on questions of GSM8K (at night)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ran import metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

import smollm
from rlgraph.cli.main import main
from rlgraph.nodes.data.pairs import load_pairs
from rlgraph.nodes.support.dataset import load_examples, load_prompts
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.ops.interfaces import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

pytestmark = pytest.mark.nightly
QUESTIONS = smollm.questions(200)
SHOWN = [{"role": "system", "content": "Think step by step."}, {"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def model() -> str:
    return smollm.folder_or_skip()


@pytest.fixture(scope="module")
def theirs(model: str) -> Any:
    """The model's own tokenizer, by transformers alone."""
    return AutoTokenizer.from_pretrained(model)


def written(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [str(path)]


def rendered(tokenizer: Any, messages: list[dict[str, str]], begun: bool = False) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=begun)["input_ids"])


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def answered(question: str, answer: str) -> list[dict[str, str]]:
    return [*asked(question), {"role": "assistant", "content": answer}]


def test_prompts_are_what_the_template_writes(model: str, theirs: Any, tmp_path: Path) -> None:
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS]
    data = load_prompts(ModelFiles(model).tokenizer(), files=written(tmp_path / "rows.jsonl", rows))
    assert data.column("ids") == [rendered(theirs, asked(question), True) for question, _ in QUESTIONS]
    talk = [{"messages": [*SHOWN[:1], *asked(question)], "answer": "4"} for question, _ in QUESTIONS[:4]]
    files = written(tmp_path / "talk.jsonl", talk)
    data = load_prompts(ModelFiles(model).tokenizer(), files=files, question="messages")
    assert data.column("ids") == [rendered(theirs, row["messages"], True) for row in talk]


def learnt(theirs: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation up to its end token, and the last turn's among them."""
    whole, before = rendered(theirs, messages), rendered(theirs, messages[:-1], True)
    assert whole[: len(before)] == before
    end = len(whole) - whole[::-1].index(theirs.eos_token_id)
    return whole[:end], [place >= len(before) for place in range(end)]


def test_examples_are_what_the_template_writes(model: str, theirs: Any, tmp_path: Path) -> None:
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS]
    data = load_examples(ModelFiles(model).tokenizer(), files=written(tmp_path / "rows.jsonl", rows))
    expected = [learnt(theirs, answered(question, answer)) for question, answer in QUESTIONS]
    assert [(list(ids), list(mask)) for ids, mask in data.examples(range(len(rows)))] == expected


def test_pairs_are_what_the_template_writes(model: str, theirs: Any, tmp_path: Path) -> None:
    rows = [
        {"question": question, "chosen": answer, "rejected": f"I do not know. Is it {number}?"}
        for number, (question, answer) in enumerate(QUESTIONS)
    ]
    data = load_pairs(ModelFiles(model).tokenizer(), files=written(tmp_path / "rows.jsonl", rows))
    for side, name in enumerate(("chosen", "rejected")):
        expected = [learnt(theirs, answered(row["question"], row[name])) for row in rows]
        assert [(list(i), list(m)) for i, m in data.examples(range(len(rows)), side)] == expected


@pytest.fixture(scope="module")
def plain(model: str) -> Any:
    """The model by transformers alone, in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.mark.timeout(3600)
def test_the_train_engine_scores_worked_answers_as_transformers(
    model: str, theirs: Any, plain: Any, one_rank: None
) -> None:
    rows = [learnt(theirs, answered(*row)) for row in QUESTIONS]
    wanted = torch.cat([smollm.expected_logprobs(plain, ids, mask.index(True)) for ids, mask in rows])
    tokens = Ragged.of([ids for ids, _ in rows])
    learns = Ragged.of([mask for _, mask in rows], torch.bool)
    engine = FsdpEngine.of(model, frozen=True)
    found = engine.logprobs(tokens, learns).values[learns.values]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def serve(model: str) -> TransformersEngine:
    """The embedded engine with the model's weights."""
    engine = TransformersEngine(model)
    engine.load_pretrained()
    return engine


@pytest.mark.timeout(3600)
def test_the_embedded_engine_tells_the_log_probs_of_transformers(
    serve: TransformersEngine, theirs: Any, plain: Any
) -> None:
    prompts = [rendered(theirs, asked(question), True) for question, _ in QUESTIONS]
    made = serve.generate([Request(prompt, [number]) for number, prompt in enumerate(prompts)], Sampling(24))
    for prompt, (drawn,) in zip(prompts, made, strict=True):
        wanted = smollm.expected_logprobs(plain, [*prompt, *drawn.tokens], len(prompt))
        torch.testing.assert_close(torch.tensor(drawn.logprobs), wanted, rtol=0, atol=1e-4)


@pytest.mark.timeout(3600)
def test_greedy_answers_are_those_of_generate(serve: TransformersEngine, theirs: Any, plain: Any) -> None:
    prompts = [rendered(theirs, asked(question), True) for question, _ in QUESTIONS]
    requests = [Request(prompt, [number]) for number, prompt in enumerate(prompts)]
    made = serve.generate(requests, Sampling(48, temperature=0))
    for prompt, (drawn,) in zip(prompts, made, strict=True):
        with torch.no_grad():
            whole = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=48)[0]
        assert drawn.tokens == whole[len(prompt) :].tolist()


def likelihood(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    learns = batch["loss_mask"].values
    return -batch["logprobs"].values[learns].sum() / totals.tokens, {}


def test_an_exported_model_is_the_same_after_it_is_loaded(
    model: str, theirs: Any, one_rank: None, tmp_path: Path
) -> None:
    engine = FsdpEngine.of(model, optimizer={"lr": 1e-4})
    rows = [learnt(theirs, answered(*row)) for row in QUESTIONS[:4]]
    tokens = Ragged.of([ids for ids, _ in rows])
    learns = Ragged.of([mask for _, mask in rows], torch.bool)
    before = engine.logprobs(tokens, learns).values
    columns = {"tokens": tokens, "loss_mask": learns}
    engine.update(columns, likelihood, torch.arange(len(rows)), len(rows))
    after = engine.logprobs(tokens, learns).values
    assert (after - before).abs().max() > 0.01
    engine.export(str(tmp_path / "model"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    held = dict(engine.weights())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, held[name])
    wanted = torch.cat([smollm.expected_logprobs(again, ids, mask.index(True)) for ids, mask in rows])
    torch.testing.assert_close(after[learns.values], wanted, rtol=0, atol=1e-4)


@pytest.mark.timeout(3600)
def test_the_demo_learns_and_its_model_can_be_asked(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it takes depends on the machine: benchmarks/demo_smollm.py measures that."""
    monkeypatch.chdir(tmp_path)
    demo = CliRunner().invoke(main, ["demo", "smollm"])
    assert demo.exit_code == 0, demo.output
    accuracies = [line["eval/accuracy"] for line in metrics("runs/demo_smollm") if "eval/accuracy" in line]
    assert accuracies[0] <= 0.25
    assert accuracies[-1] >= 0.80
    question = "Mia has 7 coins and finds 5 more. How many coins does Mia have? Reply with the number only."
    answer = CliRunner().invoke(main, ["chat", "runs/demo_smollm"], input=question)
    assert answer.exit_code == 0
    assert "12" in answer.output
