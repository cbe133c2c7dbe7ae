"""AReaL's configurations become graphs that check, with the values that decide numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlgraph.check import check_report
from rlgraph.errors import GraphError
from rlgraph.importing.areal import import_areal, sizes_of
from rlgraph.importing.importer import Imported
from rlgraph.importing.table import table_of
from rlgraph.request import PlanRequest

KEYS = json.loads((Path(__file__).parent / "imported/areal_defaults.json").read_text())
GSM8K = (
    "train_dataset.type=rl",
    "train_dataset.batch_size=256",
    "rollout.backend=sglang:d4p1t1",
    "rollout.max_head_offpolicyness=2",
    "actor.backend=fsdp:d4p1t1",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=1024",
    "actor.kl_ctl=0.0",
    "actor.reward_scaling=10.0",
    "actor.reward_bias=-0.5",
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported(*settings: str) -> Imported:
    result = import_areal(None, settings)
    Path("graph.yaml").write_text(result.graph())
    assert check_report(PlanRequest("graph.yaml"))["problems"] == []
    return result


def value(result: Imported, path: str) -> Any:
    return result.draft.value(path)


@pytest.mark.parametrize("trainer", ["ppo", "grpo", "sft"])
def test_every_key_of_examples_is_known(trainer: str) -> None:
    table = table_of("areal", "sft" if trainer == "sft" else "ppo")
    assert [key for key in KEYS[trainer] if table.row(table.renamed(key)) is None] == []


def test_the_decoupled_loss_weighs_by_what_sampled() -> None:
    norms = ("actor.reward_norm.mean_level=group", "actor.adv_norm.mean_level=batch")
    rejects = ("actor.rejection_sampling.metric=ratio", "actor.rejection_sampling.upper=5.0")
    result = imported(*GSM8K, *norms, *rejects, "actor.use_decoupled_loss=true")
    weights = {"op": "correction.mis", "level": "token", "low": 0.0, "high": 5.0}
    assert value(result, "rollout_weights") == weights
    scaled = value(result, "scaled")
    assert (scaled["shift"], scaled["factor"], scaled["low"], scaled["high"]) == (-0.5, 10.0, -20.0, 20.0)
    assert (value(result, "normal.mean"), value(result, "normal.std")) == ("group", "batch")
    assert value(result, "advantages.whiten") is True
    assert value(result, "schedule.buffer.staleness") == 2
    assert value(result, "pools") == {"train": {"devices": 4}, "gen": {"devices": 4}}
    assert value(result, "update_policy.minibatches") == 4
    unweighed = value(imported(*GSM8K, "actor.use_decoupled_loss=true"), "rollout_weights")
    assert (unweighed["floor"], unweighed["cap"]) == (1.0, 1.0)


def test_without_the_decoupled_loss_the_ratio_is_to_what_sampled() -> None:
    result = imported(*GSM8K)
    assert value(result, "update_policy.in.old_logprobs") == "rollout_logprobs"
    assert not result.draft.has("old_logprobs")
    assert value(result, "advantages.whiten") is False


def test_the_kl_is_in_the_reward_where_there_is_a_reference() -> None:
    with_kl = [s for s in GSM8K if "kl_ctl" not in s]
    result = imported(*with_kl, "ref.dtype=bfloat16", "actor.recompute_logprob=true")
    assert (value(result, "shaped.beta"), value(result, "shaped.kl")) == (0.1, "k1")
    assert any(o.key == "the KL" for o in imported(*with_kl).outcomes)


def test_sizes() -> None:
    assert sizes_of("megatron:d2p2t1") == {"d": 2, "p": 2, "t": 1}
    older = imported(*(s for s in GSM8K if "backend" not in s), "allocation_mode=sglang:d2p1t2+d4p1t1")
    assert value(older, "pools") == {"train": {"devices": 4}, "gen": {"devices": 4}}
    assert value(older, "models.policy.serve.tensor_parallel") == 2


def test_settings_that_train_nothing_are_refused() -> None:
    with pytest.raises(GraphError, match="actor"):
        import_areal(None, ["rollout.backend=sglang:d1"])
