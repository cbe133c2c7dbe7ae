"""Conversations over a real SGLang: log-probs of every turn are those of a plain forward over all of it."""

from __future__ import annotations

import pytest
import torch

from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import agent
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Parser, Tool
from rlgraph.runtime.engines.sglang.engine import SglangEngine

TEMPLATE = (
    "{% for m in messages %}w3{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}w4{% endif %}"
)
pytestmark = pytest.mark.filterwarnings("default")


def look(place: str) -> str:
    """Look."""
    return "w20"


def always(text: str) -> list[ToolCall]:
    return [ToolCall("look", {"place": "x"}), ToolCall("look", {"place": "y"})]


def test_turns_go_on_from_what_was_read_and_written(
    awake: SglangEngine, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awake, "stops", [1, *range(8, 64, 4)])  # so that turns end
    out = agent(
        awake,
        Context("rollout", seed=0, iteration=0, rows=range(3), total_rows=3),
        Ragged.of([[3, 30, 1, 4], [3, 31, 32, 1, 4], [3, 33, 1, 4]], torch.int64),
        n=3,
        max_new_tokens=100,
        max_turns=3,
        parser=Parser(always, {}, {}),
        tools={"look": Tool(look, {}, {})},
        template_options={"chat_template": TEMPLATE},
    )
    rows = zip(out.tokens.tolist(), out.loss_mask.tolist(), out.rollout_logprobs.tolist(), strict=True)
    for ids, mask, logprobs in rows:
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        own = [float(scores[at - 1, token]) if mask[at] else 0.0 for at, token in enumerate(ids)]
        assert own == pytest.approx(logprobs, abs=1e-4)
    assert out.turns.max() == 3 and out.tool_calls.max() == 4
