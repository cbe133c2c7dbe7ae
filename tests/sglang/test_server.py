"""How a server is started and ended, as far as none is needed for it."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlgraph.compiler import compile_graph
from rlgraph.engines.sglang_options import owned
from rlgraph.frontend.compose import compose
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.servers import ports
from rlgraph.runtime.engines.servers import process as module
from rlgraph.runtime.engines.servers.ports import OWN, PORTS, ServerPort
from rlgraph.runtime.engines.servers.process import Server, _running
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.launch import CUDA_ENVIRONMENT, Launch
from rlgraph.runtime.engines.sglang.options import wrong
from rlgraph.runtime.preflight import Preflight
from rlgraph.variables import hide

pytestmark = pytest.mark.filterwarnings("default")
CUDA = Launch("some/model", "cuda", "bfloat16", 2, 300_000, 256, {"attention_backend": "fa3", "ep_size": 8})


@pytest.mark.slow
def test_the_installed_sglang_takes_all_settings_and_has_all_that_are_owned() -> None:
    flags = {"host": "127.0.0.1", "port": 30000, "api_key": "a key", "skip_server_warmup": True}
    found = wrong(dict.fromkeys(owned(), "1"))
    assert not {name: law for name, law in found.items() if "no such setting" in law}
    assert not wrong(CUDA.settings() | flags)
    # the other way of capturing prompts refuses graphs that are released with the cache
    assert CUDA_ENVIRONMENT["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "true"
    assert CUDA.settings()["cuda_graph_backend_prefill"] in ("disabled", "full")


@pytest.mark.slow
def test_what_the_installed_sglang_refuses_is_said_where_it_stands(tmp_path: Path) -> None:
    options = (
        "{atention_backend: fa3, sampling_backend: fast, stream_interval: many, disable_radix_cache: true}"
    )
    (tmp_path / "graph.yaml").write_text(
        "extends: grpo\n"
        "edits:\n"
        "- set:\n"
        "    models.policy.serve.engine: sglang\n"
        f"    models.policy.serve.sglang.options: {options}\n"
    )
    graph = str(tmp_path / "graph.yaml")
    tree, plan = compose(graph), compile_graph(graph)
    check = Preflight(plan, tree)
    check._engines()
    said = [problem.render() for problem in check.problems]
    assert len(said) == 3
    for text, law in zip(
        said,
        (
            "no such setting; did you mean `attention_backend`?",
            "invalid choice: 'fast'",
            "invalid int value: 'many'",
        ),
        strict=True,
    ):
        assert law in text and "graph.yaml:5:" in text and "models.policy.serve.sglang.options." in text


def test_the_installed_sglang_reads_the_environment_that_a_server_is_given() -> None:
    from sglang.srt import environ
    from sglang.srt.arg_groups import parallel_hook

    found = CUDA.environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["4", "5"])
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5" and "PYTORCH_CUDA_ALLOC_CONF" not in found
    assert found["NCCL_GRAPH_REGISTER"] == "0"
    assert 'setdefault("NCCL_GRAPH_REGISTER", "0")' in Path(str(parallel_hook.__file__)).read_text()
    for name, value in CUDA_ENVIRONMENT.items():
        assert hasattr(environ.Envs, name) and found[name] == value
    own = CUDA.environment(dict.fromkeys(CUDA_ENVIRONMENT, "own"), ["4", "5"])
    assert {own[name] for name in CUDA_ENVIRONMENT} == {"own"}


def test_a_devices_ports_are_its_own_and_claimed() -> None:
    first, second, other = ServerPort("127.0.0.1", 3), ServerPort("127.0.0.1", 3), ServerPort("127.0.0.1", 4)
    own = PORTS[3 * OWN : 4 * OWN]
    assert first.number in own and second.number in own and first.number != second.number
    assert other.number in PORTS[4 * OWN : 5 * OWN]


def test_a_port_that_is_held_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        claimed = ServerPort("127.0.0.1")
        taken = [holder.getsockname()[1], claimed.number]
        candidates = [*taken, *ports._candidates(0)]
        monkeypatch.setattr(ports, "_candidates", lambda _: candidates)
        assert ServerPort("127.0.0.1").number not in taken


def test_an_ipv6_address_has_ports_and_stands_in_brackets_in_urls(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        candidates = [taken, *ports._candidates(0)]
        monkeypatch.setattr(ports, "_candidates", lambda _: candidates)
        assert ServerPort("::1").number != taken
    launch = Launch(path, "cpu", "float32", 1, 1000, 4)
    server = Server(launch, tmp_path, ["0"], "::1")
    server.close()
    assert server.client.url == f"http://[::1]:{server.port.number}"


@pytest.mark.nightly
def test_a_real_server_answers_at_an_ipv6_address_and_is_synced_there(
    path: str, model: torch.nn.Module, tmp_path: Path
) -> None:
    engine = SglangEngine(path, host="::1", logs=tmp_path, max_rows=4)
    other = SglangEngine(path, servers=[engine.supervisor.client], transport="broadcast")
    other.load_weights(model.named_parameters(), 0)
    (many,) = other.generate([Request([5, 6], [1])], Sampling(3))
    assert len(many[0].tokens) == 3
    other.close()
    engine.close()


def test_a_process_group_is_there_until_its_last_process_is_gone() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    outer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    while len(_running(outer.pid)) < 2:
        os.sched_yield()
    outer.kill()
    outer.wait()
    assert len(_running(outer.pid)) == 1
    assert outer.stdin
    outer.stdin.close()  # which ends the one that is left
    while _running(outer.pid):
        os.sched_yield()


def test_a_servers_memory_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "arguments", lambda *_: ["-c", "input()"])
    server = Server(Launch("some/model", "cpu", "float32", 1, 1, 1), tmp_path, ["0"], "127.0.0.1")
    left = [[7], [7], []]
    monkeypatch.setattr(module, "_running", lambda group: left.pop(0))
    server.close()
    assert not left


def test_a_file_holds_what_no_command_line_may() -> None:
    hide({"KEY": "sk-canary-4711"})
    options = {"lora_paths": "a=some/adapter", "ssl_keyfile_password": "sk-canary-4711"}
    launch = Launch("some/model", "cuda", "bfloat16", 2, 300_000, 256, options)
    words = launch.arguments(Path("a.yaml"))
    assert words[:2] == ["-m", "sglang.launch_server"] and words[-2:] == ["--config", "a.yaml"]
    assert words[words.index("--lora-paths") + 1] == "a=some/adapter" and "--sleep-on-idle" in words
    assert "sk-canary" not in str(words)
    settings = json.loads(launch.configuration("127.0.0.1", 30000, "a key"))
    private = {"api-key": "a key", "ssl-keyfile-password": "sk-canary-4711"}
    assert settings == private | {"host": "127.0.0.1", "port": 30000}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_models_weights_are_those_of_its_file(device: str) -> None:
    """And it keeps them while the server sleeps: no sync brings them."""
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "some/draft"}
    settings = Launch("some/model", device, "bfloat16", 1, 1, 1, drafts).settings()
    assert (settings["load_format"], settings["speculative_draft_load_format"]) == ("dummy", "auto")
    assert settings.get("enable_draft_weights_cpu_backup", False) == (device == "cuda")
    own = drafts | {"speculative_draft_load_format": "safetensors"}
    settings = Launch("some/model", device, "bfloat16", 1, 1, 1, own).settings()
    assert settings["speculative_draft_load_format"] == "safetensors"
    assert not any("draft" in name for name in Launch("m", device, "bfloat16", 1, 1, 1).settings())
    known = {name: settings[name] for name in settings if "draft" in name}
    assert not wrong(known), "of the installed SGLang"


def test_a_key_is_in_a_file_of_this_user_while_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "arguments", lambda *_: ["-c", "input()"])
    server = Server(Launch("some/model", "cpu", "float32", 1, 1, 1), tmp_path, ["0"], "127.0.0.1")
    assert stat.S_IMODE(server.configuration.stat().st_mode) == 0o600
    assert server.client.key in server.configuration.read_text()
    server.close()
    assert not server.folder.exists()
