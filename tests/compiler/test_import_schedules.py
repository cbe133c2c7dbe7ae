"""When other systems save and evaluate, and which checkpoint is best, becomes the graph's schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlgraph.check import check_report
from rlgraph.frontend.compose import compose
from rlgraph.importing.areal import import_areal
from rlgraph.importing.importer import Imported
from rlgraph.importing.nemo_rl import import_nemo_rl
from rlgraph.importing.prime_rl import import_prime_rl
from rlgraph.importing.trl import import_trl
from rlgraph.importing.verl import import_verl
from rlgraph.request import PlanRequest

BEST = {"metric": "eval/reward", "mode": "max"}
# eight optimizer steps per iteration
TRL = ("num_processes=8", "per_device_train_batch_size=2", "gradient_accumulation_steps=4")
TRL = (*TRL, "steps_per_generation=32", "num_generations=8", "model_name_or_path=org/model")
AREAL = ("train_dataset.type=rl", "gconfig.n_samples=4", "total_train_epochs=5", "actor.path=org/model")
SFT = ("data.train_files=[a.parquet]", "engine.strategy=fsdp", "optim.lr=1e-5", "model.path=org/model")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trl(*settings: str, trainer: str = "grpo") -> Imported:
    Path("settings.yaml").write_text("{}\n")
    return import_trl(Path("settings.yaml"), (*TRL, *settings), trainer=trainer)


def nemo_rl(*settings: str) -> Imported:
    return import_nemo_rl(None, ("grpo.max_num_steps=100", "policy.model_name=org/model", *settings))


def areal(*settings: str) -> Imported:
    return import_areal(None, (*AREAL, *settings))


def verl(*settings: str) -> Imported:
    return import_verl(None, settings)


def verl_sft(*settings: str) -> Imported:
    return import_verl(None, (*SFT, *settings))


def prime_rl(*settings: str) -> Imported:
    return import_prime_rl(("--model.name", "org/model", "--max-steps", "100", *settings), run="rl")


def sections(imported: Imported) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schedule, and the evaluation without its nodes, of the graph, in which nothing is wrong."""
    Path("graph.yaml").write_text(imported.graph())
    assert check_report(PlanRequest("graph.yaml"))["problems"] == []
    graph: dict[str, Any] = dict(compose("graph.yaml").plain())
    return graph["schedule"], {k: v for k, v in graph.get("eval", {}).items() if k != "nodes"}


def said(imported: Imported, key: str) -> str:
    return next(outcome.text for outcome in imported.outcomes if outcome.key == key)


Importer = Callable[..., Imported]
STEPS = "max_steps=1000"
# settings -> what the schedule has of them
SCHEDULES: list[tuple[Importer, tuple[str, ...], dict[str, Any]]] = [
    (trl, (STEPS, "save_steps=16"), {"iterations": 125, "save_every": 2}),
    (trl, (STEPS, "save_steps=0.1"), {"save_every": 12}),  # 100 of 1,000 optimizer steps
    (trl, ("num_train_epochs=3", "save_steps=0.1"), {"epochs": 3, "save_every": "0.3 epochs"}),
    (trl, ("save_strategy=epoch",), {"save_every": "1 epoch"}),
    (trl, ("save_strategy=no",), {"save_every": 0}),
    (trl, (STEPS, "save_strategy=epoch", "save_steps=16"), {"save_every": "1 epoch"}),
    (trl, ("save_total_limit=4",), {"keep": 4}),
    (verl, ("trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=5"), {"save_every": 20, "keep": 5}),
    (verl, ("trainer.save_freq=-1",), {"save_every": 0}),
    (verl_sft, ("trainer.save_freq=after_each_epoch",), {"save_every": "1 epoch"}),
    (verl_sft, ("trainer.save_freq=7", "trainer.max_ckpt_to_keep=3"), {"save_every": 7, "keep": 3}),
    (nemo_rl, ("checkpointing.save_period=30",), {"save_every": 30}),
    (nemo_rl, (), {"best": {**BEST, "keep": 3}, "keep": 1}),
    (nemo_rl, ("checkpointing.keep_top_k=1", "checkpointing.higher_is_better=true"), {"best": BEST}),
    (nemo_rl, ("checkpointing.metric_name=null", "checkpointing.keep_top_k=4"), {"keep": 4, "best": None}),
    (areal, ("saver.freq_steps=40",), {"save_every": 40}),
    (areal, ("saver.freq_secs=1800",), {"save_every": "30 min"}),
    (areal, ("saver.freq_secs=90",), {"save_every": "90 s"}),
    (areal, ("saver.freq_epochs=1",), {"save_every": "1 epoch"}),
    (areal, ("saver.freq_epochs=1", "saver.freq_steps=40"), {"save_every": 40}),
    (prime_rl, ("--ckpt.interval", "25", "--ckpt.keep-last", "3"), {"save_every": 25, "keep": 3}),
]


@pytest.mark.parametrize(("importer", "settings", "schedule"), SCHEDULES)
def test_checkpoints_come_when_they_came(
    importer: Importer, settings: tuple[str, ...], schedule: dict[str, Any]
) -> None:
    imported, _ = sections(importer(*settings))
    assert {key: imported.get(key) for key in schedule} == schedule


REWARD = {"report": {"reward": "rewards"}}
EVALUATIONS: list[tuple[Importer, tuple[str, ...], dict[str, Any]]] = [
    (trl, (), {}),
    (trl, ("eval_strategy=epoch",), {"every": "1 epoch", "before": False, **REWARD}),
    (trl, ("eval_strategy=steps", "eval_steps=80"), {"every": 10, "before": False, **REWARD}),
    (trl, ("eval_strategy=steps", "logging_steps=40"), {"every": 5, "before": False, **REWARD}),
    (
        trl,
        ("eval_strategy=steps", "eval_steps=0.25", "num_train_epochs=2", "eval_on_start=true"),
        {"every": "0.5 epochs", "before": True, **REWARD},
    ),
    (verl, ("trainer.test_freq=5",), {"every": 5, **REWARD}),
    (areal, ("evaluator.freq_steps=10",), {"every": 10, "before": False, **REWARD}),
    (areal, ("evaluator.freq_secs=7200",), {"every": "2 h", "before": False, **REWARD}),
    (areal, ("evaluator.freq_epochs=1",), {"every": "1 epoch", "before": False, **REWARD}),
    (
        areal,
        ("evaluator.freq_epochs=1", "evaluator.freq_secs=60"),
        {"every": "1 min", "before": False, **REWARD},
    ),
]


@pytest.mark.parametrize(("importer", "settings", "evaluation"), EVALUATIONS)
def test_evaluations_come_when_they_came(
    importer: Importer, settings: tuple[str, ...], evaluation: dict[str, Any]
) -> None:
    _, imported = sections(importer(*settings))
    assert {key: imported[key] for key in evaluation} == evaluation
    assert bool(imported) == bool(evaluation)


EPOCH = ("eval_strategy=epoch", "metric_for_best_model=eval_reward")


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ((*EPOCH, "save_strategy=epoch", "load_best_model_at_end=true"), BEST),
        ((*EPOCH, "save_strategy=best"), BEST),
        ((*EPOCH, "save_strategy=best", "greater_is_better=false"), {**BEST, "mode": "min"}),
        ((*EPOCH, "save_strategy=epoch"), None),
        (("eval_strategy=epoch", "save_strategy=best"), None),  # by the loss, which evaluations don't measure
        (("save_strategy=best", "metric_for_best_model=reward"), None),
    ],
)
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_the_best_of_trl_is_the_best(settings: tuple[str, ...], best: Any, trainer: str) -> None:
    steps = "steps_per_generation=4" if trainer == "rloo" else "steps_per_generation=32"
    schedule, _ = sections(trl(*settings, steps, trainer=trainer))
    assert schedule.get("best") == best


def test_a_best_that_is_not_measured_is_said() -> None:
    by_loss = trl("eval_strategy=epoch", "save_strategy=epoch", "load_best_model_at_end=true")
    assert "loss is not measured" in said(by_loss, "load_best_model_at_end")
    without = trl("save_strategy=best", "metric_for_best_model=reward")
    assert "eval_strategy is no" in said(without, "save_strategy")
    idle = trl(*EPOCH)
    assert "has no effect" in said(idle, "metric_for_best_model")
    sft = trl("load_best_model_at_end=true", "save_strategy=best", trainer="sft")
    assert "schedule.best: {metric: eval/NAME" in said(sft, "load_best_model_at_end")
    assert "schedule.best: {metric: eval/NAME" in said(sft, "save_strategy")
    other = nemo_rl("checkpointing.metric_name=val:avg_length")
    assert "don't measure val:avg_length" in said(other, "checkpointing.metric_name")
    assert "best" not in sections(other)[0]
    twice = areal(
        "saver.freq_secs=60", "saver.freq_epochs=1", "evaluator.freq_steps=5", "evaluator.freq_secs=9"
    )
    assert "saver.freq_secs is set too" in said(twice, "saver.freq_epochs")
    assert "evaluator.freq_steps is set too" in said(twice, "evaluator.freq_secs")


def test_a_limit_in_time_is_an_option_of_the_command_line() -> None:
    limited = nemo_rl("checkpointing.checkpoint_must_save_by='00:03:45:00'")
    assert "rlgraph run --time-limit 3h45m" in said(limited, "checkpointing.checkpoint_must_save_by")
    assert "--time-limit" in said(verl("trainer.esi_redundant_time=120"), "trainer.esi_redundant_time")
