"""Optimizer options, schedules and clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlgraph.engines.optimizers import OPTIMIZERS, OptimizerKind
from rlgraph.runtime.engines.fsdp.optimizer import MAKERS, make_optimizer, options_of, with_every_optimizer


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


def test_an_optimizer_of_the_registry_that_nothing_makes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "sgd", OptimizerKind("which keeps no averages"))
    with pytest.raises(TypeError, match="nothing makes the optimizer sgd; add it to MAKERS"):
        with_every_optimizer(MAKERS)


def rates_of(count: int, **options: Any) -> list[float]:
    chosen = options_of({"lr": 1.0, **options})
    optimizer, scheduler = make_optimizer([torch.nn.Parameter(torch.zeros(2))], chosen)
    rates = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_are_those_of_transformers(schedule: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, 3, 11)
    expected = []
    for _ in range(11):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates_of(11, schedule=schedule, warmup_steps=3, total_steps=11) == expected


def test_a_share_warms_up_and_a_floor_and_waves_are_kept() -> None:
    shared = rates_of(10, schedule="constant", warmup_steps=0.4, total_steps=10)
    assert shared == [0, 0.25, 0.5, 0.75, *[1.0] * 6]
    floor = rates_of(11, schedule="cosine", min_lr_ratio=0.2, total_steps=10)
    assert floor[0] == 1 and floor[5] == pytest.approx(0.6) and floor[10] == pytest.approx(0.2)
    waves = rates_of(11, schedule="cosine", cycles=1.0, total_steps=10)
    assert waves[5] == pytest.approx(0) and waves[10] == pytest.approx(1)
    with pytest.raises(ValueError, match="a share of it needs total_steps"):
        options_of({"lr": 1.0, "warmup_steps": 0.1})


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_a_schedule_that_has_ended_stays_where_it_ended(schedule: str, last: float) -> None:
    rates = rates_of(25, schedule=schedule, min_lr_ratio=0.1, total_steps=10)
    assert rates[10:] == pytest.approx([last] * 15)
