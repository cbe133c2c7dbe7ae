"""`rlgraph import verl` beside verl's own configuration, as Hydra composes it (peers/ask_verl_config.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from imported_graph import graph_of
from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.importing.importer import Imported
from rlgraph.importing.table import BELOW, table_of
from rlgraph.importing.verl import import_verl
from rlgraph.request import PlanRequest

RECORDED = json.loads((Path(__file__).parents[1] / "peers/recorded/verl_config.json").read_text())
ACTOR, ROLLOUT, CORRECTION = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "algorithm.rollout_correction",
)
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
FUNCTION = "custom_reward_function.path=verl_reward.py"
OVERLONG = tuple(f"reward_model.overlong_buffer.{s}" for s in ("enable=true", "len=64", "penalty_factor=1.0"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, **more): ...\n"
    )
    monkeypatch.chdir(tmp_path)


def verl(*overrides: str, release: str = "") -> dict[str, Any]:
    return graph_of(import_verl(None, overrides, release=release))


def outcome(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = (o for o in imported.outcomes if o.key == key)
    return found.kind, found.text


def called(*words: str) -> Result:
    result = CliRunner().invoke(main, ["import", "verl", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("pkg://verl.utils.reward_score.rlla", "verl.utils.reward_score.rlla:compute_score"),
        ("pkg://verl/utils/reward_score/rlla", "verl.utils.reward_score.rlla:compute_score"),
        ("file://verl_reward.py", "verl_reward.py:compute_score"),
        ("verl_reward.py", "verl_reward.py:compute_score"),
    ],
)
def test_a_reward_function_is_of_a_package_or_of_a_file(path: str, function: str) -> None:
    imported = import_verl(None, [*GRPO, f"custom_reward_function.path={path}"])
    assert f"function: {function}" in imported.graph().replace('"', "")


@pytest.mark.parametrize(("name", "composed", "least"), [("verl", "defaults", 90), ("verl_sft", "sft", 25)])
def test_defaults_are_verls_own(name: str, composed: str, least: int) -> None:
    theirs = RECORDED[composed]
    compared = 0
    for key, row in table_of(name).rows.items():
        if "default" in row.entry and key in theirs:
            assert row.default == theirs[key] or (row.default, theirs[key]) == (None, None), key
            compared += 1
        if row.follows and key in theirs:
            assert theirs[key] == theirs[row.follows], key
    assert compared >= least


@pytest.mark.parametrize(
    ("name", "composed"), [("verl", "defaults"), ("verl", "megatron"), ("verl_sft", "sft")]
)
def test_no_key_of_verls_is_unknown(name: str, composed: str) -> None:
    table = table_of(name)
    keys = [key for key in RECORDED[composed] if not key.endswith("_target_")]
    assert [key for key in keys if table.row(table.renamed(key)) is None] == []
    assert not any(key.endswith(BELOW) for key in keys)


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What verl composes of a recorded command line, and the graph of the same."""
    recorded = RECORDED["cases"][name]
    return recorded["composed"], verl(*recorded["given"])


def test_an_evaluation_before_training_is_left_out_where_verl_leaves_it_out() -> None:
    theirs, graph = case("no_evaluation_before")
    assert graph["eval"]["before"] is theirs["trainer.val_before_train"] is False
    assert graph["eval"]["every"] == theirs["trainer.test_freq"]


@pytest.mark.parametrize("name", ["critic_follows", "critic_says"])
def test_a_critic_follows_the_actor_unless_told(name: str) -> None:
    theirs, graph = case(name)
    update = graph["nodes"]["update_critic"]
    assert update["minibatches"] == theirs["data.train_batch_size"] / theirs["critic.ppo_mini_batch_size"]
    assert update.get("epochs", 1) == theirs["critic.ppo_epochs"]
    assert update.get("aggregate", "token-mean") == theirs["critic.loss_agg_mode"]


def test_a_validation_samples_at_its_temperature_whatever_do_sample_says() -> None:
    """verl 0.9.1's agent loop reads temperature, top_p and top_k alone (trainer/ppo/v1/agent_loop_tq.py)."""
    theirs, graph = case("validation_samples")
    rollout = graph["eval"]["nodes"]["rollout"]
    values = f"{ROLLOUT}.val_kwargs"
    assert rollout["temperature"] == theirs[f"{values}.temperature"] == 1.0
    assert rollout["top_p"] == theirs[f"{values}.top_p"]
    assert rollout["n"] == theirs[f"{values}.n"]


@pytest.mark.parametrize(("name", "steps"), [("warm_up_by_share", 0.1), ("warm_up_by_steps", 40)])
def test_a_warm_up_is_a_share_where_no_steps_are_given(name: str, steps: float) -> None:
    """Steps at 0 or below count for nothing (verl 0.9.1, engine/fsdp/transformer_impl.py)."""
    _, graph = case(name)
    assert graph["models"]["policy"]["optimizer"]["warmup_steps"] == steps


def test_a_reference_is_read_as_the_policy_is() -> None:
    theirs, graph = case("overrides_of_config")
    for name in ("policy", "ref"):
        assert graph["models"][name]["config"] == theirs["actor_rollout_ref.model.override_config"]
        assert graph["models"][name]["trust_remote_code"] is True
    critic = verl(
        "algorithm.adv_estimator=gae",
        "data.trust_remote_code=True",
        "+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=8192",
        "+actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    )["models"]
    for name in ("policy", "critic"):
        assert critic[name]["config"] == {"max_position_embeddings": 8192}
        assert critic[name]["trust_remote_code"] is True


def test_veomnis_schedule_is_its_own() -> None:
    theirs, graph = case("veomni")
    assert (
        graph["models"]["policy"]["optimizer"]["schedule"]
        == theirs[f"{ACTOR}.optim.lr_scheduler_type"]
        == "cosine"
    )


@pytest.mark.parametrize(
    ("metric", "reads"),
    [("acc", None), ("score", None), ("reward", "overlong"), ("seq_reward", "overlong"), (None, "overlong")],
)
def test_groups_are_compared_with_the_penalty_where_verl_has_it_in(
    metric: str | None, reads: str | None
) -> None:
    given = [] if metric is None else [f"algorithm.filter_groups.metric={metric}"]
    filtered = ("algorithm.filter_groups.enable=true", *given)
    assert RECORDED["defaults"]["algorithm.filter_groups.metric"] == "reward"
    for more in ((), ("algorithm.use_kl_in_reward=true",)):
        nodes = verl(*GRPO, *OVERLONG, *filtered, *more)["nodes"]
        assert nodes["informative"].get("in") == (None if reads is None else {"rewards": reads})


def test_a_fully_async_run_has_the_batch_of_what_happens_between_two_syncs() -> None:
    graph = verl(
        *GRPO,
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.optim.lr_warmup_steps=10",
        "async_training.require_batches=2",
        "async_training.trigger_parameter_sync_step=4",
        "async_training.staleness_threshold=0.5",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=4",
        "rollout.total_rollout_steps=51200",
        "actor_rollout_ref.hybrid_engine=False",
    )
    assert graph["nodes"]["prompts"]["batch"] == 32 * 2 * 4
    assert graph["nodes"]["update_policy"]["minibatches"] == 2 * 4
    assert graph["models"]["policy"]["optimizer"]["warmup_steps"] == 10 * 2  # the rate moves once per fetch
    assert graph["schedule"]["iterations"] == 51200 / 256
    assert graph["schedule"]["buffer"]["too_old"] == "correct"
    assert graph["pools"] == {"train": {"devices": 8}, "gen": {"devices": 4}}
    # verl's file of this trainer has bypass_mode: the ratio is to what sampled
    assert graph["nodes"]["update_policy"]["in"] == {"old_logprobs": "rollout_logprobs"}


@pytest.mark.parametrize(("threshold", "behind"), [(0, 0), (0.1, 1), (1, 1), (1.5, 2)])
def test_rows_are_as_far_behind_as_verl_lets_them(threshold: float, behind: int) -> None:
    pools = ("rollout.nnodes=1", "rollout.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=False")
    graph = verl(*GRPO, *pools, f"async_training.staleness_threshold={threshold}")
    assert graph["schedule"]["buffer"] == {"staleness": behind, "too_old": "correct"}


def test_one_step_off_makes_up_for_nothing_where_verl_does_not() -> None:
    ahead = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=2")
    imported = import_verl(None, [*GRPO, *ahead, f"{CORRECTION}.bypass_mode=False"])
    graph = graph_of(imported)
    assert graph["schedule"]["buffer"] == {"staleness": 1, "by": "batch"}
    assert graph["nodes"]["rollout_weights"] == {"op": "correction.tis", "floor": 1.0, "cap": 1.0}
    assert outcome(imported, "the weights")[0] == "hand"


def test_corrections_become_nodes() -> None:
    icepop = verl(*GRPO, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0")[
        "nodes"
    ]
    assert icepop["rollout_weights"] == {"op": "correction.mis", "level": "token", "low": 0.5, "high": 5.0}
    several = import_verl(
        None,
        [
            *GRPO,
            f"{CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'",
            f"{CORRECTION}.rollout_rs_threshold='0.5_2.0,2.5'",
        ],
    )
    nodes = graph_of(several)["nodes"]
    assert nodes["weights_1"]["op"] == "correction.tis"
    assert nodes["weights_2"]["in"] == {"weights": "weights_1"}
    assert (nodes["weights_2"]["kl"], nodes["weights_2"]["over"]) == ("k1", "token")
    assert nodes["weights_2"]["threshold"] == pytest.approx(-nodes["weights_2"]["least"])
    assert (nodes["rollout_weights"]["threshold"], nodes["rollout_weights"]["over"]) == (2.5, "max")
    assert outcome(several, f"{CORRECTION}.rollout_rs")[0] == "hand"  # what is rejected stays in the mean


def test_experts_and_hosts_of_an_engine() -> None:
    apart = import_verl(
        None, [*GRPO, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=8"]
    )
    assert "sglang" not in graph_of(apart)["models"]["policy"]["serve"]
    assert outcome(apart, f"{ROLLOUT}.expert_parallel_size")[0] == "hand"
    spanned = verl(*GRPO, f"{ROLLOUT}.tensor_model_parallel_size=16", "trainer.nnodes=2")
    assert spanned["models"]["policy"]["serve"]["sglang"]["hosts"] == 2


@pytest.mark.parametrize(("size", "shard"), [(-1, None), (4, 4), (8, None), (32, None)])
def test_a_copy_of_more_devices_than_there_are_is_of_all(size: int, shard: int | None) -> None:
    train = verl(*GRPO, f"{ACTOR}.fsdp_config.fsdp_size={size}", "trainer.n_gpus_per_node=8")["models"][
        "policy"
    ]["train"]
    assert train.get("shard") == shard


def test_micro_batches_of_rows_are_as_large_as_verls_of_tokens_at_most() -> None:
    long = ("data.max_prompt_length=1024", "data.max_response_length=3072")
    many = verl(*GRPO, *long, f"{ACTOR}.ppo_micro_batch_size_per_gpu=80")
    assert many["models"]["policy"]["train"].get("micro_tokens", 16384) == 16384
    few = verl(*GRPO, *long, f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    assert few["models"]["policy"]["train"]["micro_tokens"] == 2 * 4096
    longest = verl(*GRPO, "data.max_response_length=40000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    assert longest["models"]["policy"]["train"]["micro_tokens"] == 512 + 40000


def test_one_cause_is_said_once() -> None:
    uneven = import_verl(None, ["algorithm.adv_estimator=gae", "data.train_batch_size=100"])
    assert [o.key for o in uneven.outcomes if o.kind == "hand"] == [
        "the reward",
        f"{ACTOR}.ppo_mini_batch_size",
    ]


def test_a_reward_for_each_key_of_gdpo() -> None:
    keys = ("algorithm.gdpo_reward_keys=[accuracy,form]", "algorithm.gdpo_reward_weights=[1.0,0.5]")
    nodes = verl("algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4", FUNCTION, *keys)["nodes"]
    assert (nodes["rewards"]["key"], nodes["rewards_2"]["key"]) == ("accuracy", "form")
    assert (nodes["advantages"]["weight_2"], nodes["advantages"]["in"]) == (0.5, {"rewards_2": "rewards_2"})
    with pytest.raises(GraphError, match="gdpo compares rewards"):
        import_verl(None, ["algorithm.adv_estimator=gdpo", FUNCTION])


def test_the_optimizer_steps_in_host_memory_where_any_key_says_so() -> None:
    fraction = "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1"
    for key in (f"+{fraction}", f"{ACTOR}.fsdp_config.offload_policy=True"):
        assert verl(*GRPO, key)["models"]["policy"]["train"]["optimizer_offload"] is True


def test_one_teacher_is_a_graph() -> None:
    loss = "distillation.distillation_loss"
    given = (
        *GRPO[:1],
        "distillation.enabled=True",
        f"{loss}.loss_mode=k1",
        f"{loss}.use_policy_gradient=True",
        "+distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-32B",
    )
    graph = verl(*given, f"{loss}.use_task_rewards=False")
    assert graph["models"]["teacher"]["path"] == "Qwen/Qwen3-32B"
    assert graph["nodes"]["advantages"]["op"] == "advantage.distill"
    with pytest.raises(GraphError, match="there is a graph for loss_mode k1"):
        import_verl(None, given)


def test_several_teachers_score_the_rows_with_their_keys() -> None:
    loss, models = "distillation.distillation_loss", "+distillation.teacher_models"
    given = (
        *GRPO,
        "distillation.enabled=True",
        "distillation.teacher_key=task",
        f"{loss}.loss_mode=k1",
        f"{loss}.use_policy_gradient=True",
        f"{loss}.use_task_rewards=False",
        f"{loss}.loss_max_clamp=10.0",
        f"{models}.teacher_model.model_path=Qwen/Qwen3-4B",  # verl counts it not, beside others
        f"{models}.math-8b.model_path=Qwen/Qwen3-8B",
        f"{models}.math-8b.key=math",
        f"{models}.code.model_path=Qwen/Qwen3-32B",
    )
    with pytest.raises(GraphError, match=r"teacher_models\.code has no key"):
        import_verl(None, given)
    graph = verl(*given, f"{models}.code.key=code")
    nodes = graph["nodes"]
    assert graph["models"]["math_8b_teacher"] == {"path": "Qwen/Qwen3-8B", "frozen": True}
    assert {*graph["models"]} == {"policy", "math_8b_teacher", "code_teacher"}
    assert nodes["math_8b_logprobs"]["rows"] == {"by": "task", "is": "math"}
    assert nodes["code_logprobs"]["out"] == {"code_logprobs": "teacher_logprobs"}
    assert nodes["prompts"]["columns"]["task"]["type"] == "text"
    assert nodes["advantages"]["limit"] == 10.0
    assert nodes["update_policy"]["loss"]["clip_high"] == 0.2


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("kl", [(), ("algorithm.use_kl_in_reward=True",)])
def test_one_sample_per_prompt_is_the_reward_itself(estimator: str, kl: tuple[str, ...]) -> None:
    more = ("algorithm.filter_groups.enable=False", *OVERLONG)
    nodes = verl(f"algorithm.adv_estimator={estimator}", *more, *kl)["nodes"]
    assert nodes["rollout"]["n"] == 1
    assert nodes["advantages"]["whiten"] is (estimator == "reinforce_plus_plus_baseline")
    assert nodes["token_rewards"]["in"]["rewards"] == ("scored" if kl else "overlong")
    if kl:
        assert nodes["shaped"]["in"]["rewards"] == "overlong"


def test_one_sample_per_prompt_is_refused_where_verl_has_nothing_to_train_on() -> None:
    for estimator in ("rloo_vectorized", "grpo_passk"):
        Path("out.yaml").write_text(import_verl(None, [f"algorithm.adv_estimator={estimator}"]).graph())
        (problem,) = check_report(PlanRequest("out.yaml"))["problems"]
        assert "compares the samples of a prompt" in str(problem)


NEXT = "actor_rollout_ref.model.path=/models/Qwen3-Next-80B-A3B-Instruct"  # is not here


def test_rows_are_not_shared_where_a_family_can_not() -> None:
    sizes = ("data.max_prompt_length=1024", "data.max_response_length=3072", f"{ACTOR}.use_dynamic_bsz=True")
    given = (*GRPO, *sizes, NEXT, f"{ACTOR}.ppo_max_token_len_per_gpu=8192")
    imported = import_verl(None, [*given, f"{ACTOR}.ulysses_sequence_parallel_size=4"])
    train = graph_of(imported)["models"]["policy"]["train"]
    assert train.get("sequence_parallel", 1) == 1
    assert train["micro_tokens"] == 8192
    kind, text = outcome(imported, "models.policy.train.sequence_parallel")
    assert kind == "hand"
    assert "carry a state from token to token" in text
    dense = "actor_rollout_ref.model.path=Qwen/Qwen3-8B"
    shared = verl(*given, dense, f"{ACTOR}.ulysses_sequence_parallel_size=4")["models"]["policy"]["train"]
    assert (shared["sequence_parallel"], shared["micro_tokens"]) == (4, 4 * 8192)


MIXTURE = ("actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "trainer.nnodes=2")


def test_engines_that_share_experts_are_one() -> None:
    serve = verl(
        *GRPO,
        *MIXTURE,
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.data_parallel_size=4",
        f"{ROLLOUT}.expert_parallel_size=16",
    )["models"]["policy"]["serve"]
    assert serve["tensor_parallel"] == serve["sglang"]["expert_parallel"] == 16
    assert serve["sglang"] == {"expert_parallel": 16, "attention_replicas": 4, "hosts": 2}
    beside = import_verl(None, [*GRPO, *MIXTURE, f"{ROLLOUT}.data_parallel_size=4"])
    assert outcome(beside, f"{ROLLOUT}.data_parallel_size")[0] == "hand"
    assert graph_of(beside)["models"]["policy"]["serve"]["tensor_parallel"] == 2


def test_megatrons_sizes_are_taken_where_megatron_trains() -> None:
    sizes = [
        f"{ACTOR}.megatron.{name}_parallel_size" for name in ("expert_model", "context", "pipeline_model")
    ]
    kl = f"{ACTOR}.use_kl_loss=True"
    tokens = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=12288")
    given = (*GRPO, *MIXTURE, kl, *tokens, *(f"{key}=2" for key in sizes))
    models = verl(*given, "model_engine=megatron")["models"]
    for train in (models["policy"]["train"], models["ref"]["train"]):
        assert (train["expert_parallel"], train["sequence_parallel"]) == (2, 2)
    assert models["policy"]["train"]["micro_tokens"] == 2 * 12288
    idle = verl(*given, "model_engine=fsdp")["models"]["policy"]["train"]
    assert (idle.get("expert_parallel", 1), idle["micro_tokens"]) == (1, 12288)
    dense = import_verl(None, [*given, "model_engine=megatron", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"])
    assert outcome(dense, "models.policy.train.expert_parallel")[0] == "hand"
    graph_of(dense)


def test_images_need_a_hand() -> None:
    imported = import_verl(None, [*GRPO, "data.image_key=images"])
    assert outcome(imported, "images")[0] == "hand"
    assert "# - images" in imported.graph()


SFT = (
    "data.messages_key=messages",
    "optim.lr=1e-4",
    "model.path=Qwen/Qwen2.5-0.5B",
    "trainer.total_epochs=2",
)


def test_settings_of_the_sft_trainer_are_a_graph_that_imitates() -> None:
    graph = verl(*SFT, "data.max_length=2048", "optim.lr_warmup_steps_ratio=0.1")
    assert graph["nodes"]["examples"]["question"] == "messages"
    assert graph["nodes"]["examples"]["answer"] is None
    assert graph["nodes"]["examples"]["assistant_turns"] == "all"
    assert graph["nodes"]["examples"]["max_tokens"] == 2048
    assert graph["nodes"]["examples"]["batch"] == RECORDED["sft"]["data.train_batch_size"]
    assert graph["nodes"]["update_policy"]["loss"]["kind"] == "sft"
    optimizer = graph["models"]["policy"]["optimizer"]
    assert (optimizer["lr"], optimizer["warmup_steps"]) == (1e-4, 0.1)
    assert graph["schedule"]["epochs"] == 2
    old = import_verl(
        None, ["model.partial_pretrain=Qwen/Qwen2.5-0.5B", "data.prompt_key=q", "data.response_key=a"]
    )
    assert graph_of(old)["nodes"]["examples"]["answer"] == "a"
    assert outcome(old, "the defaults")[0] == "hand"


@pytest.mark.parametrize(
    "given",
    [
        ("data.path=x.parquet", "data.response_key=r"),
        ("model.path=x", "data.n_samples=8"),
        ("data.output_path=x", "actor_rollout_ref.model.path=y"),
    ],
)
def test_what_trains_nothing_is_refused(given: tuple[str, ...]) -> None:
    result = called(*given)
    assert result.exit_code == 1
    assert "which does not train" in result.output


def test_a_command_is_pasted_with_its_configs_name() -> None:
    ahead = called("--config-path=config", "--config-name=one_step_off_ppo_trainer.yaml", *GRPO)
    assert ahead.exit_code == 0
    assert "staleness: 1" not in ahead.output or "hybrid" not in ahead.output
    unknown = called("--config-name", "mine", *GRPO)
    assert (
        "--config-name = mine: the values of this file are not known here: give the file first"
        in unknown.output
    )
    Path("config").mkdir()
    Path("config/mine.yaml").write_text("data: {train_batch_size: 64}\n")
    assert "prompts.batch: 64" in called("--config-path=config", "--config-name=mine", *GRPO).output


def test_a_launch_script_is_read_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    lines = ["MODEL=Qwen/Qwen2.5-7B", "python3 -m verl.trainer.main_ppo --config-path=config \\"]
    lines += ["    algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.rollout.n=8 \\"]
    lines += ["    actor_rollout_ref.model.path=$MODEL trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l) $@"]
    script.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(
        main, ["import", "verl", str(script), "data.max_prompt_length=256", "-o", "o.yaml"]
    )
    assert result.exit_code == 0, result.output
    graph = compose("o.yaml").plain()
    assert graph["models"]["policy"]["path"] == "Qwen/Qwen2.5-7B"
    assert (graph["nodes"]["prompts"]["batch"], graph["nodes"]["prompts"]["max_prompt_tokens"]) == (64, 256)
    assert "trainer.n_gpus_per_node" in result.output.split("to do by hand")[-1]


def test_torchrun_says_on_how_many_devices_a_model_is_tuned(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    lines = ["torchrun --standalone --nnodes=2 --nproc_per_node 8 -m verl.trainer.sft_trainer \\"]
    lines += ["    engine.fsdp_size=16 trainer.n_gpus_per_node=1 " + " ".join(SFT)]
    script.write_text("\n".join(lines) + "\n")
    result = called(str(script), "-o", "sft.yaml")
    assert result.exit_code == 0, result.output
    graph = compose("sft.yaml").plain()
    assert graph["pools"]["main"]["devices"] == 16
    assert "shard" not in graph["models"]["policy"]["train"], "a copy is of all devices"
