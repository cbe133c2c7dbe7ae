"""What `rlgraph import` writes runs: an iteration with a reward of verl, and one with those of TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.run import run_graph

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    assert data_source == "add" and isinstance(ground_truth, str) and extra_info["index"] >= 0
    return {"score": scale * len(solution_str), "acc": float(solution_str == ground_truth)}
"""
TRL = """
def lengths(prompts, completions, level, **kwargs):
    assert prompts[0][0]["role"] == "user" and isinstance(level[0], int)
    return [float(len(c[0]["content"])) for c in completions]

def ends(prompts, completions, completion_ids, **kwargs):
    return [len(ids) / 10 if ids else None for ids in completion_ids]
"""


def row(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{number}+{number}="}]
    truth = {"style": "rule", "ground_truth": str(2 * number)}
    more = {"extra_info": {"index": number, "split": "train"}, "level": number}
    return {"prompt": prompt, "reward_model": truth, "data_source": "add", **more}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("model"), seed=0)
    Path("v.py").write_text(VERL)
    Path("t.py").write_text(TRL)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(n) for n in range(8)]), "train.parquet")


def metrics(devices: int, *settings: str) -> dict[str, float]:
    """The metrics of one iteration of what was imported."""
    run_graph("out.yaml", settings, devices, steps=1, inline=devices == 1, run_dir=Path("run"))
    return dict(json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1]))


def imported(*args: str) -> None:
    result = CliRunner().invoke(main, ["import", *args, "-o", "out.yaml"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_a_configuration_of_verl_trains_with_its_reward(estimator: str) -> None:
    kl = "algorithm.use_kl_in_reward=true" if estimator == "rloo" else "trainer.test_freq=-1"
    names = ("custom_reward_function.path=v.py", "+custom_reward_function.reward_kwargs.scale=0.5", kl)
    sizes = (
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_epochs=1",
    )
    rollout = ("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    files = ("data.train_files=train.parquet", "data.max_response_length=4", "trainer.n_gpus_per_node=1")
    model = ("actor_rollout_ref.model.path=model", f"algorithm.adv_estimator={estimator}")
    imported("verl", *names, *sizes, *rollout, *files, *model)
    values = metrics(1)
    assert values["reward/failed"] == 0
    assert values["reward/mean"] > 0
    assert 0 <= values["rewards/acc"] <= 1
    assert Path("run/models/policy/config.json").is_file()


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_settings_of_trl_train_with_their_rewards(devices: int) -> None:
    Path("c.yaml").write_text(
        "model_name_or_path: model\nreward_funcs: [t.lengths, t.ends]\nreward_weights: [1.0, 0.5]\n"
        "num_generations: 2\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nbeta: 0.01\n"
        "max_completion_length: 4\nloss_type: dr_grpo\nscale_rewards: none\nmax_steps: 2\n"
    )
    imported("trl", "c.yaml", "--trainer", "grpo", f"num_processes={devices}")
    values = metrics(devices, "prompts.files=[train.parquet]")
    assert values["rewards/mean"] > 0
    assert values["update_policy/kl_ref"] >= 0
