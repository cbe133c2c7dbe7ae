"""Episodes of agents over HTTP: what clients send and get, and that exactly what was drawn is recorded."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.errors import RunError
from scripted_engine import ScriptedEngine
from scripted_episodes import TOKENIZER, Solve, mean, reply, rows_of, run

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def post(base_url: str, key: str, path: str, body: Any, **headers: str) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{base_url}/{path}", data, {"authorization": f"Bearer {key}", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())}
    return json.loads(text) if text.startswith("{") else text


def chat(base_url: str, key: str, messages: list[Any], **more: Any) -> Any:
    return post(base_url, key, "chat/completions", {"model": "m", "messages": messages, **more})


def as_pydantic(message: dict[str, Any]) -> dict[str, Any]:
    """A turn as pydantic-ai 2.62 sends it back: without thinking, arguments written anew."""
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        calls.append({**call, "function": {"name": call["function"]["name"], "arguments": arguments}})
    return {"role": "assistant", "content": None, "tool_calls": calls}


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    return message


def as_edited(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "I know better."}


def agent_of(rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Solve:
    def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task["question"]}]
        message = chat(base_url, api_key, messages, tools=TOOLS)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2.0}
        messages += [rewrite(message), {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        answer = chat(base_url, api_key, messages, tools=TOOLS)["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("It is 3.", "stop")
        return 1.0

    return solve


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("rewrite", [as_sent, as_pydantic])
def test_a_rewritten_turn_continues_the_tokens_that_were_drawn(
    rewrite: Callable[[dict[str, Any]], dict[str, Any]], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(TOKENIZER, reply, overlaps)
    episodes, ctx, engine = run(agent_of(rewrite), monkeypatch, engine, n=2)
    tokens, mask = rows_of(episodes)
    assert len(tokens) == 2  # one row per episode
    for row, trained in zip(tokens, mask, strict=True):
        drawn = [token for token, is_trained in zip(row, trained, strict=True) if is_trained]
        first, second = engine.drawn[0], engine.drawn[-1]
        assert drawn == [*first.tokens, *second.tokens]
        assert tuple(row[: -len(second.tokens)]) in engine.prompts
    assert episodes.episode_rewards.tolist() == [1.0, 1.0]
    assert episodes.responses == ["It is 3.", "It is 3."]
    assert episodes.group.tolist() == [0, 0]
    assert mean(ctx, "endpoint/segments/first") == 1.0
    assert "endpoint/segments/edited_turn" not in ctx.metrics
    logprobs = episodes.episode_logprobs.values[episodes.episode_mask.values]
    assert logprobs[:3].tolist() == [-0.25, -0.5, -0.75]


def test_an_edited_turn_begins_a_row_in_which_nothing_else_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    episodes, ctx, engine = run(agent_of(as_edited), monkeypatch)
    tokens, mask = rows_of(episodes)
    first, second = engine.drawn
    assert [sum(trained) for trained in mask] == [len(first.tokens), len(second.tokens)]
    assert tuple(tokens[0]) == (*engine.prompts[0], *first.tokens)
    assert tuple(tokens[1]) == (*engine.prompts[1], *second.tokens)
    assert mean(ctx, "endpoint/segments/edited_turn") == 1.0
    assert "I know better." in TOKENIZER.decode(tokens[1])


def test_each_reason_for_a_new_row_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    question = {"role": "user", "content": "a"}

    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        first = chat(base_url, api_key, [question])["choices"][0]["message"]
        second = [question, first, {"role": "user", "content": "b"}]
        answer = chat(base_url, api_key, second)["choices"][0]["message"]
        chat(base_url, api_key, [question])  # again
        chat(base_url, api_key, [question, first, {"role": "user", "content": "c"}])  # goes on with the last
        chat(base_url, api_key, [question], tools=TOOLS)  # tools
        chat(base_url, api_key, [{"role": "system", "content": "s"}, question])  # system
        chat(base_url, api_key, [{"role": "user", "content": "z"}])  # another
        changed = [question, first, {"role": "user", "content": "x"}, answer, question]
        chat(base_url, api_key, changed)  # went_back
        chat(base_url, api_key, [question, {"role": "user", "content": "b"}])  # struck_turn

    episodes, ctx, _ = run(solve, monkeypatch)
    counted = {}
    for name in ctx.metrics:
        if name.startswith("endpoint/segments/"):
            counted[name.removeprefix("endpoint/segments/")] = mean(ctx, name)
    assert counted == {
        "first": 1,
        "again": 1,
        "went_back": 1,
        "tools": 1,
        "system": 1,
        "another": 1,
        "struck_turn": 1,
    }
    _tokens, mask = rows_of(episodes)
    assert sum(map(sum, mask)) == int(episodes.episode_mask.values.sum())  # each drawn token once
    assert episodes.turns.tolist() == [9]


def test_responses_go_on_by_items_or_behind_an_id_and_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}

    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        body = {"model": "m", "input": "one and two?", "instructions": "Be brief.", "tools": [tool]}
        first = post(base_url, api_key, "responses", body)
        reasoning, call = first["output"]
        assert (reasoning["content"][0]["text"], call["name"]) == ("A sum.", "add")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        items = [{"role": "user", "content": "one and two?"}, call, result]
        whole = post(base_url, api_key, "responses", {**body, "input": items})
        assert whole["output"][0]["content"][0]["text"] == "It is 3."
        behind = {**body, "input": [result], "previous_response_id": first["id"], "stream": True}
        events = post(base_url, api_key, "responses", behind)
        assert "event: response.output_text.delta" in events and "event: response.completed" in events

    episodes, ctx, _ = run(solve, monkeypatch)
    assert mean(ctx, "endpoint/segments/went_back") == 1.0  # the same continuation, asked for twice
    assert len(rows_of(episodes)[0]) == 2


def test_messages_go_on_by_history_or_in_a_thread_and_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}

    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        question = {"role": "user", "content": "one and two?"}
        body = {
            "model": "m",
            "max_tokens": 500,
            "system": "Be brief.",
            "tools": [tool],
            "messages": [question],
        }
        first = post(base_url, api_key, "v1/messages", {**body, "thread": {"type": "create"}})
        thinking, call = first["content"]
        assert (thinking["thinking"], call["input"]) == ("A sum.", {"a": 1, "b": 2.0})
        assert first["stop_reason"] == "tool_use"
        block = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
        result = {"role": "user", "content": [block]}
        thread = {"type": "continue", "previous_message_id": first["id"]}
        second = {"model": "m", "max_tokens": 500, "messages": [result], "thread": thread}
        assert post(base_url, api_key, "messages", second)["content"][0]["text"] == "It is 3."
        assistant = {"role": "assistant", "content": first["content"]}
        whole = {**body, "messages": [question, assistant, result], "stream": True}
        assert "event: message_stop" in post(base_url, api_key, "messages", whole)
        count = post(base_url, api_key, "messages/count_tokens", {**body, "messages": [question]})
        assert count["input_tokens"] == first["usage"]["input_tokens"]
        lost = {**second, "thread": {"type": "continue", "previous_message_id": "no"}}
        assert post(base_url, api_key, "messages", lost)["error"]["type"] == "not_found_error"

    episodes, ctx, _ = run(solve, monkeypatch)
    assert mean(ctx, "endpoint/segments/first") == 1.0
    assert len(rows_of(episodes)[0]) == 2


def test_chat_is_streamed_sampled_several_times_stopped_and_has_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def solve(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        question = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        events = chat(base_url, api_key, question, stream=True, stream_options={"include_usage": True})
        assert events.endswith("data: [DONE]\n\n") and '"completion_tokens": 7' in events
        two = chat(base_url, api_key, question, n=2, logprobs=True, stop=["lo"], temperature=0.3)
        first, second = two["choices"]
        assert first["message"]["content"] == second["message"]["content"] == "Hel"
        assert [part["token"] for part in first["logprobs"]["content"]] == ["H", "e", "l", "l", "o"]
        short = chat(base_url, api_key, question, max_tokens=2)["choices"][0]
        assert (short["message"]["content"], short["finish_reason"]) == ("He", "length")
        return {"reward": 0.5, "steps": 3}

    episodes, ctx, _ = run(solve, monkeypatch)
    assert episodes.episode_rewards.tolist() == [0.5]
    assert mean(ctx, "episode/steps") == 3.0
    assert mean(ctx, "endpoint/left_out") == 1.0  # temperature


def test_a_request_that_is_sent_again_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        first = post(base_url, api_key, "chat/completions", body)
        again = post(base_url, api_key, "chat/completions", body, **{"x-stainless-retry-count": "1"})
        assert first["id"] == again["id"]

    _episodes, ctx, engine = run(solve, monkeypatch)
    assert len(engine.drawn) == 1
    assert mean(ctx, "endpoint/retried") == 1.0


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("chat/completions", b"{", 400, "not JSON"),
        ("chat/completions", [1], 400, "must be an object"),
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        ("chat/completions", {"messages": [{"role": "pope", "content": ""}]}, 400, "no role 'pope'"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "a text or a list"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only text can",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}], "n": 1000}, 400, "from 1 to 64"),
        ("messages", {"messages": 1}, 400, "messages must be a list"),
        ("responses", {"input": [{"type": "computer_call"}]}, 400, "can't be read"),
        ("responses", {"input": "a", "previous_response_id": "x"}, 404, "no response"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    path: str, body: Any, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        seen.append(post(base_url, api_key, path, body))

    episodes, _, engine = run(solve, monkeypatch)
    (answer,) = seen
    assert (answer["status"], engine.drawn) == (status, [])
    assert text in answer["error"]["message"]
    assert rows_of(episodes) == ([], [])


def test_a_key_opens_its_own_episode_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[str, str]] = []
    late: list[Any] = []
    both = threading.Barrier(2)

    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        keys.append((base_url, api_key))
        both.wait(20)
        assert chat(base_url, "guess", [{"role": "user", "content": "Hi"}])["status"] == 401
        answer = chat(base_url, api_key, [{"role": "user", "content": task["question"]}])
        assert answer["choices"][0]["message"]["content"] == "Hello."
        ((_, other),) = [pair for pair in keys if pair[1] != api_key]
        both.wait(20)
        behind = {"input": "a", "previous_response_id": answer["id"]}
        assert post(base_url, other, "responses", behind)["status"] in (401, 404)

    def first_then_late(task: dict[str, Any], base_url: str, api_key: str) -> None:
        if late:
            late.append(chat(base_url, late[0], [{"role": "user", "content": "Hi"}])["status"])
        late.append(api_key)

    run(solve, monkeypatch, n=2)
    assert len({key for _, key in keys}) == 2
    run(first_then_late, monkeypatch, n=2, parallel=1)
    assert late[1] == 401


def test_a_late_agent_is_cut_off_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        await asyncio.sleep(600)

    begin = time.monotonic()
    episodes, _ctx, _ = run(solve, monkeypatch, timeout=0.3, on_error="zero")
    assert time.monotonic() - begin < 60
    assert episodes.failed.tolist() == [True]
    with pytest.raises(RunError, match=r"1 of 1 agents failed.*took over 0\.3 s"):
        run(solve, monkeypatch, timeout=0.3)


def test_an_error_of_the_agent_ends_the_run_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        raise ZeroDivisionError("of the agent")

    with pytest.raises(RunError, match="ZeroDivisionError: of the agent"):
        run(solve, monkeypatch)


def test_an_error_of_the_engine_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(prompt: str) -> str:
        raise RuntimeError("no memory")

    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        chat(base_url, api_key, [{"role": "user", "content": "Hi"}])

    with pytest.raises(RuntimeError, match="no memory"):
        run(solve, monkeypatch, ScriptedEngine(TOKENIZER, broken))


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"max_tokens": 60}, "context_length_exceeded"), ({"max_turns": 1}, "too_many_turns")],
)
def test_a_limit_truncates_an_episode_and_is_no_failure(
    limits: dict[str, int], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(task: dict[str, Any], base_url: str, api_key: str) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        for _ in range(9):
            answer = chat(base_url, api_key, messages)
            if "choices" not in answer:
                raise RuntimeError(answer["error"]["code"])
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "and?"}]

    episodes, _, _ = run(solve, monkeypatch, **limits)
    assert (episodes.truncated.tolist(), episodes.failed.tolist()) == ([True], [False])
    assert code in ("context_length_exceeded", "too_many_turns")


def test_a_command_finds_all_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        textwrap.dedent("""
        import json, os, urllib.request
        task = json.loads(os.environ["TASK"])
        body = {"model": "m", "messages": [{"role": "user", "content": task["question"]}]}
        key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), key)
        answer = json.load(urllib.request.urlopen(request))
        print(answer["choices"][0]["message"]["content"])
        print(json.dumps({"reward": 0.75}))
        """),
        "utf-8",
    )
    episodes, _, _ = run(None, monkeypatch, command=f"{sys.executable} {script}")
    assert episodes.episode_rewards.tolist() == [0.75]
    with pytest.raises(RunError, match="status 3: bad"):
        run(None, monkeypatch, command="echo bad; exit 3")


def test_an_agent_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="set one of them"):
        run(None, monkeypatch)
    with pytest.raises(RunError, match="def solve"):
        run(lambda task: None, monkeypatch)  # type: ignore[arg-type,misc]


def test_requests_of_many_episodes_share_calls_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes, _, engine = run(agent_of(as_sent), monkeypatch, tasks=4, n=4)
    assert sum(engine.calls) == 32
    assert len(engine.calls) < 24
    assert torch.equal(episodes.turns, torch.full((16,), 2))
