"""`rlgraph import prime-rl`: TOML files and flags become graphs that check."""

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
from rlgraph.importing.importer import Imported
from rlgraph.importing.prime_rl import CONVERTERS, import_prime_rl
from rlgraph.importing.table import table_of
from rlgraph.request import PlanRequest

EXAMPLES = Path(__file__).parent / "imported"
ROOT = Path(__file__).parents[2]
FIELDS = json.loads((EXAMPLES / "prime_rl_fields.json").read_text())["fields"]
RL = ("--max-steps", "9", "--orchestrator.group-size", "8", "--trainer.model.name", "Qwen/Qwen3-4B")
ALGORITHM = "--orchestrator.algo.type"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "prime_rl.toml", tmp_path)
    monkeypatch.chdir(tmp_path)


def graph(*words: str) -> dict[str, Any]:
    return graph_of(import_prime_rl((*RL, *words)))


def outcome(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = (o for o in imported.outcomes if o.key == key)
    return found.kind, found.text


def test_a_file_becomes_a_graph_that_checks(golden: Callable[[str, str], None]) -> None:
    result = CliRunner().invoke(main, ["import", "prime-rl", "@", "prime_rl.toml", "-o", "out.yaml"])
    assert result.exit_code == 0, result.output
    golden("import/prime_rl.yaml", Path("out.yaml").read_text())
    golden("import/prime_rl.txt", result.output)
    assert not check_report(PlanRequest("out.yaml"))["problems"]


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_every_field_of_their_classes_has_a_row_with_its_default(kind: str) -> None:
    """The fields and defaults of RLConfig and SFTConfig, at the commit that the file names."""
    table, fields = table_of("prime_rl", kind), FIELDS[kind]
    assert len(fields) > 290
    assert [key for key in fields if table.row(table.renamed(key)) is None] == []
    wrong = {}
    for key, default in fields.items():
        row = table.rows.get(table.renamed(key))
        is_own = table.renamed(key) == key or kind == "sft"
        is_known = default not in (None, "...")
        if row is not None and is_own and is_known and "default" in row.entry and row.default != default:
            wrong[key] = (row.default, default)
    assert wrong == {}


def test_the_table_names_converters_that_there_are() -> None:
    for section in table_of("prime_rl").facts["sections"].values():
        for key, says in section.items():
            assert sum(word in says for word in ("to", "shape", "same")) <= 1, key
            assert any(word in says for word in ("to", "shape", "same", "hand", "none")), key
            assert says.get("by", "natural") in CONVERTERS, key
            assert "hand" in says or "none" in says or "only" not in says, key


def test_the_page_has_the_table(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs/from_prime_rl.md"
    head, mark, _ = page.read_text().partition("\n## Every key\n")
    text = f"{head}{mark}" + "\n".join(table_of("prime_rl").markdown()) + "\n"
    if request.config.getoption("--bless"):
        page.write_text(text)
    assert mark
    assert page.read_text() == text


def test_batches_count_samples_and_prompt_and_response_share_a_bound() -> None:
    nodes = graph("--orchestrator.batch-size", "256", "--seq-len", "4096")["nodes"]
    assert (nodes["prompts"]["batch"], nodes["rollout"]["n"]) == (32, 8)
    assert (nodes["rollout"]["max_total_tokens"], nodes["rollout"]["max_new_tokens"]) == (4096, 4095)
    shorter = graph("--orchestrator.train.sampling.max-completion-tokens", "512")["nodes"]["rollout"]
    assert (shorter["max_total_tokens"], shorter["max_new_tokens"]) == (2048, 512)
    served = graph("--seq-len", "8192", "--inference.vllm.max-model-len", "4096")["nodes"]["rollout"]
    assert served["max_total_tokens"] == 4096


def test_a_batch_of_tokens_is_said() -> None:
    imported = import_prime_rl((*RL, "--orchestrator.token-batch-size", "100000"))
    assert outcome(imported, "orchestrator.token_batch_size")[0] == "hand"
    graph_of(imported)


def test_the_default_loss() -> None:
    nodes = graph("--trainer.loss.kl-tau", "0.004", "--trainer.loss.dppo-mask-high", "0.3")["nodes"]
    update = nodes["update_policy"]
    assert update["loss"] == {"kind": "dppo_tv", "limit": 0.2, "limit_high": 0.3, "cap": 1e9}
    assert update["in"] == {"old_logprobs": "rollout_logprobs", "ref_logprobs": "rollout_logprobs"}
    assert (update["kl"], update["kl_coef"], update.get("aggregate", "token-mean")) == (
        "k2",
        0.008,
        "token-mean",
    )
    assert nodes["advantages"] == {"op": "advantage.grpo", "scale": False, "rows": "informative"}
    assert "ref_logprobs" not in nodes
    without = graph("--trainer.loss.kl-tau", "0", "--orchestrator.train.filter-zero-advantages", "false")[
        "nodes"
    ]
    assert "kl_coef" not in without["update_policy"]
    assert "informative" not in without
    scaled = graph("--trainer.loss.adv-tau", "2")["nodes"]
    assert scaled["scaled"] == {"op": "reward.scale", "factor": 2.0}


@pytest.mark.parametrize("kind", ["ipo", "custom"])
def test_another_loss_needs_a_hand(kind: str) -> None:
    imported = import_prime_rl((*RL, "--trainer.loss.type", kind, "--trainer.loss.ipo-threshold", "0.05"))
    assert outcome(imported, "trainer.loss.ipo_threshold")[0] == "hand"
    limit = graph_of(imported)["nodes"]["update_policy"]["loss"]["limit"]
    assert limit == (0.05 if kind == "ipo" else 0.2)


@pytest.mark.parametrize(
    ("name", "more", "op"),
    [
        ("grpo", (), "advantage.grpo"),
        ("max_rl", (), "advantage.maxrl"),
        ("rae", ("--orchestrator.algo.decay", "0.8"), "advantage.running"),
        ("echo", ("--orchestrator.algo.roles.user.alpha", "0.3"), "advantage.grpo"),
        ("opd", ("--orchestrator.algo.teacher.name", "Qwen/Qwen3-8B"), "advantage.distill"),
        ("opsd", (), "advantage.distill"),
        ("hierarchical_grpo", (), "advantage.grpo"),
    ],
)
def test_algorithms(name: str, more: tuple[str, ...], op: str) -> None:
    made = graph(ALGORITHM, name, *more)
    assert made["nodes"]["advantages"]["op"] == op
    if name == "rae":
        assert made["nodes"]["advantages"]["decay"] == 0.8
    if name == "echo":
        assert made["nodes"]["predict"]["weight"] == 0.3
    if name == "opd":
        assert made["models"]["teacher"]["path"] == "Qwen/Qwen3-8B"


def test_a_frozen_model_that_generates_is_imitated() -> None:
    made = graph(ALGORITHM, "sft", "--orchestrator.algo.sampling.source.name", "Qwen/Qwen3-8B")
    assert made["nodes"]["rollout"]["model"] == "teacher"
    assert made["nodes"]["update_policy"]["loss"] == {"kind": "sft"}
    assert "buffer" not in made["schedule"]


def test_an_algorithm_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(GraphError, match="no graph for this algorithm"):
        import_prime_rl((*RL, ALGORITHM, "grop"))


def test_groups_of_one_have_no_advantage_and_are_said() -> None:
    imported = import_prime_rl((*RL[:2], *RL[4:]))
    assert "trains nothing" in outcome(imported, "orchestrator.group_size")[1]
    assert graph_of(imported)["nodes"]["rollout"]["n"] == 8


def test_generation_has_its_own_devices_and_streams() -> None:
    made = graph("--deployment.num-infer-gpus", "6", "--orchestrator.max-off-policy-steps", "3")
    assert made["pools"] == {"main": {"devices": 1}, "rollout": {"devices": 6}}
    assert made["schedule"]["buffer"] == {"too_old": "drop", "staleness": 3}
    assert made["models"]["policy"]["serve"]["pool"] == "rollout"
    nodes = ("--deployment.type", "multi_node", "--deployment.num-train-nodes", "2")
    split = ("--inference.deployment.type", "disaggregated", "--deployment.num-infer-replicas", "2")
    more = ("--inference.deployment.prefill-nodes-per-replica", "3")
    assert graph(*nodes, *split, *more)["pools"] == {"main": {"devices": 16}, "rollout": {"devices": 64}}


def test_optimizers_and_schedules() -> None:
    optimizer = graph("--trainer.optim.type", "muon", "--trainer.optim.mu", "0.9")["models"]["policy"][
        "optimizer"
    ]
    assert (optimizer["kind"], optimizer["momentum"], optimizer["betas"]) == ("muon", 0.9, [0.9, 0.95])
    for name in ("sgd", "sign_sgd"):
        imported = import_prime_rl((*RL, "--trainer.optim.type", name))
        assert outcome(imported, "trainer.optim.type")[0] == "hand"
        graph_of(imported)
    assert graph("--trainer.optim.max-norm", "None")["models"]["policy"]["optimizer"]["max_grad_norm"] == 0
    full = graph("--trainer.model.full-offload", "true")["models"]["policy"]
    assert full["optimizer"]["max_grad_norm"] == 0  # prime-rl turns clipping off with it
    assert full["train"]["optimizer_offload"] is True
    linear = ("--trainer.scheduler.type", "linear", "--trainer.scheduler.warmup-steps", "3")
    fall = graph(*linear, "--trainer.scheduler.decay-steps", "4")["models"]["policy"]["optimizer"]
    assert fall["warmup_steps"] == 3
    assert fall["lr"] == {"linear": [1e-6, 1e-14], "over": 3, "from": 6}  # the steps 6, 7, 8 and 9


def test_a_section_that_is_there_and_one_that_is_off() -> None:
    train = graph("--trainer.model.lora", "--no-trainer.model.ac", "--trainer.model.compile")
    policy = train["models"]["policy"]["train"]
    assert policy["lora"] == {"rank": 16, "alpha": 32.0, "targets": "all-linear"}
    assert (policy["recompute"], policy["compile"]) == (False, True)
    off = graph("--trainer.model.ac", "None")["models"]["policy"]["train"]
    assert off["recompute"] is False


def test_parts_in_files_of_their_own() -> None:
    Path("train.toml").write_text('[model]\nname = "m"\nseq_len = 1024\n[optim]\nlr = 3e-6\n')
    Path("orch.toml").write_text('max_steps = 7\nbatch_size = 64\ngroup_size = 16\n[model]\nname = "m"\n')
    Path("infer.toml").write_text("[vllm]\ntensor_parallel_size = 2\n")
    named = (
        "--trainer",
        "@",
        "train.toml",
        "--orchestrator",
        "@",
        "orch.toml",
        "--inference",
        "@",
        "infer.toml",
    )
    for words in (named, ("@", "train.toml", "@", "orch.toml", "infer.toml")):
        made = graph_of(import_prime_rl((*words, "--deployment.num-train-gpus", "2")))
        assert made["models"]["policy"]["path"] == "m"
        assert made["models"]["policy"]["optimizer"]["lr"] == 3e-6
        assert made["models"]["policy"]["serve"]["tensor_parallel"] == 2
        assert (made["nodes"]["prompts"]["batch"], made["nodes"]["rollout"]["max_total_tokens"]) == (4, 1024)
        assert made["schedule"]["iterations"] == 7


def test_the_model_of_one_part_is_the_policy() -> None:
    Path("orch.toml").write_text('max_steps = 7\nbatch_size = 64\ngroup_size = 16\n[model]\nname = "m"\n')
    assert graph_of(import_prime_rl(("@", "orch.toml")))["models"]["policy"]["path"] == "m"
    imported = import_prime_rl((*RL, "--orchestrator.model.name", "Qwen/Qwen3-4B-FP8"))
    assert outcome(imported, "orchestrator.model.name")[0] == "hand"
    assert graph_of(imported)["models"]["policy"]["path"] == "Qwen/Qwen3-4B"


def test_flags_count_more_than_files_and_are_numbers() -> None:
    words = ("@", "prime_rl.toml", "--trainer.optim.lr", "2e-6", "--orchestrator.eval.sampling.top-k=-1")
    imported = import_prime_rl((*words, "--trainer.scheduler.type", "cosine", "--no-trainer.model.lora"))
    policy = graph_of(imported)["models"]["policy"]
    assert policy["optimizer"]["lr"] == 2e-6
    assert policy["optimizer"]["schedule"] == "cosine"
    assert "lora" not in policy.get("train", {})


def test_sources_that_differ_are_said() -> None:
    sources = """
[[orchestrator.train.source]]
name = "a"
env = { taskset = { id = "one" } }
group_size = 4
[[orchestrator.train.source]]
name = "b"
env = { taskset = { id = "two" } }
"""
    Path("two.toml").write_text(f"max_steps = 3\n[orchestrator]\ngroup_size = 8\n{sources}")
    imported = import_prime_rl(("@", "two.toml"))
    assert "a, b" in outcome(imported, "orchestrator.train.source")[1]
    assert "differ" in outcome(imported, "orchestrator.train.source.group_size")[1]
    assert "one, two" in outcome(imported, "the environment")[1]
    graph_of(imported)


def test_sft_learns_every_turn() -> None:
    Path("sft.toml").write_text(
        'max_steps = 40\n[model]\nname = "m"\n[optim]\nlr = 2e-5\n'
        '[data]\nname = "some/set"\nseq_len = 4096\nbatch_size = 32\n'
    )
    imported = import_prime_rl(("@", "sft.toml"))
    made = graph_of(imported)
    examples = made["nodes"]["examples"]
    assert (examples["question"], examples["answer"], examples["assistant_turns"]) == (
        "messages",
        None,
        "all",
    )
    assert (examples["batch"], examples["max_tokens"]) == (32, 4096)
    assert outcome(imported, "data.name")[0] == outcome(imported, "the batch")[0] == "hand"
    assert made["models"]["policy"]["optimizer"]["lr"] == 2e-5


def test_images_are_said() -> None:
    imported = import_prime_rl((*RL, "--model.vlm.vision-encoder-attr", "model.visual"))
    assert "images" in outcome(imported, "model.vlm.vision_encoder_attr")[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [("a = [", "is not TOML"), ("[vllm]\nseed = 1\n", "train nothing"), (None, "No such file")],
)
def test_a_file_that_can_not_be_read_is_named(text: str | None, said: str) -> None:
    if text is not None:
        Path("bad.toml").write_text(text)
    with pytest.raises(GraphError, match=said):
        import_prime_rl(("@", "bad.toml"))
