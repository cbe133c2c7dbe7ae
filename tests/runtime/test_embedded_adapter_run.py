"""Runs whose embedded engine is synced by the adapter alone, on frozen weights of its own or shared ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ran import write_ones_graph
from safetensors.torch import load_file

from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker.engine_host import EngineHost

POOLS = ("pools={train: {devices: 1}, gen: {devices: 1}}", "models.policy.serve.pool=gen")
STALE = (
    *POOLS,
    "schedule.buffer={staleness: 1, by: batch}",
    "update_policy.in.old_logprobs=rollout_logprobs",
)
ALONE = "models.policy.serve.lora=adapter"


@pytest.fixture(autouse=True)
def _graph(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = "{path: demo_files/model, optimizer: {lr: 3e-2}, train: {lora: {rank: 2, alpha: 8}}}"
    write_ones_graph(
        "edited.yaml", demo_files, f"set: {{models.policy: {policy}}}", "set: {schedule.save_every: 1}"
    )


def run(name: str, *settings: str, devices: int | None = 1, **more: Any) -> list[dict[str, Any]]:
    """Run it; its metrics without times."""
    run_graph("edited.yaml", settings, devices, inline=True, run_dir=Path(name), **more)
    lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "memory/", "tokens/", "perf/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def weights(name: str) -> dict[str, Any]:
    """The adapters and averages of the last checkpoint, and the exported model."""
    files = [
        *Path(name, "checkpoints/step-000003").glob("*/shard-*"),
        *Path(name, "models").rglob("*.safetensors"),
    ]
    assert len(files) == 3  # the adapter of the exported model beside it
    return {f"{file.parent.name}/{file.name}": load_file(file) for file in files}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(tensor.equal(other[file][name]) for file in one for name, tensor in one[file].items())


@pytest.mark.slow
def test_a_run_on_shared_weights_is_that_of_engines_apart_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = run("shared")
    text = Path("shared/plan.txt").read_text()
    assert "generates with the frozen weights of its train engine, held once" in text
    assert "its adapter alone" in text
    lent = []
    with monkeypatch.context() as patched:
        patched.setattr("rlgraph.runtime.worker.engine_host.shares_base", lambda *_: lent.append(0))
        apart = run("apart")
    assert lent and shared == apart and len(shared) == 3
    assert equal(weights("shared"), weights("apart"))
    assert shared[-1]["update_policy/kl_ref"] > 0
    shutil.rmtree("shared/checkpoints/step-000003")
    assert run("shared", resume=True) == apart and equal(weights("shared"), weights("apart"))


def test_both_engines_of_a_run_read_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[EngineHost] = []
    close = EngineHost.close

    def closed(host: EngineHost) -> None:
        hosts.append(host)
        close(host)

    monkeypatch.setattr(EngineHost, "close", closed)
    run("shared")
    (host,) = hosts
    train, serve = host.train["policy"], host.serve["policy"]
    held = {key: tensor.data_ptr() for key, tensor in train.lend().weights.items()}
    assert held == {key: tensor.data_ptr() for key, tensor in serve.base.weights.items()}  # type: ignore[attr-defined]
    served = {p.data_ptr() for p in serve.model.parameters()}  # type: ignore[attr-defined]
    assert {*held.values()} <= served and len(served) == len(held) + len(serve.adapter)  # type: ignore[attr-defined]
    assert (host.versions["policy"], serve.version) == (3, 2)


@pytest.mark.parametrize("more", [(), POOLS, STALE], ids=["together", "apart", "stale"])
def test_a_run_finds_what_one_with_merged_weights_does(more: tuple[str, ...]) -> None:
    devices = None if more else 1
    merged = run("merged", *more, "models.policy.serve.lora=merged", devices=devices)
    alone = run("alone", *more, ALONE, devices=devices)
    for name, is_alone in (("merged", False), ("alone", True)):
        assert ("its adapter alone" in Path(name, "plan.txt").read_text()) == is_alone
    assert len(alone) == len(merged) == 3
    for one, other in zip(alone, merged, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
