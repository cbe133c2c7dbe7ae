"""Optimizer options, schedules and clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlgraph.runtime.engines.fsdp.optimizer import make_optimizer, options_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lr\n  Field required"),
        ({"lr": 1e-3, "nesterov": True}, "nesterov\n  Extra inputs are not permitted"),
        ({"lr": 1e-3, "schedule": "cosine"}, "schedule cosine needs total_steps"),
        ({"lr": 1e-3, "schedule": "step"}, "schedule\n  Input should be 'constant', 'cosine' or 'linear'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(options)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5]),
        ("cosine", [0.0, 0.5, 1.0, 0.853553, 0.5]),
    ],
)
def test_schedules_warm_up_and_decay(schedule: str, expected: list[float]) -> None:
    options = options_of({"lr": 1.0, "schedule": schedule, "warmup_steps": 2, "total_steps": 6})
    optimizer, scheduler = make_optimizer([torch.nn.Parameter(torch.zeros(2))], options)
    rates = []
    for _ in expected:
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-6)
