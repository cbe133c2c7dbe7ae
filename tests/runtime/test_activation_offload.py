"""Inputs of layers that wait on the host (``train.activation_offload``): the same numbers, to the bit.

This file as a script compares engines on two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch
from test_offload import ADAM, ROWS, columns, logprobs, objective, same, update, write_model
from torch.distributed.device_mesh import DeviceMesh

import far
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.memory import activations

MADE = {"optimizer": ADAM, "recompute": True, "micro_tokens": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": {"reshard": True},
    "beside": {"packing": False, "dtype": "bfloat16"},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
}
LAYERS, HIDDEN = 2, 30


def compare(path: str, mesh: DeviceMesh, **settings: Any) -> None:
    made = {"mesh": mesh, **MADE, **settings}
    host, device = (FsdpEngine.of(path, activation_offload=on_host, **made) for on_host in (True, False))
    for _ in range(3):
        assert update(host) == update(device)
        same(host, device)


def main(rank: int, root: Path) -> None:
    for name in ("whole", "layers"):
        compare(str(root / "model"), DeviceMesh("cpu", [0, 1]), **SETTINGS[name])
    dist.barrier()
    (root / f"passed-{rank}").touch()


@pytest.fixture(scope="module")
def path(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("activations"))


@pytest.mark.parametrize("name", SETTINGS)
def test_updates_are_those_of_inputs_on_the_device(name: str, path: str) -> None:
    compare(path, DeviceMesh("cpu", [0]), **SETTINGS[name])


@pytest.mark.slow
def test_ranks_keep_their_own(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    launch(__file__, tmp_path)
    assert len(list(tmp_path.glob("passed-*"))) == 2


def test_an_input_comes_back_while_the_layer_behind_it_is_at_work(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each micro-batch layers' inputs go in their order; as each is taken, the one before is fetched."""
    done: list[str] = []
    names: dict[int, str] = {}
    init, fetch, take = (getattr(activations.HostTensor, name) for name in ("__init__", "fetch", "take"))

    def gone(waiting: Any, *args: Any) -> None:
        names[id(waiting)] = f"{len(done) % LAYERS}"
        done.append(f"go {names[id(waiting)]}")
        init(waiting, *args)

    def fetched(waiting: Any) -> None:
        if waiting.fetching is None:
            done.append(f"come {names[id(waiting)]}")
        fetch(waiting)

    def taken(waiting: Any) -> Any:
        tensor = take(waiting)
        done.append(f"take {names[id(waiting)]}")
        return tensor

    engine = FsdpEngine.of(path, activation_offload=True, optimizer=ADAM, recompute=True)
    for name, function in ("__init__", gone), ("fetch", fetched), ("take", taken):
        monkeypatch.setattr(activations.HostTensor, name, function)
    logprobs(engine)
    assert done == []  # without gradients nothing waits
    update(engine)
    assert done == ["go 0", "go 1", "come 1", "come 0", "take 1", "take 0"]


def test_a_far_device_has_every_input_once(path: str) -> None:
    """What an update of a far device copies more to its host, and from it, is an input of each layer."""
    moved = []
    for on_host in (False, True):
        with far.device() as seen:
            made = {**MADE, "micro_tokens": 1000, "packing": False}
            engine = FsdpEngine.of(path, device=far.DEVICE.type, activation_offload=on_host, **made)
            rows = torch.arange(ROWS)
            seen.host_bytes = seen.device_bytes = 0
            metrics = engine.update(columns(rows), objective, rows, ROWS)
            moved.append((seen.host_bytes, seen.device_bytes, metrics))
    (host, device, without), (more_host, more_device, with_it) = moved
    assert with_it == without
    cells = (more_host - host) / (LAYERS * HIDDEN * 4)
    assert cells == int(cells) >= len(columns(torch.arange(ROWS))["tokens"].values)
    assert more_device - device == more_host - host


def test_nothing_stays_on_the_host_after_an_update(path: str) -> None:
    engine = FsdpEngine.of(path, activation_offload=True, **MADE)
    made: list[Any] = []
    init = activations.HostTensor.__init__

    def noted(waiting: Any, *args: Any) -> None:
        init(waiting, *args)
        made.append(activations.weakref.ref(waiting))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations.HostTensor, "__init__", noted)
        update(engine)
    assert len(made) > LAYERS and not any(waiting() for waiting in made)


def test_few_tensors_are_on_their_way_at_once() -> None:
    """The host would else run ahead of a GPU, which holds each until its copy is made."""
    offload = activations.ActivationOffload(torch.device("cpu"))
    weight, total = torch.ones(3, requires_grad=True), torch.zeros(())
    for number in range(4):
        with offload.saving():
            total = total + (weight * torch.full((3,), float(number))).sum()
        assert len(offload.leaving) == min(number + 1, activations.MAX_LEAVING)
    total.backward()
    assert not offload.leaving
    assert weight.grad is not None and weight.grad.tolist() == [6.0] * 3


if __name__ == "__main__":
    forked(main, 2)
