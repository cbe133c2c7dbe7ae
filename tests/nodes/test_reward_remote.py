"""Rewards over HTTP, from a real server: what is sent, what is tried again, and what a failure becomes."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch

from quiet_server import QuietServer
from recorded import means
from rlgraph.nodes.reward.per_sample import RewardError
from rlgraph.nodes.reward.remote import remote, service_url
from rlgraph.ops import Context
from rlgraph.variables import hide

Reply = Callable[[list[dict[str, str]], int], tuple[int, bytes]]

QUESTIONS = [f"what is {i}?" for i in range(7)]
RESPONSES = [str(i) for i in range(7)]
ANSWERS = ["0", "0", "2", "2", "4", "4", "6"]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def rewards_of(batch: list[dict[str, str]]) -> bytes:
    return json.dumps({"rewards": [float(s["response"] == s["answer"]) for s in batch]}).encode()


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[list[dict[str, str]]]]]:
    """A server that answers a batch, given how often it was asked of it before; and what it was asked."""
    asked: list[list[dict[str, str]]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
            with lock:
                before = asked.count(batch)
                asked.append(batch)
            status, body = reply(batch, before)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def call(url: str, ctx: Context | None = None, **options: Any) -> tuple[list[float], list[bool]]:
    ctx = ctx or Context(node="rewards", seed=0, iteration=0)
    options = {"batch": 3, "parallel": 2, "backoff": 0.0, "timeout": 30.0} | options
    out = remote(ctx, QUESTIONS, RESPONSES, ANSWERS, url=url, **options)
    assert out.rewards.dtype == torch.float32
    return out.rewards.tolist(), out.failed.tolist()


RIGHT = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_batches_are_asked_for_and_put_in_order() -> None:
    ctx = Context(node="rewards", seed=0, iteration=0)
    with serving(lambda batch, _: (200, rewards_of(batch))) as (url, asked):
        assert call(url, ctx) == (RIGHT, [False] * 7)
    assert sorted(len(batch) for batch in asked) == [1, 3, 3]
    sent = sorted((sample for batch in asked for sample in batch), key=lambda sample: sample["response"])
    assert sent[5] == {"question": "what is 5?", "response": "5", "answer": "4"}
    assert means(ctx) == {"reward/mean": (4.0, 7), "reward/failed": (0.0, 7)}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with serving(lambda batch, before: (status if before < 2 else 200, rewards_of(batch))) as (url, asked):
        assert call(url, retries=2)[0] == RIGHT
    assert len(asked) == 9


def test_what_stays_wrong_is_not_tried_again() -> None:
    with serving(lambda batch, _: (404, b"")) as (url, asked), pytest.raises(RewardError, match="HTTP 404"):
        call(url, retries=5)
    assert len(asked) == 3


def test_fail_says_why_and_of_which_sample() -> None:
    def reply(batch: list[dict[str, str]], _: int) -> tuple[int, bytes]:
        return (500, b"") if batch[0]["response"] == "3" else (200, rewards_of(batch))

    with serving(reply) as (url, _), pytest.raises(RewardError) as caught:
        call(url, retries=1)
    said = str(caught.value)
    assert "1 requests" in said and "HTTP 500" in said and "in 2 of 2 tries" in said
    assert "what is 3?" in said and "on_error: zero" in said


def test_zero_marks_what_failed_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def reply(batch: list[dict[str, str]], _: int) -> tuple[int, bytes]:
        return (500, b"") if batch[0]["response"] == "0" else (200, rewards_of(batch))

    ctx = Context(node="rewards", seed=0, iteration=0)
    with serving(reply) as (url, _), caplog.at_level(logging.WARNING):
        rewards, failed = call(url, ctx, retries=0, on_error="zero")
    assert (rewards, failed) == ([0.0] * 3 + RIGHT[3:], [True] * 3 + [False] * 4)
    assert means(ctx) == {"reward/mean": (2.0, 4), "reward/failed": (3.0, 7)}
    assert "what is 0?" in caplog.text


def test_what_a_reply_repeats_of_a_key_is_not_shown() -> None:
    hide({"KEY": "sk-canary-4711"})
    for before in (90, 190, 790):
        reply = b"." * before + b"sk-canary-4711" + b"." * 2000
        answering = serving(lambda *_, reply=reply: (200, reply))
        with answering as (url, _), pytest.raises(RewardError) as caught:
            call(url, retries=0)
        assert "sk-" not in str(caught.value)


WRONG = [b"no json", b"[1]", b'{"rewards": [1]}', b'{"rewards": "abc"}', b'{"rewards": [1, null, 2]}']
WRONG += [b'{"rewards": [1, true, 2]}', b'{"rewards": [1, NaN, 2]}', b"\xff"]
WRONG += [b'{"rewards": [1, 1e308, 2]}', b'{"rewards": [1, %s, 2]}' % (b"9" * 400), b"[" * 200_000]
WRONG += [b'{"rewards": [1, %s, 2]}' % (b"9" * 9000), b'{"rewards": [1, 2, 3, 4]}', b'{"rewards": {"0": 1}}']


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body[:28].decode("ascii", "replace"))
def test_a_reply_of_another_form_is_a_failure(body: bytes) -> None:
    with serving(lambda batch, _: (200, body)) as (url, _):
        with pytest.raises(RewardError, match="finite numbers"):
            call(url)
        assert call(url, on_error="zero")[1][:6] == [True] * 6


@contextmanager
def speaking(parts: Iterable[bytes], pause: float = 0.0) -> Iterator[str]:
    """A server that answers every request with the same bytes, and a pause before each part."""
    over, threads = threading.Event(), list[threading.Thread]()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(2**16)
            for part in parts:
                if over.wait(pause):
                    return
                connection.sendall(part)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n"
DRIPS = {
    "body": [HEAD, b"Content-Length: 99999\r\n\r\n", *[b" "] * 99999],
    "body without a length": [HEAD, b"\r\n", *[b" "] * 99999],
    "headers": [HEAD, *[b"X: 1\r\n"] * 99999],
    "one header": [HEAD, b"X: ", *[b"1"] * 99999],
}


@pytest.mark.parametrize("parts", DRIPS.values(), ids=DRIPS)
def test_a_reply_that_drips_is_given_up(parts: list[bytes]) -> None:
    with speaking(parts, pause=0.2) as url, pytest.raises(RewardError, match="it took over 1 s, in 1 of 1"):
        call(url, timeout=1.0, retries=0, batch=7)


def test_a_reply_that_is_too_long_is_given_up() -> None:
    with speaking([HEAD, b"\r\n", *[b" " * 2**20] * 40]) as url:
        assert call(url, batch=7, on_error="zero")[1] == [True] * 7
        with pytest.raises(RewardError, match="over 16 MiB"):
            call(url, batch=7)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status: int) -> None:
    with serving(lambda batch, _: (200, rewards_of(batch))) as (other, asked):
        head = f"HTTP/1.1 {status} Gone\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n"
        with speaking([head.encode()]) as url, pytest.raises(RewardError, match=f"HTTP {status}.*redirect"):
            call(url, batch=7)
    assert asked == []


ODD = [
    "http://",
    "http:///score",
    "http://[::1",
    "http://a:b/",
    "http://a:99999/",
    "http://a b/",
    "https://?q=1",
]
ODD += [f"http://{'a' * 64}.com/", "http://a/\n", "http://\xe9/", "http://me:secret@a/", "http://secret@a/"]


@pytest.mark.parametrize("url", ODD)
def test_an_odd_url_is_an_error_of_the_graph_or_of_the_service(url: str) -> None:
    with pytest.raises(ValueError, match=r"no URL of a service|are not sent") as caught:
        service_url(url)
    assert "secret" not in str(caught.value)
    assert service_url("http://judge:8000/score?key=1") == "http://judge:8000/score?key=1"
    assert call(url, retries=0, on_error="zero")[1] == [True] * 7  # where nobody looked at it before


def test_errors_do_not_show_the_query() -> None:
    with serving(lambda batch, _: (403, b"")) as (url, _), pytest.raises(RewardError) as caught:
        call(f"{url}?key=secret#secret", retries=0)
    assert "secret" not in str(caught.value) and f"{url}: HTTP 403" in str(caught.value)


def test_what_a_service_writes_does_not_steer_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with speaking([b"HTTP/1.1 500 \x1b[2J\x1b]0;mine\x07\r\nContent-Length: 0\r\n\r\n"]) as url:
        call(url, retries=0, on_error="zero")
    assert r"HTTP 500 \x1b[2J\x1b]0;mine\x07" in caplog.text and "\x1b" not in caplog.text


@pytest.mark.slow
def test_a_server_that_is_silent_is_given_up() -> None:
    leave = threading.Event()

    def reply(batch: list[dict[str, str]], before: int) -> tuple[int, bytes]:
        if before == 0:
            leave.wait(300.0)
        return 200, rewards_of(batch)

    with serving(reply) as (url, asked):
        assert call(url, timeout=3.0, retries=1)[0] == RIGHT
        leave.set()
    assert len(asked) == 6


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with serving(lambda batch, _: (200, b"")) as (url, _):
        pass
    with pytest.raises(RewardError, match="in 2 of 2 tries"):
        call(url, retries=1)
    assert call(url, retries=0, on_error="zero")[1] == [True] * 7


def test_further_columns_are_sent_by_name() -> None:
    with serving(lambda batch, _: (200, rewards_of(batch))) as (url, asked):
        more = {"tests": [[n, None] for n in range(7)], "level": torch.arange(7)}
        assert call(url, columns=["tests", "level"], batch=7, **more)[0] == RIGHT
    assert [(row["tests"], row["level"]) for row in asked[0]] == [([n, None], n) for n in range(7)]


def test_of_no_samples() -> None:
    ctx = Context(node="rewards", seed=0, iteration=0)
    out = remote(ctx, [], [], [], url="http://127.0.0.1:9/none")
    assert (out.rewards.tolist(), out.failed.tolist()) == ([], [])
