"""reward.model on the train engine, against the sequence classifiers of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_fsdp
import torch

from rlgraph.nodes.reward.model import reward_model
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

SHAPE = {**test_fsdp.SHAPE, "num_labels": 1, "pad_token_id": 0}
ROWS = [[5, 7, 3], [9], [2, 2, 8, 11, 4, 23], [6, 1]]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_it_is_the_score_of_a_sequence_classifier(family: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE)
    classifier = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    classifier.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        wanted = [classifier(torch.tensor([row])).logits.item() for row in ROWS]
    engine = FsdpEngine(str(tmp_path / "model"), head="value", frozen=True, micro_tokens=8)
    found = reward_model(Context("rewards", 0, 0), engine, Ragged.of(ROWS, torch.int64))
    assert found.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
