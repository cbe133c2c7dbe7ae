"""Whole runs that generate with a real SGLang on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_residency import SMALL, tight

from demo_files import make_demo_files
from rlgraph.ir.plan import Target
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.servers.process import Server
from rlgraph.runtime.engines.sglang.launch import Launch
from rlgraph.runtime.run import run_graph

AGENTS = Path(__file__).parent.parent / "runtime" / "agent_streamed.yaml"
ONES = Path(__file__).parent.parent / "runtime" / "ones.yaml"
TWO = ONES.with_name("ones_two.yaml")
SGLANG = ["models.policy.serve.engine=sglang", "schedule.iterations=3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo_files(folder / "demo_files")
    return folder / "demo_files"


def run(files: Path, folder: Path, graph: Path, *args: str) -> list[dict[str, Any]]:
    """A run in a process of its own; its metrics."""
    return finished(started(files, folder, graph, *args), folder)


def started(files: Path, folder: Path, graph: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlgraph", "run", str(graph), *SGLANG, *args, "--run-dir", str(folder)]
    given = os.environ | {"RLGRAPH_TEST_FILES": str(files)} | env
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=given)


def finished(process: subprocess.Popen[str], folder: Path) -> list[dict[str, Any]]:
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return lines(folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def servers(model: Path) -> list[int]:
    """Process ids of the servers of a model."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or its environment is another user's
            words = (folder / "cmdline").read_bytes().split(b"\0")
            serves = b"sglang.launch_server" in words
            if serves and str(model.parent).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def assert_sane(metrics: list[dict[str, Any]], iterations: int = 3) -> None:
    steps = [line for line in metrics if "reward/mean" in line]
    assert len(steps) == iterations
    for line in steps:
        assert line["update_policy/grad_norm"] > 0
        # the two engines score the same tokens alike (where both do: old_logprobs may be the rollout's own)
        assert line.get("update_policy/rollout_gap_max", 0.0) < 1e-4


@pytest.mark.nightly
def test_two_pools_one_ahead_and_two_servers(files: Path, tmp_path: Path) -> None:
    args = (
        "schedule.buffer={staleness: 1, by: batch}",
        "update_policy.in.old_logprobs=rollout_logprobs",
        "pools.gen.devices=2",
    )
    assert_sane(run(files, tmp_path / "run", TWO, *args))
    assert len([*(tmp_path / "run" / "logs").glob("sglang-*.log")]) == 2


@pytest.mark.nightly
def test_an_adapter_goes_to_another_pool_and_a_run_resumes(files: Path, tmp_path: Path) -> None:
    lora = "models.policy.train.lora={rank: 4, alpha: 8.0}"
    run(files, tmp_path / "run", TWO, lora, "--steps", "2")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["models"]["policy"]["serve"]["lora"] == "adapter"
    found = run(files, tmp_path / "run", TWO, lora, "--resume")
    assert_sane(found)


@pytest.mark.slow
def test_engines_take_turns_on_a_device(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(files))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlgraph.costs.limits.PREFILL", 1)  # as in test_residency
    # a cache of a few samples: by default it would take what is free
    settings = (*SGLANG, *SMALL, "models.policy.serve.cache_tokens=2048")
    target = Target(tight(str(ONES), *settings))
    run_graph(str(ONES), settings, 1, run_dir=Path("run"), inline=True, target=target)
    steps = json.loads(Path("run/plan.json").read_text())["steps"]
    order = [(step["kind"], step["parts"]) for step in steps if step["kind"] in ("wake", "sync", "sleep")]
    assert order == [("wake", ["weights"]), ("sync", []), ("wake", ["kv"]), ("sleep", ["kv", "weights"])]
    assert {"load", "offload"} <= {step["kind"] for step in steps}
    assert_sane(lines(Path("run")))


@pytest.mark.nightly
def test_what_is_left_unfinished_goes_on_with_newer_weights(files: Path, tmp_path: Path) -> None:
    # what ends when is chance here: up to 48 tokens, the 14 groups of a round hardly end with its seventh
    args = ("--inline", "rollout.max_new_tokens=48", "mixed.refill.rounds=50")
    found = run(files, tmp_path / "run", ONES.with_name("partial.yaml"), *args)
    assert [line["rows/used"] for line in found] == [14] * 3
    assert found[0]["versions/mixed"] == 0
    for line in found[1:]:
        assert line["update_policy/grad_norm"] > 0
        assert line["versions/mixed"] <= line["mixed/waited"] and 0 <= line["versions/age"] <= 1
    assert any(line["versions/mixed"] for line in found)


@pytest.mark.nightly
def test_conversations_stream_and_new_weights_find_nothing_in_flight(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0)
    notes = [f"update.note={tmp_path}/used", f"walked.tools.visit.note={tmp_path}/visits"]
    settings = ("walked.max_new_tokens=600", "walked.max_turn_tokens=60", "pools.gen.devices=2")
    run(tmp_path, tmp_path / "run", AGENTS, *notes, *settings)
    used = [json.loads(line) for line in (tmp_path / "used").read_text().splitlines()]
    groups = [group for one in used for group in one["groups"]]
    assert len(groups) == 3 * 12 and {groups.count(group) for group in groups} == {2}
    for one in used:
        assert all(versions == sorted(versions) for versions in one["versions"])
        assert all(0 <= one["iteration"] - versions[0] <= 2 for versions in one["versions"])
    visits = [json.loads(line) for line in (tmp_path / "visits").read_text().splitlines()]
    assert sum("begins" in visit for visit in visits) == sum("ends" in visit for visit in visits)


@pytest.mark.nightly
def test_a_server_killed_in_a_run(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(files, folder, ONES, "--inline", "schedule.iterations=5")
    while process.poll() is None and not any("reward/mean" in line for line in metrics_so_far(folder)):
        signal.sigtimedwait([], 0.05)
    (server,) = servers(files / "model")
    os.killpg(server, signal.SIGKILL)
    found = finished(process, folder)
    assert_sane(found, 5)
    embedded = ("models.policy.serve.engine=transformers", "--inline", "--steps", "1")
    expected = run(files, tmp_path / "embedded", ONES, *embedded)
    # greedy, of the same weights
    assert found[0]["eval/accuracy"] == pytest.approx(expected[0]["eval/accuracy"], abs=1e-6)
    (log,) = (folder / "logs").glob("sglang-*.log")
    assert log.read_text().count("started anew") == 1
    assert not servers(files / "model")


def metrics_so_far(folder: Path) -> list[dict[str, Any]]:
    return lines(folder) if (folder / "metrics.jsonl").is_file() else []


@pytest.mark.nightly
def test_a_run_with_a_server_that_runs_already(files: Path, tmp_path: Path) -> None:
    launch = Launch(str(files / "model"), "cpu", "float32", 1, 1 << 16, 64)
    server = Server(launch, tmp_path / "logs", ["0"], "127.0.0.1")
    server.wait(600)
    args = (f"models.policy.serve.sglang.addresses=[{server.client.url}]", "--inline")
    for folder, more in (("broadcast", ()), ("disk", (f"models.policy.serve.sync_folder={tmp_path}",))):
        process = started(files, tmp_path / folder, ONES, *args, *more, SGLANG_API_KEY=server.client.key)
        assert_sane(finished(process, tmp_path / folder))
    assert server.is_alive()
    server.close()


@pytest.mark.slow
def test_a_grammar_allows_no_other_text(files: Path, tmp_path: Path) -> None:
    """Its server is started with what grammars need, and the run trains on what it draws."""
    graph = tmp_path / "digits.yaml"
    edits = "[{remove: [eval]}, {add: {rollout_weights: {op: correction.tis}}}]"
    graph.write_text(f"extends: {ONES}\nedits: {edits}\n")
    run(files, tmp_path / "run", graph, "rollout.regex='[1-9]{2}7'", "schedule.iterations=1")
    text = (tmp_path / "run" / "samples" / "step-000001.jsonl").read_text()
    responses = [json.loads(line)["responses"] for line in text.splitlines()]
    assert responses and all(re.fullmatch("[1-9]{2}7", response) for response in responses)


@pytest.mark.nightly
def test_what_streams_is_in_flight_while_weights_change(files: Path, tmp_path: Path) -> None:
    """`drawn` refuses samples whose tokens, prompts and versions do not belong together."""
    graph, settings = ONES.with_name("partial.yaml"), ["mixed.refill={}", "rollout.max_new_tokens=48"]
    settings += ["pools={train: {devices: 1}, gen: {devices: 2}}", "models.policy.serve.pool=gen"]
    settings += ["schedule={iterations: 6, buffer: {staleness: 2}}"]
    found = run(files, tmp_path / "run", graph, *settings)
    assert [line["rows/used"] for line in found] == [14] * 6
    assert all(line["update_policy/grad_norm"] > 0 and line["versions/age"] <= 2 for line in found)
    assert len([*(tmp_path / "run" / "logs").glob("sglang-*.log")]) == 2


@pytest.mark.nightly
def test_a_pool_that_waits_has_servers_that_draw_until_it_trains(files: Path, tmp_path: Path) -> None:
    graph, settings = ONES.with_name("partial.yaml"), ["mixed.refill={}", "rollout.max_new_tokens=48"]
    settings += ["pools={train: {devices: 1}, gen: {devices: 1}}", "models.policy.serve.pool=gen"]
    settings += ["schedule={iterations: 6, buffer: {staleness: 1, lend: true}}"]
    found = run(files, tmp_path / "run", graph, *settings)
    assert [line["rows/used"] for line in found] == [14] * 6
    assert all(line["update_policy/grad_norm"] > 0 and line["versions/age"] <= 1 for line in found)
    assert sum(line["mixed/lent_tokens"] for line in found) > 0
    assert len([*(tmp_path / "run" / "logs").glob("sglang-*.log")]) == 2
