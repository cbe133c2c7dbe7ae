"""NeMo-RL's configurations become graphs that check: what they inherit, and what decides numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlgraph.check import check_report
from rlgraph.errors import GraphError
from rlgraph.importing.importer import Imported
from rlgraph.importing.inherited import read_inherited, resolved
from rlgraph.importing.nemo_rl import import_nemo_rl
from rlgraph.importing.table import table_of
from rlgraph.request import PlanRequest

DEFAULTS = json.loads((Path(__file__).parent / "imported/nemo_rl_defaults.json").read_text())
TRAINERS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def imported(*settings: str) -> Imported:
    """The graph of some settings, which checks."""
    result = import_nemo_rl(None, settings)
    Path("graph.yaml").write_text(result.graph())
    assert check_report(PlanRequest("graph.yaml"))["problems"] == []
    return result


def value(result: Imported, path: str) -> Any:
    return result.draft.value(path)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_the_trainers_own_files_is_known(trainer: str) -> None:
    settings = {k: v for k, v in DEFAULTS[trainer].items() if "${" not in str(v)}
    table = table_of("nemo_rl", trainer)
    unknown = [key for key in settings if table.row(table.renamed(key)) is None]
    assert unknown == []
    imported(*(f"{key}={json.dumps(found)}" for key, found in settings.items() if "*" not in key))


def test_defaults_are_those_of_the_file() -> None:
    table = table_of("nemo_rl", "grpo")
    differ = {
        key: (found, row.default)
        for key, found in DEFAULTS["grpo"].items()
        if (row := table.rows.get(key)) and row.default is not None and found is not None
        if row.default != found and "${" not in str(found)
    }
    assert differ == {}


def test_files_inherit_and_references_follow_what_counts_most() -> None:
    Path("base").mkdir()
    Path("base/a.yaml").write_text("grpo: {x: 1, sub: {k: 1, l: 2}}\nn: ${grpo.x}\nm: ${mul:${n}, 3}\n")
    Path("b.yaml").write_text(
        "defaults: base/a.yaml\ngrpo: {x: 1e-3, sub: {_override_: true, l: 5, s: '${.l}'}}\n"
    )
    given = read_inherited(Path("b.yaml"), ["grpo.x=4"])
    assert given == {"grpo.x": 4, "grpo.sub.l": 5, "grpo.sub.s": 5, "n": 4, "m": 12}
    assert resolved({"a": "${b}", "b": "${a}"}) == {"a": "${b}", "b": "${a}"}


def test_a_parent_that_is_missing_or_leads_back_is_said() -> None:
    Path("lost.yaml").write_text("defaults: nowhere.yaml\n")
    Path("one.yaml").write_text("defaults: two.yaml\n")
    Path("two.yaml").write_text("defaults: [one.yaml]\n")
    with pytest.raises(GraphError, match=r"nowhere\.yaml"):
        import_nemo_rl(Path("lost.yaml"), [])
    with pytest.raises(GraphError, match="lead back"):
        import_nemo_rl(Path("one.yaml"), [])


def test_advantages_leave_one_out_and_the_kl_has_its_own_gradient() -> None:
    result = imported()
    assert value(result, "normal")["leave_one_out"] is True
    assert (value(result, "normal.std"), value(result, "advantages.whiten")) == ("group", False)
    assert (value(result, "update_policy.kl_coef"), value(result, "update_policy.kl_unbiased")) == (
        0.01,
        True,
    )
    assert (value(result, "prompts.batch"), value(result, "rollout.n")) == (32, 16)
    assert value(result, "update_policy.minibatches") == 1
    assert not any(o.key == "the KL" for o in result.outcomes)
    several = imported("policy.train_global_batch_size=128")
    assert value(several, "update_policy.minibatches") == 4
    assert any(o.key == "the KL" and o.kind == "hand" for o in several.outcomes)


def test_dapo() -> None:
    result = imported(
        "grpo.use_leave_one_out_baseline=false",
        "grpo.use_dynamic_sampling=true",
        "grpo.batch_multiplier=3",
        "grpo.reward_scaling.enabled=true",
        "grpo.reward_scaling.target_min=-1.0",
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_shaping.overlong_buffer_length=2048",
        "grpo.reward_shaping.max_response_length=14336",
        "loss_fn.reference_policy_kl_penalty=0",
        "loss_fn.ratio_clip_max=0.28",
        "loss_fn.ratio_clip_c=10",
        "policy.max_total_sequence_length=16384",
        "policy.generation.max_new_tokens=16384",
    )
    loss = {"kind": "ppo_clip", "clip": 0.2, "clip_high": 0.28, "dual_clip": 10}
    assert value(result, "update_policy.loss") == loss
    scaled, overlong = value(result, "scaled"), value(result, "overlong")
    assert [scaled["factor"] * (s + scaled["shift"]) for s in (0, 1)] == [-1, 1]
    assert (overlong["limit"] - overlong["buffer"], overlong["penalty"] / overlong["buffer"]) == (
        12288,
        1 / 2048,
    )
    assert value(result, "informative.refill.expected") == pytest.approx(1 / 3, abs=1e-6)
    assert value(result, "informative.in") == {"rewards": "rewards"}
    assert not result.draft.has("models.ref")


@pytest.mark.parametrize(
    ("kind", "op"),
    [("tis", "correction.tis"), ("icepop", "correction.mis"), ("seq-mask-tis", "correction.reject")],
)
def test_corrections(kind: str, op: str) -> None:
    bound = "loss_fn.truncated_importance_sampling"
    result = imported(
        "loss_fn.use_importance_sampling_correction=true",
        f"{bound}_type={kind}",
        f"{bound}_ratio=2.0",
        f"{bound}_ratio_min=0.5",
    )
    weights = value(result, "rollout_weights")
    assert weights["op"] == op
    bounds = {"tis": {"floor": 0.5, "cap": 2.0}, "icepop": {"low": 0.5, "high": 2.0}}
    assert weights.items() >= bounds.get(kind, {"kl": "k1"}).items()


def test_losses_by_sequence_and_cispo() -> None:
    by_sequence = ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false")
    result = imported(*by_sequence)
    assert value(result, "update_policy.loss.level") == "sequence"
    assert value(result, "update_policy.aggregate") == "seq-mean-token-mean"
    assert value(imported("loss_fn.use_cispo=true"), "update_policy.loss.kind") == "cispo"


def test_megatron_is_read_where_it_is_on() -> None:
    on = "policy.megatron_cfg"
    result = imported(f"{on}.enabled=true", f"{on}.optimizer.lr=3e-6", f"{on}.scheduler.lr_warmup_iters=7")
    assert value(result, "models.policy.optimizer.lr") == 3e-6
    assert value(result, "models.policy.optimizer.warmup_steps") == 7
    assert value(imported(f"{on}.optimizer.lr=3e-6"), "models.policy.optimizer.lr") == 5e-6


def test_generation_that_runs_ahead_has_a_pool() -> None:
    result = imported(
        "cluster.gpus_per_node=8",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=2",
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.in_flight_weight_updates=true",
        "loss_fn.use_importance_sampling_correction=true",
    )
    assert (value(result, "pools.train.devices"), value(result, "pools.gen.devices")) == (6, 2)
    assert value(result, "schedule.buffer.staleness") == 1


def test_an_engine_of_more_devices_than_a_host_spans_several() -> None:
    devices = ["cluster.gpus_per_node=8", "cluster.num_nodes=4"]
    tensor = "policy.generation.vllm_cfg.tensor_parallel_size"
    assert value(imported(*devices, f"{tensor}=16"), "models.policy.serve.sglang.hosts") == 2
    assert value(imported(*devices, f"{tensor}=8"), "models.policy.serve.sglang.hosts") == 1


def test_trainers_without_a_graph_are_refused() -> None:
    with pytest.raises(GraphError, match="opd"):
        import_nemo_rl(None, ["grpo.adv_estimator.name=opd"])
