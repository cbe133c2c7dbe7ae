"""AdamW on the host (``train.optimizer_offload``): the same numbers, to the bit, as beside the weights.

This file as a script compares engines on two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch
from test_offload import ADAM, ROWS, columns, logprobs, objective, update, write_model
from torch.distributed.device_mesh import DeviceMesh

import far
from rlgraph.costs import limits
from rlgraph.runtime.engines.fsdp import host_optimizer
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW
from rlgraph.runtime.engines.fsdp.shards import local

CLIPPED = {**ADAM, "max_grad_norm": 1e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": {"reshard": True, "recompute": True},
    "bfloat16": {"dtype": "bfloat16", "micro_tokens": 20},  # several micro-batches, whose gradients add up
    "bfloat16 layers": {"dtype": "bfloat16", "micro_tokens": 20, "reshard": True},
    "value": {"head": "value"},
}


def step(engine: FsdpEngine) -> dict[str, float]:
    if engine.head == "lm":
        return update(engine)
    rows = torch.arange(ROWS)[engine.group.rank() :: engine.group.size()]
    return engine.update(
        columns(rows),
        lambda batch, totals: (batch["new_values"].values.square().sum() / totals.tokens, {}),
        rows,
        ROWS,
    )


def same(host: FsdpEngine, device: FsdpEngine) -> None:
    """The weights, as a reader of any data type gets them, and the averages are equal."""
    for dtype in None, "bfloat16", "float32":
        theirs = dict(device.weights(dtype))
        assert all(tensor.equal(theirs[name]) for name, tensor in host.weights(dtype))
    assert isinstance(host.optimizer, HostAdamW)
    for mine, other in zip(host.optimizer.masters.values(), device.parameters, strict=True):
        ours, theirs = host.optimizer.state[mine], device.optimizer.state[other]
        assert ours.keys() == theirs.keys()
        assert all(local(ours[key]).equal(local(theirs[key])) for key in ours)


def compare(path: str, mesh: DeviceMesh, folder: Path, **settings: Any) -> None:
    """Train beside each other, then each from the other's checkpoint."""
    made = {"optimizer": CLIPPED, "mesh": mesh, **settings}
    host, device = (FsdpEngine.of(path, **made, optimizer_offload=on_host) for on_host in (True, False))
    compute = getattr(torch, settings.get("dtype", "float32"))
    assert all(parameter.dtype == compute for parameter in host.parameters)
    for _ in range(3):
        assert step(host) == step(device)
        same(host, device)
    host.save(str(folder / "host"))
    device.save(str(folder / "device"))
    assert host.checkpoint_bytes() == device.checkpoint_bytes()
    dist.barrier()  # a checkpoint is whole once every rank has written
    host.offload(["parameters", "optimizer"])
    host.load(str(folder / "device"))
    host.reload(["parameters", "optimizer"])
    device.load(str(folder / "host"))
    assert step(host) == step(device)
    same(host, device)
    other = FsdpEngine.of(
        path, frozen=True, mesh=mesh, head=host.head, dtype=settings.get("dtype", "float32")
    )
    for one in host, device:
        one.copy(other, mix=0.5)
    same(host, device)


def main(rank: int, root: Path) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    for name in ("whole", "bfloat16 layers"):
        compare(str(root / "model"), mesh, root / name, **SETTINGS[name])
    dist.barrier()
    (root / f"passed-{rank}").touch()


@pytest.fixture(scope="module")
def path(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("host"))


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, so that there are some."""
    monkeypatch.setattr(limits, "BUCKET", 8000)


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_on_the_host_are_those_beside_the_weights(name: str, path: str, tmp_path: Path) -> None:
    compare(path, DeviceMesh("cpu", [0]), tmp_path, **SETTINGS[name])


@pytest.mark.slow
def test_ranks_step_their_shards(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    launch(__file__, tmp_path)
    assert len(list(tmp_path.glob("passed-*"))) == 2


def test_a_gradient_that_is_not_finite_takes_no_step(path: str) -> None:
    engine = FsdpEngine.of(path, optimizer=ADAM, optimizer_offload=True)
    before = logprobs(engine)

    def broken(batch: Any, totals: Any) -> Any:
        return objective(batch, totals)[0] * float("nan"), {}

    rows = torch.arange(ROWS)
    assert engine.update(columns(rows), broken, rows, ROWS)["skipped"] == 1
    assert logprobs(engine).equal(before)
    assert all(parameter.grad is None for parameter in engine.parameters)
    update(engine)
    assert not logprobs(engine).equal(before)


def test_a_far_device_holds_weights_alone(path: str) -> None:
    """Each step takes every gradient to the host and brings every weight back, once."""
    still = FsdpEngine.of(path, optimizer=ADAM)
    with far.device() as seen:
        engine = FsdpEngine.of(path, optimizer=ADAM, device=far.DEVICE.type, optimizer_offload=True)
        assert all(parameter.device == far.DEVICE for parameter in engine.parameters)
        held = [*engine.optimizer.masters.values()]
        held += [value for state in engine.optimizer.state.values() for value in state.values()]
        assert all(tensor.is_cpu for tensor in held)
        for _ in range(2):
            seen.host_bytes = seen.device_bytes = 0
            rows = torch.arange(ROWS)
            metrics = engine.update(columns(rows), objective, rows, ROWS)
            assert metrics == pytest.approx(update(still), rel=1e-5)
            size = sum(parameter.nbytes for parameter in engine.parameters)
            assert size <= seen.host_bytes < size + 5000
            assert size <= seen.device_bytes < size + 5000
        theirs = dict(still.weights())
        for name, tensor in engine.weights():
            torch.testing.assert_close(tensor.cpu(), theirs[name], rtol=1e-3, atol=1e-4)


def test_a_copy_of_a_bucket_runs_while_the_one_before_is_stepped(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which a step asks for copies, which on CUDA run beside it: see the module's drawing."""
    done: list[str] = []
    engine = FsdpEngine.of(path, optimizer=ADAM, optimizer_offload=True)
    copy, stepped = host_optimizer.CopyStream.copy, HostAdamW._step
    streams: list[Any] = []

    def copied(stream: Any, pairs: Any) -> Any:
        if stream not in streams:
            streams.append(stream)
        done.append(("come", "go")[streams.index(stream)])
        return copy(stream, pairs)

    monkeypatch.setattr(host_optimizer.CopyStream, "copy", copied)
    monkeypatch.setattr(HostAdamW, "_step", lambda *args: (done.append("step"), stepped(*args))[1])
    update(engine)
    count = done.count("step")
    assert count > 3
    assert done == ["come", *["come", "step", "go"] * (count - 1), "step", "go"]


if __name__ == "__main__":
    limits.BUCKET = 8000
    forked(main, 2)
