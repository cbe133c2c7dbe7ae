"""`rlgraph import openrlhf`, `slime` and `miles`: flags and launch scripts become graphs that check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from imported_graph import graph_of
from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.importing.importer import Imported
from rlgraph.importing.openrlhf import CONVERTERS as openrlhf_converters
from rlgraph.importing.openrlhf import import_openrlhf
from rlgraph.importing.slime import CONVERTERS as slime_converters
from rlgraph.importing.slime import import_slime
from rlgraph.importing.table import table_of
from rlgraph.request import PlanRequest

EXAMPLES = Path(__file__).parent / "imported"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openrlhf_grpo.sh", "slime_grpo.sh", "slime_model.sh"):
        shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)


def openrlhf(*words: str, trainer: str | None = None) -> dict[str, Any]:
    return graph_of(import_openrlhf(words, trainer=trainer))


def slime(*words: str) -> dict[str, Any]:
    common = ("--hf-checkpoint", "Qwen/Qwen3-4B", "--rollout-batch-size", "32", "--num-rollout", "9")
    return graph_of(import_slime((*common, "--rollout-max-response-len", "1024", *words)))


def outcome(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = (o for o in imported.outcomes if o.key == key)
    return found.kind, found.text


@pytest.mark.parametrize("name", ["openrlhf_grpo", "slime_grpo"])
def test_a_launch_script_becomes_a_graph_that_checks(name: str, golden: Callable[[str, str], None]) -> None:
    args = ["import", name.partition("_")[0], f"{name}.sh", "-o", "out.yaml"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    golden(f"import/{name}.yaml", Path("out.yaml").read_text())
    golden(f"import/{name}.txt", result.output)
    assert not check_report(PlanRequest("out.yaml"))["problems"]


FLAGS = {
    "openrlhf": json.loads((EXAMPLES / "openrlhf_flags.json").read_text())["flags"],
    "slime": json.loads((EXAMPLES / "slime_flags.json").read_text())["flags"],
}


@pytest.mark.parametrize(
    ("table", "of", "kind"),
    [
        *(("openrlhf", kind, kind) for kind in ("ppo", "sft", "dpo", "rm")),
        ("slime", "slime", "rl"),
        ("slime", "miles", "rl"),
    ],
)
def test_every_flag_of_a_parser_has_a_row_with_its_default(table: str, of: str, kind: str) -> None:
    """The flags and defaults of the parsers themselves, at the commits that the files name."""
    known, flags = table_of(table, kind), FLAGS[table][of]
    assert len(flags) > 70
    assert [flag for flag in flags if known.row(known.renamed(flag)) is None] == []
    wrong = {}
    for flag, default in flags.items():
        row = known.rows.get(flag)
        if row is not None and "default" in row.entry and row.default != default:
            wrong[flag] = (row.default, default)
    if of == "miles":  # its own defaults of what is not read here
        wrong = {
            key: pair
            for key, pair in wrong.items()
            if key not in ("rollout-function-path", "data-source-path")
        }
    assert wrong == {}


@pytest.mark.parametrize("name", ["openrlhf", "slime"])
def test_a_table_names_converters_that_there_are(name: str) -> None:
    known = {"openrlhf": openrlhf_converters, "slime": slime_converters}[name]
    for section in table_of(name).facts["sections"].values():
        for key, says in section.items():
            assert sum(word in says for word in ("to", "shape", "same")) <= 1, key
            assert any(word in says for word in ("to", "shape", "same", "hand", "none")), key
            assert says.get("by", "natural") in known, key
            assert "hand" in says or "none" in says or "only" not in says, key


@pytest.mark.parametrize("name", ["openrlhf", "slime"])
def test_the_page_has_the_table(name: str, request: pytest.FixtureRequest) -> None:
    page = ROOT / f"docs/from_{name}.md"
    head, mark, _ = page.read_text().partition("\n## Every flag\n")
    text = f"{head}{mark}" + "\n".join(table_of(name).markdown()) + "\n"
    if request.config.getoption("--bless"):
        page.write_text(text)
    assert mark
    assert page.read_text() == text


def test_openrlhf_batches_count_samples_and_the_kl_stands_where_it_has_it() -> None:
    nodes = openrlhf(
        *("--rollout.batch_size", "256", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "128"),
        *("--train.max_epochs", "2", "--algo.kl.init_coef", "0.02", "--reward.model_name_or_path", "rm"),
    )["nodes"]
    assert nodes["update_policy"]["minibatches"] == nodes["update_critic"]["minibatches"] == 8
    assert nodes["update_policy"]["epochs"] == nodes["update_critic"]["epochs"] == 2
    assert nodes["shaped"] == {"op": "reward.kl_penalty", "beta": 0.02}  # k1 is the default of both
    assert nodes["update_critic"]["clip"] == 0.5
    assert nodes["advantages"]["lam"] == 1.0
    assert nodes["rewards"] == {"op": "reward.model", "model": "reward"}
    assert "kl_coef" not in nodes["update_policy"]


def test_openrlhf_normalises_by_group_before_it_takes_the_kl_off() -> None:
    group = ("--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "8")
    nodes = openrlhf(*group)["nodes"]
    assert nodes["normal"] == {"op": "reward.whiten", "mean": "group", "std": "group", "eps": 1e-9}
    assert nodes["shaped"] == {
        "op": "reward.kl_penalty",
        "beta": 0.01,
        "kl": "k1",
        "in": {"rewards": "normal"},
    }
    assert nodes["advantages"]["whiten"] is False
    without = openrlhf(*group, "--algo.kl.init_coef", "0")
    assert "ref" not in without["models"]
    assert without["nodes"]["advantages"] == {"op": "advantage.grpo"}


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("tis", {"rollout_weights": {"op": "correction.tis", "level": "token", "floor": 0.5, "cap": 5.0}}),
        ("icepop", {"rollout_weights": {"op": "correction.mis", "level": "token", "low": 0.5, "high": 5.0}}),
    ],
)
def test_openrlhf_corrections(kind: str, right: dict[str, Any]) -> None:
    enabled = "--algo.advantage.is_correction_enable"
    nodes = openrlhf(enabled, "--algo.advantage.is_correction_type", kind)["nodes"]
    assert {name: nodes[name] for name in right} == right


def test_openrlhf_leaves_sequences_out_by_their_geometric_mean() -> None:
    enabled = "--algo.advantage.is_correction_enable"
    nodes = openrlhf(enabled, "--algo.advantage.is_correction_type", "seq-mask-tis")["nodes"]
    assert nodes["weights"]["op"] == "correction.tis"
    assert nodes["weights"]["cap"] is None
    assert nodes["rollout_weights"]["threshold"] == pytest.approx(0.6931472)  # -log 0.5
    assert nodes["rollout_weights"]["least"] == pytest.approx(-1.6094379)  # -log 5


def test_openrlhf_prompt_and_response_share_one_bound() -> None:
    nodes = openrlhf("--data.max_len", "4096", "--rollout.max_new_tokens", "3000")["nodes"]
    assert nodes["rollout"]["max_total_tokens"] == 4096
    assert nodes["rollout"]["max_new_tokens"] == 3000
    assert nodes["prompts"]["max_prompt_tokens"] == 1096


def test_openrlhf_other_trainers_and_older_flags() -> None:
    reward = openrlhf("--pretrain", "m", "--learning_rate", "1e-5", "--train_batch_size", "64", trainer="rm")
    assert reward["models"]["reward"]["path"] == "m"
    assert reward["nodes"]["pairs"]["batch"] == 64
    dpo = openrlhf("--pretrain", "m", "--ref_pretrain", "r", "--beta", "0.2", trainer="dpo")
    assert dpo["models"]["ref"]["path"] == "r"
    assert dpo["nodes"]["preference"]["beta"] == 0.2
    assert "losses" not in dpo["nodes"]["preference"]
    sft = openrlhf("--pretrain", "m", "--input_key", "q", "--output_key", "a", trainer="sft")
    assert (sft["nodes"]["examples"]["question"], sft["nodes"]["examples"]["answer"]) == ("q", "a")
    old = openrlhf("--pretrain", "m", "--n_samples_per_prompt", "4", "--advantage_estimator", "rloo")
    assert old["models"]["policy"]["path"] == "m"
    assert old["nodes"]["rollout"]["n"] == 4


@pytest.mark.parametrize(
    ("flags", "losses"),
    [
        (("--model.ipo_enable",), {"ipo": {"kind": "ipo", "mean": False}}),
        (("--model.label_smoothing", "0.1"), {"sigmoid": {"kind": "sigmoid", "smoothing": 0.1}}),
        (("--ipo", "--label_smoothing", "0.1"), {"ipo": {"kind": "ipo", "mean": False}}),
    ],
)
def test_openrlhf_losses_of_pairs_become_the_graphs(flags: tuple[str, ...], losses: dict[str, Any]) -> None:
    graph = openrlhf("--pretrain", "m", *flags, trainer="dpo")
    assert graph["nodes"]["preference"]["losses"] == losses


def test_what_openrlhf_trains_on_images_is_said() -> None:
    imported = import_openrlhf(("--data.max_images_per_prompt", "1"))
    assert outcome(imported, "data.max_images_per_prompt")[0] == "hand"


def test_an_estimator_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(GraphError, match="no graph for this estimator"):
        import_openrlhf(("--algo.advantage.estimator", "gea"))
    with pytest.raises(GraphError, match="no graph for this estimator"):
        import_slime(("--advantage-estimator", "gppo"))


def test_slime_means_and_batches() -> None:
    nodes = slime("--n-samples-per-prompt", "8", "--global-batch-size", "64")["nodes"]
    assert nodes["update_policy"]["minibatches"] == 4
    assert nodes["update_policy"]["aggregate"] == "seq-mean-token-mean"
    group = ("--n-samples-per-prompt", "8")
    per_token = slime(*group, "--calculate-per-token-loss")["nodes"]["update_policy"]
    assert per_token["aggregate"] == "token-mean"
    assert slime(*group, "--disable-grpo-std-normalization")["nodes"]["advantages"]["scale"] is False
    assert slime(*group, "--num-steps-per-rollout", "2")["nodes"]["update_policy"]["minibatches"] == 2


def test_slime_puts_the_kl_where_it_is_said() -> None:
    group = ("--n-samples-per-prompt", "8", "--use-kl-loss", "--kl-loss-type", "low_var_kl")
    measured = slime(*group)["nodes"]["update_policy"]
    assert measured["in"] == {"watched_logprobs": "ref_logprobs"}
    term = slime(*group, "--kl-loss-coef", "0.01", "--use-unbiased-kl")["nodes"]["update_policy"]
    assert (term["kl_coef"], term["kl_unbiased"]) == (0.01, True)
    assert "kl" not in term  # k3 is ours, too
    ppo = slime("--advantage-estimator", "ppo", "--kl-coef", "0.02", "--normalize-advantages")["nodes"]
    assert ppo["shaped"]["beta"] == 0.02
    assert "whiten" not in ppo["advantages"]  # true by default
    assert slime("--advantage-estimator", "ppo")["nodes"]["advantages"]["whiten"] is False


def test_slime_losses_and_corrections() -> None:
    group = ("--n-samples-per-prompt", "8")
    gspo = slime(*group, "--advantage-estimator", "gspo", "--eps-clip", "3e-4")["nodes"]["update_policy"]
    assert gspo["loss"] == {"kind": "gspo", "clip": 3e-4, "clip_high": 3e-4}
    opsm = slime(*group, "--use-opsm", "--opsm-delta", "0.001")["nodes"]["update_policy"]
    assert opsm["off_policy_limit"] == 0.001
    tis = slime(*group, "--use-tis", "--tis-clip-low", "0.2")["nodes"]["rollout_weights"]
    assert tis == {"op": "correction.tis", "level": "token", "cap": 2.0, "floor": 0.2}
    sampled = slime(*group, "--use-rollout-logprobs")["nodes"]
    assert sampled["update_policy"]["in"]["old_logprobs"] == "rollout_logprobs"


def test_slime_engines_of_several_hosts_and_experts_with_adapters() -> None:
    engines = ("--n-samples-per-prompt", "8", "--actor-num-nodes", "2", "--rollout-num-gpus-per-engine", "16")
    serve = slime(*engines, "--colocate")["models"]["policy"]["serve"]
    assert (serve["tensor_parallel"], serve["sglang"]["hosts"]) == (16, 2)
    common = (
        "--hf-checkpoint",
        "Qwen/Qwen3-30B-A3B",
        "--expert-model-parallel-size",
        "8",
        "--lora-rank",
        "16",
    )
    assert outcome(import_slime(common), "expert-model-parallel-size")[0] == "hand"


def test_slime_sft_learns_every_turn() -> None:
    words = ("--loss-type", "sft_loss", "--prompt-data", "a.parquet", "--input-key", "messages")
    more = ("--global-batch-size", "128", "--num-epoch", "3", "--calculate-per-token-loss")
    graph = graph_of(import_slime((*words, *more, "--hf-checkpoint", "m")))
    examples = graph["nodes"]["examples"]
    assert (examples["question"], examples["answer"]) == ("messages", None)
    assert (examples["assistant_turns"], examples["batch"]) == ("all", 128)
    assert graph["schedule"]["epochs"] == 3


def test_what_a_script_does_not_say_stays_open_and_is_named() -> None:
    Path("run.sh").write_text("python train.py --hf-checkpoint $BASE/Qwen3-4B --lr $LR --colocate\n")
    imported = import_slime(("run.sh",))
    assert outcome(imported, "hf-checkpoint")[0] == outcome(imported, "lr")[0] == "hand"
    Path("out.yaml").write_text(imported.graph())
    assert compose("out.yaml").plain()["models"]["policy"]["path"] == "???"
    assert not any("${shell" in line for line in imported.graph().splitlines() if not line.startswith("#"))


def test_flags_of_miles_are_slimes_and_its_own() -> None:
    words = ("--n-samples-per-prompt", "8", "--lora-rank", "16", "--optimizer-cpu-offload")
    result = CliRunner().invoke(main, ["import", "miles", *words, "-o", "out.yaml"])
    assert result.exit_code == 0, result.output
    train = compose("out.yaml").plain()["models"]["policy"]["train"]
    assert train["lora"] == {"rank": 16, "alpha": 16.0, "targets": "all-linear"}
    assert "optimizer_offload" not in train
