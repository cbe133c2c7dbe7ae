"""Unmodified SDKs and frameworks against the endpoint: all that the policy drew is trained, in one row.

Each client runs with the packages of ``.agents`` (requirements/agents.in), which ``make nightly`` makes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripted_engine import ScriptedEngine
from scripted_episodes import TOKENIZER, mean, reply, rows_of, run

PYTHON = Path(__file__).parents[2] / ".agents/bin/python"
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is 3."}}</tool_call>'
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON.exists(), reason="no clients: make .agents/installed"),
]


def answered(prompt: str) -> str:
    """As ``reply``; where a final answer is a call, as smolagents wants it, call it behind a result."""
    wants_call = "final_answer" in prompt
    return FINAL if wants_call and "Observation:\n3" in prompt else reply(prompt)


@pytest.mark.parametrize(
    ("client", "rows"),
    [
        ("openai", 1),
        ("openai_responses", 1),
        ("anthropic_tool_runner", 1),
        ("anthropic_stream", 1),
        ("openai_agents", 1),
        ("openai_agents_chat", 1),
        ("pydantic_ai", 1),
        ("langgraph", 1),
        ("smolagents", 2),  # it writes its calls into the text of another message
        ("litellm", 1),
    ],
)
def test_all_that_was_drawn_is_trained(client: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{PYTHON} {Path(__file__).with_name('clients.py')} {client}"
    engine = ScriptedEngine(TOKENIZER, answered)
    episodes, ctx, _ = run(None, monkeypatch, engine, command=command, max_tokens=30000, timeout=120.0)
    assert episodes.episode_rewards.tolist() == [1.0]
    assert episodes.turns.tolist() == [2]
    tokens, mask = rows_of(episodes)
    drawn = sum(len(generation.tokens) for generation in engine.drawn)
    assert sum(map(sum, mask)) == drawn
    assert len(tokens) == rows
    assert mean(ctx, "endpoint/segments/first") == 1.0
