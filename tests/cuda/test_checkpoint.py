"""Six steps are three, a checkpoint, and three more; on a device that others' numbers have been on since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rows import engine, step, weights
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_rank")


def test_six_steps_are_three_and_three(device: torch.device, model: str, tmp_path: Path) -> None:
    whole = engine(model, device)
    step(whole, 6)
    first = engine(model, device)
    step(first, 3)
    first.begin_save(str(tmp_path / "saved"))
    step(first, 1)  # goes on while it is written, and leaves no trace there
    first.finish_save()
    second = engine(model, device)
    second.load(str(tmp_path / "saved"))
    assert {p.device.type for p in second.parameters} == {device.type}
    step(second, 3)
    close = {"rtol": 1e-4, "atol": 1e-5} if device.type == "cuda" else {"rtol": 0, "atol": 0}
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(second)[name], tensor, **close)


def test_an_export_has_the_weights_of_the_device(device: torch.device, model: str, tmp_path: Path) -> None:
    trained = engine(model, device)
    step(trained)
    trained.export(str(tmp_path / "exported"))
    written = load_file(tmp_path / "exported/model.safetensors")
    for name, tensor in weights(trained).items():
        assert torch.equal(written[name].float(), tensor), name
