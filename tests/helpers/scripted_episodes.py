"""Episodes over HTTP whose policy is scripted: it calls a tool first, and then says what the tool said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from byte_tokenizer import tokenizer_of
from rlgraph.nodes.endpoint.rollout import Episodes, harness
from rlgraph.nodes.rollout.sampling import SamplingAttributes
from rlgraph.nodes.score.segment import paths
from rlgraph.ops import Context
from scripted_engine import ScriptedEngine

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOKENIZER = tokenizer_of((["<|im_start|>", "<|im_end|>"], "<|im_end|>", TEMPLATE))
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2.0}}</tool_call>'
Solve = Callable[[dict[str, Any], str, str], Any]


def reply(prompt: str) -> str:
    """Think and call a tool first, then answer with what it said."""
    turn = prompt.rpartition("<|im_start|>tool\n")
    if turn[1]:
        return f"It is {turn[2].partition('<|im_end|>')[0]}."
    return f"<think>\nA sum.\n</think>\n\n{CALL}" if "Tools:" in prompt else "Hello."


def run(
    solve: Solve | None,
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine | None = None,
    tasks: int = 1,
    **attributes: Any,
) -> tuple[Episodes, Context, ScriptedEngine]:
    monkeypatch.setattr("rlgraph.nodes.endpoint.rollout.load_function", lambda target: solve)
    engine = engine or ScriptedEngine(TOKENIZER, reply)
    ctx = Context("rollout", seed=5, iteration=1, rows=range(tasks), total_rows=tasks)
    if solve is not None:
        attributes["run"] = "my_agent.py:solve"
    settings = {"max_tokens": 4000, "timeout": 60.0, "sampling": SamplingAttributes(), **attributes}
    questions = [f"question {number}" for number in range(tasks)]
    return harness(engine, ctx, questions, **settings), ctx, engine


def rows_of(episodes: Episodes) -> tuple[list[list[int]], list[list[bool]]]:
    ctx = Context("segments", seed=0, iteration=1)
    rows = paths(
        ctx,
        episodes.episode_tokens,
        episodes.episode_parents,
        episodes.episode_calls,
        episodes.episode_logprobs,
        most=50,
    )
    return rows.tokens.tolist(), rows.loss_mask.tolist()


def mean(ctx: Context, name: str) -> float:
    metric = ctx.metrics[name]
    return float(metric.value)
