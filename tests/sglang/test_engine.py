"""The engine over a real SGLang server on the CPU: samples, syncs, states, faults."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoModelForCausalLM

from penalties import assert_drawn_so
from rlgraph.errors import RunError
from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.servers.groups import interface
from rlgraph.runtime.engines.sglang.client import FIRST
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.messages.errors import ServerLostError

REQUESTS = [Request([5, 6, 7], [1, 2, 3]), Request([8, 9], [4]), Request([11] * 9, [5, 6])]
pytestmark = pytest.mark.filterwarnings("default")


def gap(model: torch.nn.Module, request: Request, made: Generation, temperature: float = 1.0) -> float:
    """How far a generation's log-probs are from those of a plain forward."""
    return gap_of(model, request, made, slice(None), temperature)


def gap_of(
    model: torch.nn.Module, request: Request, made: Generation, part: slice, temperature: float = 1.0
) -> float:
    """The same of some of its tokens; 0 of none."""
    if not made.tokens[part]:
        return 0.0
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt, *made.tokens]])).logits[0]
    scores = torch.log_softmax(logits / temperature, -1)[len(request.prompt) - 1 : -1]
    own = scores[torch.arange(len(made.tokens)), torch.tensor(made.tokens)]
    return float((own - torch.tensor(made.logprobs))[part].abs().amax())


def assert_agrees(engine: SglangEngine, model: torch.nn.Module, temperature: float = 1.0) -> None:
    answers = engine.generate(REQUESTS, Sampling(12, temperature))
    assert [len(many) for many in answers] == [len(request.seeds) for request in REQUESTS]
    for request, many in zip(REQUESTS, answers, strict=True):
        for made in many:
            assert gap(model, request, made, temperature) < 1e-4
            assert 1 <= len(made.tokens) <= 12 and made.finish == (
                "stop" if made.tokens[-1] == 1 else "length"
            )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_a_plain_forward(
    awake: SglangEngine, model: torch.nn.Module, temperature: float
) -> None:
    assert_agrees(awake, model, temperature)


def test_greedy_is_generate_of_transformers(awake: SglangEngine, model: torch.nn.Module) -> None:
    for request, (made, *_) in zip(REQUESTS, awake.generate(REQUESTS, Sampling(10, 0.0)), strict=True):
        prompt = torch.tensor([request.prompt])
        expected = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert list(made.tokens) == expected[0, len(request.prompt) :].tolist()


def test_a_text_ends_a_sample_and_is_whole_in_it(awake: SglangEngine) -> None:
    decode = awake.tokenizer.decode
    for request, (plain, *_) in zip(REQUESTS, awake.generate(REQUESTS, Sampling(10, 0.0)), strict=True):
        text = decode(list(plain.tokens[2:4]))  # two tokens, of which its tokenizer makes one
        kept = next(n for n in range(1, 11) if text in decode(list(plain.tokens[:n])))
        ((made, *_),) = awake.generate([request], Sampling(10, 0.0, stop=[text]))
        assert list(made.tokens) == list(plain.tokens[:kept]) and len(made.logprobs) == kept
        assert made.finish == "text"


def test_a_token_ends_a_sample_by_its_id(awake: SglangEngine, model: torch.nn.Module) -> None:
    ids = list(range(2, 64, 12))
    asked = [Request(request.prompt, range(12)) for request in REQUESTS]
    finishes = set()
    for request, many in zip(asked, awake.generate(asked, Sampling(12, stop_token_ids=ids)), strict=True):
        for made in many:
            assert gap(model, request, made) < 1e-4 and not {1, *ids} & {*made.tokens[:-1]}
            finishes.add((made.tokens[-1] in ids, made.finish))
    assert (
        {(True, "stop"), (False, "length")}
        <= finishes
        <= {(True, "stop"), (False, "length"), (False, "stop")}
    )


def test_min_p_cuts_what_is_unlikely(awake: SglangEngine) -> None:
    greedy = awake.generate(REQUESTS, Sampling(6, 0.0))
    certain = awake.generate(REQUESTS, Sampling(6, 1.0, min_p=1.0))
    for (first, *_), many in zip(greedy, certain, strict=True):
        assert all(list(made.tokens) == list(first.tokens) for made in many)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12, 0.0, repetition_penalty=1.7),
        Sampling(12, 0.8, presence_penalty=1.5, frequency_penalty=0.5),
        Sampling(12, 1.5, min_new_tokens=8),
    ],
    ids=str,
)
def test_penalties_are_those_of_a_plain_forward(
    awake: SglangEngine, model: torch.nn.Module, sampling: Sampling
) -> None:
    requests = [*REQUESTS, Request([12, 13, 14], [7], drawn=2)]
    for request, many in zip(requests, awake.generate(requests, sampling), strict=True):
        for made in many:
            assert_drawn_so(model, request, made, sampling, awake.stops)
            assert len(made.tokens) + request.drawn > sampling.min_new_tokens


def test_samples_of_a_prompt_differ(awake: SglangEngine) -> None:
    (many,) = awake.generate([Request([5, 6], list(range(16)))], Sampling(12, 1.5))
    assert len({tuple(made.tokens) for made in many}) > 8


def test_weights_at_its_path(engine: SglangEngine, awake: SglangEngine, path: str) -> None:
    engine.load_pretrained()
    assert_agrees(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def test_it_holds_the_tokens_that_the_plan_counts_or_says_so(awake: SglangEngine) -> None:
    assert not awake.notes
    awake.supervisor.launch, launch = replace(awake.supervisor.launch, tokens=80_000), awake.supervisor.launch
    law = (
        r"holds keys and values of 65,536 tokens; the plan counts 80,000 \(.*\): set serve.cache_tokens=65536"
    )
    assert re.search(law, awake.supervisor.shortage())
    awake.supervisor.launch = launch


def test_tokens_of_other_weights_are_refused(awake: SglangEngine) -> None:
    awake.version = 7
    with pytest.raises(RunError, match="generated with weights 0; promised were 7"):
        awake.generate(REQUESTS, Sampling(2))


@pytest.mark.parametrize(
    ("prompt", "tokens", "law"),
    [([], 4, "0 prompt tokens"), ([5] * 4000, 97, "more than the model's context")],
)
def test_requests_that_can_not_be(awake: SglangEngine, prompt: list[int], tokens: int, law: str) -> None:
    with pytest.raises(ValueError, match=law):
        awake.generate([Request(prompt, [0])], Sampling(tokens))


@contextmanager
def generating(
    engine: SglangEngine, requests: list[Request], sampling: Sampling
) -> Iterator[Future[list[list[Generation]]]]:
    """What another thread generates, from when it is in flight until it is done."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(engine.generate, requests, sampling)
        while not engine.calls.flying and not made.done():
            threading.Event().wait(0.01)
        yield made


def kill(engine: SglangEngine) -> None:
    os.killpg(engine.supervisor.server.process.pid, signal.SIGKILL)


# greedy, none of these comes to an end token
ENDLESS = [Request([first, 12, 13], [0]) for first in (5, 6, 7, 8, 9, 10)]


@pytest.mark.slow
def test_a_server_killed_while_it_generates(awake: SglangEngine) -> None:
    undisturbed = awake.generate(ENDLESS, Sampling(200, 0.0))
    assert {len(made.tokens) for (made,) in undisturbed} == {200}
    before, left = awake.supervisor.server.process.pid, awake.supervisor.left
    (scheduler,) = (one for one in members(before) if b"scheduler" in named(one))
    with generating(awake, ENDLESS, Sampling(200, 0.0)) as made:
        os.kill(scheduler, signal.SIGKILL)  # which ends all of it
        while awake.supervisor.server.process.pid == before:
            threading.Event().wait(0.01)
        kill(awake)  # the one that starts in its place
    assert [[one.tokens for one in many] for many in made.result()] == [
        [one.tokens for one in many] for many in undisturbed
    ]
    assert awake.supervisor.server.process.pid != before and awake.supervisor.left == left - 2
    assert awake.supervisor.server.log.read_text().count("started anew, which may happen") >= 2


@pytest.mark.nightly
def test_a_server_killed_while_it_is_synced(awake: SglangEngine, model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(model.named_parameters()):
            if number == 5:
                kill(awake)
            yield pair

    awake.load_weights(named(), 3)
    assert awake.version == 3
    assert_agrees(awake, model)


@pytest.mark.nightly
def test_a_server_killed_while_it_sleeps(awake: SglangEngine, model: torch.nn.Module) -> None:
    awake.sleep(["kv", "weights"])
    with awake.supervisor.lock:  # none is started before it is asked to wake
        kill(awake)
        left, awake.supervisor.left = awake.supervisor.left, 0
        with pytest.raises(
            ServerLostError, match=r"signal SIGKILL.*used up.*\n    the end of .*sglang-.*.log"
        ):
            awake.wake(["weights"])
        awake.supervisor.left = left
        awake.wake(["weights"])
    assert awake.version == -1 and awake.sleeping == {"kv"} and awake.supervisor.left == left - 1
    awake.load_weights(model.named_parameters(), 4)
    awake.wake(["kv"])
    assert_agrees(awake, model)


@pytest.mark.nightly
@pytest.mark.parametrize("longest", [pytest.param(3, id="answered"), pytest.param(3000, id="running")])
def test_a_request_of_another_before_a_new_server_has_its_weights(
    awake: SglangEngine,
    path: str,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    longest: int,
) -> None:
    follower = SglangEngine(path, servers=[awake.supervisor.client], leads=False)
    for engine in (awake, follower):
        engine.load_weights(((name, tensor + 0.1) for name, tensor in model.named_parameters()), 5)
    sums, restore, made = awake.checksums(), awake.supervisor.restore, []
    with ThreadPoolExecutor(1) as pool:

        def late() -> None:
            assert awake.supervisor.client.version() == FIRST and follower.calls.router.up
            made.append(pool.submit(follower.generate, ENDLESS[:1], Sampling(longest, 0.0)))
            while not (follower.calls.flying if longest > 3 else not follower.calls.router.up):
                threading.Event().wait(0.01)
            restore()

        monkeypatch.setattr(awake.supervisor, "restore", late)
        kill(awake)
        while not made:
            threading.Event().wait(0.01)
        ((one,),) = made[0].result()
    assert {*one.versions} == {5} and len(one.tokens) == longest and awake.checksums() == sums
    follower.close()


def aborted(engine: SglangEngine, model: torch.nn.Module, seconds: float) -> int:
    """How many samples have tokens that are aborted after a while; four at most are in flight at a time."""
    with generating(engine, ENDLESS, Sampling(3000, 0.0)) as made:
        threading.Event().wait(seconds)
        engine.abort()
    answers = [(request, one) for request, (one,) in zip(ENDLESS, made.result(), strict=True)]
    assert {one.finish for _, one in answers} == {"abort"}
    for request, one in answers:
        assert len(one.tokens) == len(one.logprobs) == len(one.versions) < 3000
        assert gap(model, request, one) < 1e-4
    return sum(1 for _, one in answers if one.tokens)


def test_what_is_aborted_comes_back_as_it_is(awake: SglangEngine, model: torch.nn.Module) -> None:
    # however slow this machine is now, there is a while after which four have begun
    assert any(aborted(awake, model, seconds) == 4 for seconds in (0.1, 0.3, 1, 3, 10))
    awake.abort()  # nothing is in flight
    assert {one.finish for (one,) in awake.generate(ENDLESS, Sampling(3, 0.0))} == {"length"}


def mixed(engine: SglangEngine, model: torch.nn.Module, seconds: float) -> int:
    """How many samples have tokens of two versions after an update in flight, all with their log-probs."""
    before, version = deepcopy(model), engine.version
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    with generating(engine, ENDLESS, Sampling(400)) as made:
        threading.Event().wait(seconds)
        engine.load_weights(model.named_parameters(), version + 1)
    found = 0
    for request, (one,) in zip(ENDLESS, made.result(), strict=True):
        assert len(one.tokens) == len(one.versions) and list(one.versions) == sorted(one.versions)
        assert {*one.versions} <= {version, version + 1}
        first = list(one.versions).count(version)
        found += 0 < first < len(one.tokens)
        for weights, part in ((before, slice(0, first)), (model, slice(first, None))):
            assert gap_of(weights, request, one, part) < 1e-4
    return found


def test_new_weights_for_what_is_in_flight(awake: SglangEngine, model: torch.nn.Module) -> None:
    assert any(mixed(awake, model, seconds) for seconds in (0.05, 0.1, 0.2, 0.1, 0.4, 0.2, 0.8, 1.6))


@pytest.mark.nightly
def test_a_server_that_does_not_come_up_ends_with_its_last_lines(tmp_path: Path, path: str) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        text = Path(path, name).read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 3')
        (tmp_path / "model" / name).write_text(text)
    with pytest.raises(RunError, match=r"ended \(.*\)\n    the end of .*sglang-.*.log"):
        SglangEngine(str(tmp_path / "model"), logs=tmp_path)


def test_it_answers_on_its_interface_alone(awake: SglangEngine) -> None:
    port = urlsplit(awake.supervisor.client.url).port
    with socket.create_connection(("127.0.0.1", port)):
        pass
    with socket.socket() as other:  # the loopback network has more addresses than one
        assert other.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED


def test_a_pool_of_several_hosts_answers_where_ray_knows_them() -> None:
    import ray

    assert interface({"one"}) == "127.0.0.1"
    assert interface({"one", "two"}) == ray.util.get_node_ip_address()


def test_nothing_is_left_behind(path: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from rlgraph.runtime.engines.servers.process import Server\n"
        "from rlgraph.runtime.engines.sglang.launch import Launch\n"
        "launch = Launch(sys.argv[1], 'cpu', 'float32', 1, 4096, 4)\n"
        "server = Server(launch, Path(sys.argv[2]), ['0'], '127.0.0.1')\n"
        "print(server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    group = int(done.stdout.split()[-1])
    for _ in range(600):
        if not members(group):
            return
        signal.sigtimedwait([], 0.1)
    raise AssertionError(f"processes of the server are left: {members(group)}")


def test_no_process_names_its_key_and_no_file_is_left_that_holds_it(awake: SglangEngine) -> None:
    server = awake.supervisor.server
    key = server.client.key
    for process in members(server.process.pid):
        assert key.encode() not in named(process)
    assert b"--config" in named(server.process.pid)
    assert not server.configuration.exists()
    assert key not in server.log.read_text()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.client.url}/server_info", timeout=60)
    assert server.client.look("server_info")


def test_a_server_that_answers_has_no_file_in_shared_memory(awake: SglangEngine) -> None:
    """It would outlive a server that is killed, as every server is."""
    processes = members(awake.supervisor.server.process.pid)
    opened = [os.readlink(file) for p in processes for file in Path(f"/proc/{p}/fd").iterdir()]
    shared = [name for name in opened if "/sglang_loads_" in name]
    assert shared and all(name.endswith(" (deleted)") for name in shared)


def test_a_servers_temporary_files_are_in_a_folder_that_goes_with_it(awake: SglangEngine) -> None:
    server = awake.supervisor.server
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "/tmp" in line]
    assert any(name.startswith(str(server.folder)) for name in sockets)
    held = [Path(f"/proc/{p}/environ").read_bytes() for p in members(server.process.pid)]
    assert held and all(f"TMPDIR={server.folder}".encode() in given.split(b"\0") for given in held)


def named(process: int) -> bytes:
    """What a process calls itself."""
    return Path("/proc", str(process), "cmdline").read_bytes()


def members(group: int) -> list[int]:
    """The processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
