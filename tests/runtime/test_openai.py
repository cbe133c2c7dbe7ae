"""The serve engine ``openai`` against a small server that answers in the forms of vLLM and TensorRT-LLM.

Behind it is the embedded engine on a random model, so tokens and log-probs can be compared.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from quiet_server import QuietServer
from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError
from rlgraph.frontend.compose import compose
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.openai.completions import Completions
from rlgraph.runtime.engines.openai.engine import OpenAIEngine
from rlgraph.runtime.engines.servers import endpoint, lost
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.messages.errors import ServerLostError
from rlgraph.runtime.preflight import preflight
from rlgraph.runtime.run import run_graph

REQUESTS = [Request([5, 6, 7], [1, 2]), Request([8, 9], [3]), Request([11] * 9, [4])]
GREEDY = Sampling(8, temperature=0.0)


@dataclass
class Completer:
    """A server with one model, which answers in a form.

    Attributes:
        engine: what generates.
        form: ``vllm``, ``vllm-old``, ``tensorrt`` or ``plain``, whose answers have no token ids.
        key: that calls must carry.
        models: the names that it lists.
        refusals: statuses of the next answers, before the right ones.
        holds: whether calls for more than one token are never answered.
        ends: whether it knows ``stop_token_ids``.
        asked: the calls, in order.
    """

    engine: TransformersEngine
    form: str = "vllm"
    key: str = ""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    refusals: list[int] = field(default_factory=list)
    holds: bool = False
    drips: bool = False
    ends: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def __enter__(self) -> Completer:
        kind = type("Handler", (_Handler,), {"served": self})
        self.server = QuietServer(("127.0.0.1", 0), kind)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.ended = threading.Event()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content of the answer to a call."""
        if self.form == "tensorrt" and body.keys() & {"return_token_ids", "return_tokens_as_token_ids"}:
            return 400, {"error": "Extra inputs are not permitted"}
        with self.lock:
            if body["max_tokens"] > 1:
                self.asked.append(body)
                if self.refusals:
                    return self.refusals.pop(0), {"error": "try again"}
            sampling = Sampling(body["max_tokens"], body["temperature"], body["top_p"])
            if self.ends:
                sampling = replace(sampling, stop_token_ids=body["stop_token_ids"])
            ((made,),) = self.engine.generate([Request(body["prompt"], [body["seed"]])], sampling)
        words = [f"token_id:{token}" if self.form == "vllm-old" else "word" for token in made.tokens]
        choice = {"finish_reason": made.finish, "text": ""}
        choice["logprobs"] = {"tokens": words, "token_logprobs": [*made.logprobs]}
        has_ids = {"vllm": body.get("return_token_ids"), "tensorrt": not body.get("detokenize", True)}
        return 200, {"choices": [choice | ({"token_ids": [*made.tokens]} if has_ids.get(self.form) else {})]}


class _Handler(BaseHTTPRequestHandler):
    served: Completer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._say(200 if known else 404, {"data": [{"id": name} for name in self.served.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.served.holds and body["max_tokens"] > 1:
            self.served.asked.append(body)
            self.served.ended.wait()
            return
        self._say(*self.served.complete(body))

    def _say(self, status: int, content: Any) -> None:
        if self.served.key and self.headers.get("Authorization") != f"Bearer {self.served.key}":
            status, content = 401, {}
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with suppress(OSError):  # who asked has gone
            for byte in text if self.served.drips else b"":
                self.wfile.write(bytes([byte]))
                self.served.ended.wait(0.5)
            self.wfile.write(b"" if self.served.drips else text)

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


@pytest.fixture(scope="module")
def embedded(demo_files: Path) -> TransformersEngine:
    made = TransformersEngine(str(demo_files / "demo_files" / "model"))
    made.load_pretrained()
    return made


@pytest.fixture
def serving(embedded: TransformersEngine) -> Iterator[Callable[..., Completer]]:
    """Starts servers, which end with the test."""
    started = []

    def start(**settings: Any) -> Completer:
        started.append(Completer(embedded, **settings).__enter__())
        return started[-1]

    yield start
    for server in started:
        server.__exit__()


def reaching(*servers: Completer, **settings: Any) -> OpenAIEngine:
    return OpenAIEngine(servers[0].engine.path, addresses=[server.url for server in servers], **settings)


@pytest.mark.parametrize("form", ["vllm", "vllm-old", "tensorrt"])
def test_its_tokens_and_logprobs_are_those_of_the_server(
    serving: Callable[..., Completer], embedded: TransformersEngine, form: str
) -> None:
    engine = reaching(serving(form=form))
    made, expected = engine.generate(REQUESTS, GREEDY), embedded.generate(REQUESTS, GREEDY)
    engine.close()
    for samples, others in zip(made, expected, strict=True):
        assert [(s.tokens, s.finish) for s in samples] == [([*o.tokens], o.finish) for o in others]
        assert [s.logprobs for s in samples] == [pytest.approx(o.logprobs) for o in others]


def test_what_is_asked_is_the_graphs(serving: Callable[..., Completer], embedded: TransformersEngine) -> None:
    server = serving(models=["one", "two"])
    engine = reaching(server, options={"model": "two", "cache_salt": "mine"})
    engine.generate([Request([5, 6], [1 << 40 | 3], max_new_tokens=4)], Sampling(8, 0.7, 0.9, 20))
    engine.close()
    (body,) = server.asked
    assert (
        body.items()
        >= {
            "model": "two",
            "cache_salt": "mine",
            "prompt": [5, 6],
            "max_tokens": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "seed": 3,
            "repetition_penalty": 1.0,
        }.items()
    )
    assert body["stop_token_ids"] == embedded.stops.tolist()


def test_tokens_end_samples_or_the_server_is_refused(
    serving: Callable[..., Completer], embedded: TransformersEngine
) -> None:
    plain = [samples[0] for samples in embedded.generate(REQUESTS, GREEDY)]
    sampling = replace(GREEDY, stop_token_ids=[plain[0].tokens[2]])
    engine, ignoring = reaching(serving()), reaching(serving(ends=False))
    made, expected = engine.generate(REQUESTS, sampling), embedded.generate(REQUESTS, sampling)
    assert [[(s.tokens, s.finish) for s in many] for many in made] == [
        [([*s.tokens], s.finish) for s in many] for many in expected
    ]
    assert len(made[0][0].tokens) <= 3 and made[0][0].finish == "stop"
    with pytest.raises(RunError, match=rf"went on behind token {plain[0].tokens[2]}.*\n  use a server that"):
        ignoring.generate(REQUESTS, sampling)
    engine.close(), ignoring.close()


def test_several_servers_share_the_samples_and_one_may_be_lost(serving: Callable[..., Completer]) -> None:
    servers = [serving(), serving()]
    engine = reaching(*servers, max_rows=2)
    engine.generate(REQUESTS, GREEDY)
    assert all(server.asked for server in servers)
    before = Counter(len(server.asked) for server in servers)
    servers[0].__exit__()
    assert len(engine.generate(REQUESTS, GREEDY)) == 3
    engine.close()
    assert before and len(servers[1].asked) >= 4


def test_a_busy_server_is_asked_again_and_not_for_ever(
    serving: Callable[..., Completer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "BLINK", 0.01)
    server = serving(refusals=[503, 429])
    engine = reaching(server, request_retries=4)
    engine.generate(REQUESTS[1:2], GREEDY)
    assert len(server.asked) == 3
    server.refusals = [503] * 5
    with pytest.raises(RunError, match="answered 503"):
        engine.generate(REQUESTS[1:2], GREEDY)
    engine.close()


def test_aborted_samples_end_with_their_connections(serving: Callable[..., Completer]) -> None:
    quick, held = serving(), serving()
    engine = reaching(quick, held)
    held.holds = True
    made = engine.generate(REQUESTS, GREEDY, lambda ended: len(ended) >= 1)
    engine.close()
    finishes = [sample.finish for samples in made for sample in samples]
    assert "abort" in finishes and len({*finishes}) > 1
    assert all(not sample.tokens for samples in made for sample in samples if sample.finish == "abort")


@pytest.mark.parametrize(
    ("settings", "error", "law"),
    [
        ({"form": "plain"}, RunError, "0 token ids and 1 log-probs.*\n.*vLLM"),
        ({"key": "a key"}, RunError, "asks for another API key\n.*OPENAI_API_KEY"),
        (
            {"models": ["one", "two"]},
            RunError,
            "several models: one, two\n.*serve.openai.options={model: one}",
        ),
    ],
)
def test_an_endpoint_that_will_not_do_is_refused_at_once(
    serving: Callable[..., Completer], settings: dict[str, Any], error: type[Exception], law: str
) -> None:
    with pytest.raises(error, match=law):
        reaching(serving(**settings))


def test_one_that_does_not_answer_is_named(embedded: TransformersEngine) -> None:
    with pytest.raises(ServerLostError, match=r"http://127.0.0.1:9/v1/models\n.*serve.openai.addresses"):
        OpenAIEngine(embedded.path, addresses=["http://127.0.0.1:9"])


ONE_TOKEN = {
    "prompt": [1],
    "seed": 0,
    "max_tokens": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "stop_token_ids": [],
}


@pytest.mark.slow
def test_an_answer_that_drips_is_late(
    serving: Callable[..., Completer], embedded: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of it is in time."""
    monkeypatch.setattr(endpoint, "GLANCE", 1.5)
    server = serving()
    engine = reaching(server, request_timeout=1.5, request_retries=0)
    server.drips, since = True, time.monotonic()
    with pytest.raises(RunError, match=r"no sample in 1\.5 s \(request_timeout\), 1 times"):
        engine.generate(REQUESTS[:1], GREEDY)
    engine.close()
    with pytest.raises(ServerLostError, match=r"/v1/models\n.*serve\.openai\.addresses"):
        reaching(server)
    with pytest.raises(ServerLostError, match=r"did not answer v1/completions: no whole answer in 1 s"):
        Completions(server.url).post("v1/completions", ONE_TOKEN, 1.0)
    assert time.monotonic() - since < 15


def test_a_key_is_read_from_the_environment(
    serving: Callable[..., Completer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    engine = reaching(serving(key="a key"))
    assert engine.generate(REQUESTS, GREEDY)
    engine.close()


JUDGED = """extends: demo
edits:
  - set:
      models.policy.path: "${env:RLGRAPH_TEST_FILES}/model"
      prompts.files: ["${env:RLGRAPH_TEST_FILES}/train.parquet"]
      prompts.batch: 4
      prompts.tokenizer: policy
      rollout.n: 2
      rollout.max_new_tokens: 8
      schedule: {iterations: 1}
  - remove: [eval]
  - add: {models.judge: {path: "${env:RLGRAPH_TEST_FILES}/model", frozen: true, serve: SERVE}}
  - replace:
      rewards: {op: reward.judge, model: judge, prompt: "{question}{response}", score: '(\\d)', scale: [0, 9],
                max_new_tokens: 8, template: plain}
"""


def judged(folder: Path, serve: str) -> str:
    """A graph whose judge is served so."""
    path = folder / "judged.yaml"
    path.write_text(JUDGED.replace("SERVE", serve))
    return str(path)


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
def test_a_judge_behind_an_endpoint_gives_the_rewards_of_one_in_the_worker(
    serving: Callable[..., Completer], tmp_path: Path
) -> None:
    lines = []
    there = f'{{engine: openai, openai: {{addresses: ["{serving().url}"]}}}}'
    for number, serve in enumerate(("{engine: transformers}", there)):
        folder = Path(f"run-{number}")
        run_graph(judged(tmp_path, serve), (), 1, inline=True, run_dir=folder)
        lines.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))
    assert lines[0]["reward/judge_length"] > 0
    for name in ("reward/mean", "reward/judge_length", "reward/failed"):
        assert lines[0][name] == pytest.approx(lines[1][name])


@pytest.mark.usefixtures("in_demo")
@pytest.mark.usefixtures("in_demo")
def test_a_judge_may_be_on_a_pool_that_is_lent(serving: Callable[..., Completer], tmp_path: Path) -> None:
    there = f'{{engine: openai, openai: {{addresses: ["{serving().url}"]}}, pool: train}}'
    settings = ["schedule={iterations: 2, buffer: {staleness: 0, chunk: 2, lend: true}}"]
    settings += ["pools={train: {devices: 1}, gen: {devices: 1}}", "models.policy.train.pool=train"]
    settings += ["models.policy.serve.pool=gen", "update_policy.in.old_logprobs=rollout_logprobs"]
    run_graph(judged(tmp_path, there), settings, inline=True, run_dir=Path("run"))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(line["finished/lent_rounds"] for line in lines) > 0
    assert lines[0]["reward/judge_length"] > 0


@pytest.mark.usefixtures("in_demo")
def test_fields_that_the_run_gives_are_refused_before_it(tmp_path: Path) -> None:
    serve = '{engine: openai, openai: {addresses: ["http://one:8000"], options: {model: judge, seed: 3}}}'
    graph = judged(tmp_path, serve)
    tree, plan = compose(graph), compile_graph(graph)
    with pytest.raises(
        GraphError, match=r"serve.openai.options.seed: it is the run's to give.*\n(.*\n)*.*leave out seed"
    ):
        preflight(plan, tree)
