"""Conversations over a real SGLang: log-probs of every turn are those of a plain forward over all of it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from flattened import call_op
from rlgraph.nodes.agent import live_chats
from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import agent
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Loop, Parser, Tool
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
    out = call_op(
        agent,
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


@pytest.fixture
def session() -> Iterator[dict[str, Any]]:
    """What an op keeps on its worker, until the test ends."""
    kept: dict[str, Any] = {}
    yield kept
    for one in kept.values():
        one.close()


async def told(chat: Chat) -> None:
    """Turns of a hundred tokens, one to three, with a word of others between them."""
    for turn in range(1 + chat.number % 3):
        if turn:
            chat.say("user", "w20")
        await chat.turn()


def test_new_weights_cut_turns_in_flight_and_each_token_is_of_those_that_drew_it(
    awake: SglangEngine, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, session: dict[str, Any]
) -> None:
    monkeypatch.setattr(live_chats, "MOMENT", 0.1)
    monkeypatch.setattr(awake, "stops", [1, 8])
    rows, begun, made, known = [0, 1, 2, 3], [], [], [model]
    while rows:
        context = Context("rollout", 0, 0, rows=rows, session=session, resumes=True, begun=begun)
        prompt = Ragged.of([[3, 30 + row, 1, 4] for row in rows], torch.int64)
        given = {"max_new_tokens": 400, "max_turn_tokens": 100, "chunk": 1}
        given["template_options"] = {"chat_template": TEMPLATE}
        made.append(call_op(agent, awake, context, prompt, n=2, loop=Loop(told, {}, {}), **given))
        rows, begun = [row for place, row in enumerate(rows) if place not in context.whole], [*context.left]
        session["live"].settle()
        known.append(deepcopy(known[-1]))
        with torch.no_grad():
            for weight in known[-1].parameters():
                weight.add_(0.01 * torch.randn_like(weight))
        awake.load_weights(known[-1].named_parameters(), len(known) - 1)
    spans = 0
    for out in made:
        for row, ids in enumerate(out.tokens):
            mask, versions, logprobs = (
                column[row] for column in (out.loss_mask, out.token_versions, out.rollout_logprobs)
            )
            assert ((versions >= 0) == mask).all() and (versions[mask].diff() >= 0).all()
            spans = max(spans, len(versions[mask].unique()))
            for version in versions[mask].unique().tolist():
                with torch.no_grad():
                    scores = torch.log_softmax(known[version](ids[None]).logits[0], -1)
                (places,) = torch.where(versions == version)
                own = scores[places - 1, ids[places]]
                assert torch.allclose(own, logprobs[places], atol=1e-4)
    assert spans > 1, "no conversation has gone on through a sync"
