"""`rlgraph import`: settings of verl and of TRL become graphs that check, and every key is accounted for."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.importing.areal import CONVERTERS as areal_converters
from rlgraph.importing.importer import Imported
from rlgraph.importing.nemo_rl import CONVERTERS as nemo_rl_converters
from rlgraph.importing.options import Options, read_settings
from rlgraph.importing.table import table_of
from rlgraph.importing.trl import CONVERTERS as trl_converters
from rlgraph.importing.trl import import_trl
from rlgraph.importing.verl import CONVERTERS as verl_converters
from rlgraph.importing.verl import import_verl
from rlgraph.importing.verl_sft import CONVERTERS as sft_converters
from rlgraph.request import PlanRequest

EXAMPLES = Path(__file__).parent / "imported"
VERL = ("grpo", "ppo", "dapo", "rloo", "reinforce_pp", "remax", "multi_turn")
TRL = ("trl_grpo.py", "trl_rloo.yaml", "trl_dpo.yaml", "trl_sft.yaml")
ACTOR = "actor_rollout_ref.actor"
FUNCTION = "custom_reward_function.path=verl_reward.py"
OVERLONG = tuple(f"reward_model.overlong_buffer.{s}" for s in ("enable=true", "len=64", "penalty_factor=1.0"))
FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, ["import", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def arguments(example: str) -> list[str]:
    """What is typed behind `rlgraph import` for an example."""
    if example.startswith("trl"):
        trainer = example.partition("_")[2].partition(".")[0]
        return ["trl", example, "num_processes=8", *(["--trainer", trainer] if ".py" not in example else [])]
    return ["verl", *Path(f"{example}.txt").read_text().splitlines()]


def checked(imported: Imported) -> dict[str, Any]:
    """The composed graph, in which `check` finds nothing wrong and nothing to warn of."""
    Path("out.yaml").write_text(imported.graph())
    report = check_report(PlanRequest("out.yaml"))
    assert not report["problems"] + report["warnings"], report
    return dict(compose("out.yaml").plain())


def verl(*overrides: str) -> dict[str, Any]:
    return checked(import_verl(None, overrides))


def outcome(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = (o for o in imported.outcomes if o.key == key)
    return found.kind, found.text


@pytest.mark.parametrize("example", [*VERL, *TRL])
def test_an_example_becomes_a_graph_that_checks(example: str, golden: Callable[[str, str], None]) -> None:
    result = call(*arguments(example), "-o", "out.yaml")
    assert result.exit_code == 0, result.output
    graph = Path("out.yaml").read_text()
    golden(f"import/{example.partition('.')[0]}.yaml", graph)
    golden(f"import/{example.partition('.')[0]}.txt", result.output)
    report = check_report(PlanRequest("out.yaml"))
    assert not report["problems"] + report["warnings"], report


@pytest.mark.parametrize("example", [*VERL, *TRL])
def test_every_key_that_is_given_is_listed_once(example: str) -> None:
    kind, *rest = arguments(example)
    listed = call(kind, *rest, "-o", "out.yaml").output
    file = next((Path(r) for r in rest if "=" not in r and not r.startswith("-") and "." in r), None)
    given = read_settings(file if file and file.suffix == ".yaml" else None, [r for r in rest if "=" in r])
    for key in given:
        assert listed.count(f"  {key} = ") == 1 or key.startswith(("hydra.", "ray_kwargs.")), key


@pytest.mark.parametrize("estimator", table_of("verl").facts["estimators"])
def test_every_estimator_with_every_switch(estimator: str) -> None:
    kls = ((), ("algorithm.use_kl_in_reward=true",), (f"{ACTOR}.use_kl_loss=true",))
    extras = [(), FILTERED, OVERLONG, (FUNCTION,), (FUNCTION, *FILTERED, *OVERLONG)]
    if estimator == "gdpo":  # which has a reward for each key of what a function returns
        keys = ("algorithm.gdpo_reward_keys=[accuracy,form]", "algorithm.gdpo_reward_weights=[1.0,0.5]")
        extras = [(FUNCTION, *keys, *extra) for extra in ((), FILTERED)]
    for kl, extra in itertools.product(kls, extras):
        verl(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=4", *kl, *extra)


def test_a_loss_of_every_mode_and_every_mean() -> None:
    modes = table_of("verl").facts["losses"]
    means = (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    )
    for mode, mean in itertools.product(modes, means):
        grpo = (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            f"{ACTOR}.policy_loss.dro_beta=0.1",
        )
        graph = verl(*grpo, f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.loss_agg_mode={mean}")
        update = graph["nodes"]["update_policy"]
        assert update["loss"]["kind"] == modes[mode]["kind"]
        assert update.get("aggregate", "token-mean") == modes[mode].get("aggregate", mean)
        assert update.get("norm") == (512 if update["aggregate"] == "seq-mean-token-sum-norm" else None)


def test_verl_counts_mini_batches_in_prompts_and_learning_rates_in_iterations() -> None:
    sizes = ("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_epochs=2")
    graph = verl(*sizes, f"{ACTOR}.optim.lr_warmup_steps=10", "actor_rollout_ref.rollout.n=4")
    assert graph["nodes"]["update_policy"]["minibatches"] == 8
    assert graph["models"]["policy"]["optimizer"]["warmup_steps"] == 10 * 8 * 2
    uneven = import_verl(None, ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=64"])
    assert outcome(uneven, f"{ACTOR}.ppo_mini_batch_size")[0] == "hand"


def test_micro_batches_count_the_devices_that_share_a_row() -> None:
    shared = (f"{ACTOR}.ulysses_sequence_parallel_size=4", "trainer.n_gpus_per_node=8")
    tokens = verl(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000", *shared)
    assert tokens["models"]["policy"]["train"]["micro_tokens"] == 4000
    rows = verl(f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "data.max_response_length=1024", *shared)
    assert rows["models"]["policy"]["train"]["micro_tokens"] == 2 * (512 + 1024) * 4


def test_clip_ratio_alone_does_in_verl_what_it_does_here_nothing() -> None:
    imported = import_verl(None, [f"{ACTOR}.clip_ratio=0.1"])
    assert checked(imported)["nodes"]["update_policy"]["loss"]["clip"] == 0.2
    assert outcome(imported, f"{ACTOR}.clip_ratio")[0] == "hand"
    nulls = (f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.3")
    loss = verl(*nulls)["nodes"]["update_policy"]["loss"]
    assert (loss["clip"], loss["clip_high"]) == (0.1, 0.3)


def test_a_warm_up_of_the_critic_is_where_the_policy_begins() -> None:
    assert verl("trainer.critic_warmup=10")["nodes"]["update_policy"]["from"] == 10
    assert "from" not in verl("trainer.critic_warmup=0")["nodes"]["update_policy"]


def test_the_kl_stands_where_verl_has_it() -> None:
    rloo = ("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4")
    inside = verl(*rloo, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05")["nodes"]
    assert (inside["shaped"]["beta"], "kl_coef" in inside["update_policy"]) == (0.05, False)
    assert inside["advantages"]["in"] == {"rewards": "scored"}
    beside = verl(*rloo, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=mse")["nodes"]
    assert (beside["update_policy"]["kl"], "shaped" in beside) == ("k2", False)
    adaptive = verl("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")["nodes"]
    assert adaptive["shaped"]["beta"] == {"adaptive": 0.001, "target": 0.1, "horizon": 10000}
    assert verl()["nodes"]["shaped"]["beta"] == 0.0


def test_what_is_no_key_or_no_value_needs_a_hand() -> None:
    given = [
        f"{ACTOR}.kl_loss_coeff=0.1",
        "data.train_batch_sise=4",
        "data.max_prompt_length=$N",
        f"{ACTOR}.kl_loss_type=full",
    ]
    imported = import_verl(None, [*given, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_epochs=two"])
    for key in (
        f"{ACTOR}.kl_loss_coeff",
        "data.train_batch_sise",
        "data.max_prompt_length",
        f"{ACTOR}.kl_loss_type",
        f"{ACTOR}.ppo_epochs",
    ):
        assert outcome(imported, key)[0] == "hand"
    assert checked(imported)["nodes"]["prompts"]["max_prompt_tokens"] == 512
    with pytest.raises(GraphError, match="there is no graph for this estimator") as caught:
        import_verl(None, ["algorithm.adv_estimator=grpoo"])
    assert caught.value.problems[0].remedy == "did you mean `grpo`?"


def test_files_overrides_and_references_as_hydra_has_them() -> None:
    Path("c.yaml").write_text(
        "data: {max_prompt_length: 64, max_response_length: 32}\n"
        "trainer: {nnodes: 2, save_freq: 5, default_local_dir: 'c/${trainer.experiment_name}'}\n"
        "actor_rollout_ref: {rollout: {prompt_length: '${oc.select:data.max_prompt_length,512}',"
        " response_length: '${oc.select:no.such,${oc.select:data.max_response_length,1}}'}}\n"
    )
    settings = Options(
        table_of("verl"),
        read_settings(Path("c.yaml"), ["~trainer.nnodes", "+trainer.x=1", "trainer.save_freq=7"]),
    )
    assert (settings["trainer.nnodes"], settings["trainer.save_freq"]) == (1, 7)
    rollout = "actor_rollout_ref.rollout"
    assert [settings[f"{rollout}.{n}_length"] for n in ("prompt", "response")] == [64, 32]
    assert settings.values["trainer.default_local_dir"] == "c/${trainer.experiment_name}"


def test_paths_are_relative_to_the_graph() -> None:
    Path("sub").mkdir()
    assert call("verl", "grpo.txt=1", FUNCTION, "-o", "sub/g.yaml").exit_code == 0
    assert compose("sub/g.yaml").plain()["nodes"]["rewards"]["function"] == "../verl_reward.py:compute_score"
    assert not check_report(PlanRequest("sub/g.yaml"))["problems"]


def test_no_code_of_a_graph_is_loaded_where_it_is_refused() -> None:
    Path("out.yaml").write_text(import_verl(None, [FUNCTION]).graph())
    refused = CliRunner().invoke(main, ["check", "out.yaml", "--no-code"])
    assert "which --no-code does not load" in refused.output
    assert CliRunner().invoke(main, ["check", "out.yaml"]).exit_code == 0


def test_one_mean_for_loss_and_kl_is_told_where_verl_has_two() -> None:
    gspo = [
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.use_kl_loss=true",
    ]
    two = import_verl(None, [*gspo, f"{ACTOR}.loss_agg_mode=token-sum"], release="main")
    one = import_verl(None, [*gspo, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], release="main")
    assert [outcome(i, f"{ACTOR}.loss_agg_mode")[0] for i in (two, one)] == ["hand", "default"]


def test_trl_counts_batches_in_responses() -> None:
    sizes = ["per_device_train_batch_size=16", "num_processes=4", "gradient_accumulation_steps=2"]
    more = [
        "steps_per_generation=8",
        "num_generations=8",
        "num_iterations=2",
        "max_steps=100",
        "save_steps=16",
    ]
    imported = import_trl(Path("trl_grpo.py"), [*sizes, *more])
    graph = checked(imported)
    assert graph["nodes"]["prompts"]["batch"] == 16 * 4 * 8 // 8
    assert graph["nodes"]["update_policy"]["minibatches"] == 4
    assert graph["nodes"]["update_policy"]["epochs"] == 2
    assert (graph["schedule"]["iterations"], graph["schedule"]["save_every"]) == (13, 2)  # of 8 steps each


def test_a_rloo_of_several_steps_clips_the_ratio_of_responses() -> None:
    settings = ["steps_per_generation=4", "num_iterations=2"]
    imported = import_trl(Path("trl_rloo.yaml"), settings, trainer="rloo")
    checked(imported)
    update = imported.draft.value("nodes.update_policy")
    assert (update["minibatches"], update["epochs"]) == (2, 2)
    assert (update["loss"]["kind"], update["loss"]["level"]) == ("ppo_clip", "product")
    assert imported.draft.has("old_logprobs")


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from somewhere import lost
N = 4
def own(completions, solution, **kwargs):
    return [1.0] * len(completions)
open("ran", "w")
if own([], []) == []:
    args = GRPOConfig(num_generations=N, beta=0.0, learning_rate=10 ** -6)
    trainer = GRPOTrainer("model", args=args, reward_funcs=[own, accuracy_reward, lost])
"""


def test_a_script_is_read_and_not_run() -> None:
    Path("train.py").write_text(SCRIPT)
    imported = import_trl(Path("train.py"), ())
    nodes = checked(imported)["nodes"]
    assert not Path("ran").exists()
    assert nodes["rollout"]["n"] == 4
    assert nodes["prompts"]["columns"]["solution"] == {"type": "json"}
    assert {nodes[name]["function"] for name in ("own", "accuracy_reward", "lost")} == {"???"}
    assert outcome(imported, "learning_rate")[0] == "hand"
    assert sum(o.key.startswith("the reward ") and o.kind == "hand" for o in imported.outcomes) == 3


def test_settings_that_do_not_say_whose_they_are() -> None:
    result = call("trl", "trl_rloo.yaml")
    assert result.exit_code == 1
    assert "choose one, as in --trainer grpo" in result.output
    Path("empty.py").write_text("x = 1\n")
    assert "makes none of TRL's trainers" in call("trl", "empty.py").output
    assert "is not KEY=VALUE" in call("verl", "grpo.txt", "again.yaml").output


@pytest.mark.parametrize("name", ["verl", "verl_sft", "trl", "nemo_rl", "areal"])
def test_the_table_says_one_thing_of_each_key(name: str) -> None:
    words = {
        "default",
        "follows",
        "to",
        "words",
        "by",
        "shape",
        "if",
        "same",
        "only",
        "hand",
        "none",
        "note",
        "known",
        "texts",
    }
    known = {
        "verl": verl_converters,
        "verl_sft": sft_converters,
        "trl": trl_converters,
        "nemo_rl": nemo_rl_converters,
        "areal": areal_converters,
    }[name]
    for section in table_of(name).facts["sections"].values():
        for key, says in section.items():
            assert {*says} <= words, key
            assert sum(word in says for word in ("to", "shape", "same")) <= 1, key
            assert any(word in says for word in ("to", "shape", "same", "hand", "none")), key
            assert says.get("by", "natural") in known, key
            assert "hand" in says or "none" in says or not {"words", "only"} & {*says}, key


@pytest.mark.parametrize("name", ["verl", "trl", "nemo_rl", "areal"])
def test_the_page_has_the_table(name: str, request: pytest.FixtureRequest) -> None:
    page = Path(__file__).parents[2] / f"docs/from_{name}.md"
    head, mark, _ = page.read_text().partition("\n## Every key\n")
    tables = [table_of(name), *([table_of("verl_sft")] if name == "verl" else [])]
    text = f"{head}{mark}" + "\n".join(line for table in tables for line in table.markdown()) + "\n"
    if request.config.getoption("--bless"):
        page.write_text(text)
    assert mark
    assert page.read_text() == text
