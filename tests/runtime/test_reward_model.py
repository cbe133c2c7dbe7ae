"""reward.model on the train engine, against the sequence classifiers of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_fsdp
import torch

from rlgraph.nodes.loss.preference import reward_weights
from rlgraph.nodes.reward.model import reward_model
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.reward import reward
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
    engine = FsdpEngine.of(str(tmp_path / "model"), head="value", frozen=True, micro_tokens=8)
    found = reward_model(Context("rewards", 0, 0), engine, Ragged.of(ROWS, torch.int64))
    assert found.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("micro_tokens", [4, 64])
def test_an_update_has_the_gradient_of_the_pairs_loss(micro_tokens: int, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(1)
    classifier = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**SHAPE)).eval()
    classifier.save_pretrained(tmp_path / "model")
    classifier.double()
    scores = torch.cat([classifier(torch.tensor([row])).logits[0] for row in ROWS])
    chosen, group = torch.tensor([True, False, False, True]), torch.tensor([0, 1, 0, 1])
    margins = torch.stack([scores[0] - scores[2], scores[3] - scores[1]])
    (-torch.nn.functional.logsigmoid(margins).mean()).backward()
    wanted = torch.stack([p.grad.norm() for p in classifier.parameters() if p.grad is not None]).norm()

    path = str(tmp_path / "model")
    engine = FsdpEngine.of(path, head="value", optimizer={"lr": 1e-3}, micro_tokens=micro_tokens)
    tokens = Ragged.of(ROWS, torch.int64)
    ctx = Context("update_reward", 0, 0, rows=range(4), total_rows=4)
    before = reward_model(ctx, engine, tokens)
    weights = reward_weights(Context("preference", 0, 0), before, chosen, group)
    reward(engine, ctx, tokens, weights.preference)
    assert ctx.metrics["update_reward/grad_norm"].value == pytest.approx(wanted.item(), rel=1e-4)
    assert ctx.metrics["update_reward/score"].value == pytest.approx(scores.mean().item(), rel=1e-4, abs=1e-6)
    after = reward_model(ctx, engine, tokens)
    assert (after[0] - after[2] > before[0] - before[2]) and (after[3] - after[1] > before[3] - before[1])
