"""What `check` accepts, runs: every shipped graph, and every shipped graph less one of its nodes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlgraph.errors import GraphError
from rlgraph.frontend.compose import compose
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.runtime.run import run_graph
from share import FAMILIES, families, rest_nightly

TINY = {
    "prompts.batch": "3",
    "prompts.template": "plain",
    "rollout.n": "2",
    "rollout.max_new_tokens": "3",
    "examples.batch": "4",
    "examples.template": "plain",
    "pairs.batch": "2",
    "pairs.template": "plain",
    "schedule.save_every": "0",
    "overlong.buffer": "1",
    "retry.max_new_tokens": "3",
    "update_policy.minibatches": "2",
    "wanted.refill": "false",
    "informative.refill": "false",  # of a model that gets nothing right no group differs: see test_refill.py
}
# these want a chat template
TEMPLATED = ("calculator_sft", "calculator_tool", "echo", "erl", "gagpo", "game", "sdft", "sdpo")
TEMPLATED += ("search_tool",)
# these metrics are null where nothing was measured: no call of a tool, no step of an update
NULL_WITHOUT_ROWS = ("tool_errors", "/grad_norm", "/lr")
SEARCH = {"rollout.tools.search.corpus": "train.jsonl", "rollout.tools.search.column": "question"}
ONE_STEP = ("dpo", "gpg", "kto", "opo", "orpo", "remax", "rloo", "simpo")  # per iteration


@pytest.fixture(autouse=True)
def _folder(demo_files: Path, tool_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("demo_tool_files").symlink_to(tool_files / "demo_tool_files")
    row = {"question": "12+34=", "answer": "it is #### 46", "chosen": "46", "rejected": "64", "label": True}
    row["golden_answers"] = ["46", "forty-six"]
    Path("train.jsonl").write_text(f"{json.dumps(row)}\n" * 5)


def tiny(graph: str) -> list[str]:
    """Settings under which a shipped graph is small."""
    tree = compose(graph)
    nodes = tree.items["nodes"].items
    small = {key: value for key, value in TINY.items() if key.split(".")[0] in {*nodes, "schedule"}}
    if graph in ONE_STEP:
        del small["update_policy.minibatches"]
    for source in {"prompts", "examples", "pairs"} & {*nodes}:
        if nodes[source].items["files"].value == "???":
            small[f"{source}.files"] = "[train.jsonl]"
    if graph == "demo_smollm":  # its questions are longer than the context of the tiny model
        small["prompts.files"] = small["eval.nodes.prompts.files"] = "[train.jsonl]"
    models = tree.items["models"].items
    given = [name for name, model in models.items() if str(model.items["path"].value)[0] != "$"]
    path = "demo_files/model"
    if graph in TEMPLATED:
        path = "demo_tool_files/model"
        small = {key: value for key, value in small.items() if not key.endswith(".template")}
    small.update({f"models.{name}.path": path for name in given})
    small.update(SEARCH if graph == "search_tool" else {})
    return [f"{key}={value}" for key, value in small.items()]


def runs(graph: str, settings: list[str], run_dir: str) -> dict[str, float]:
    """One iteration; its metrics."""
    run_graph(graph, settings, 1, steps=1, inline=True, run_dir=Path(run_dir))
    lines = Path(run_dir, "metrics.jsonl").read_text().splitlines()
    return dict(json.loads(lines[-1]))


@pytest.mark.parametrize("graph", families())
def test_a_shipped_graph_runs(graph: str) -> None:
    values = runs(graph, tiny(graph), "run")
    assert values["step"] == 1
    unmeasured = {name for name, value in values.items() if value is None}
    assert not [name for name in unmeasured if not name.endswith(NULL_WITHOUT_ROWS)]
    assert all(math.isfinite(value) for value in values.values() if value is not None)
    trained = "reward" if graph == "reward_model" else "policy"
    assert Path(f"run/models/{trained}/config.json").is_file()


LESS = [(graph, node) for graph in shipped_graphs() for node in compose(graph).items["nodes"].items]


# without its update a graph only generates, and says so; but for the two whose `restrained` reads it, for
# those that generate ahead of it, for those that another loss joins, and for those whose teacher follows it
NEEDED = (
    "clip_cov",
    "kl_cov",
    "decoupled_ppo",
    "proximal_approx",
    "vespo",
    "chord",
    "distill_reward",
    "echo",
    "sdft",
    "sdpo",
)
DISPENSABLE = {(graph, "update_policy") for graph in shipped_graphs() if graph not in NEEDED}
DISPENSABLE |= {("ppo", "update_critic"), ("rm_ppo", "update_critic"), ("reward_model", "update_reward")}
DISPENSABLE |= {("chord", "imitate"), ("distill_reward", "distill"), ("echo", "predict")}
DISPENSABLE |= {("erl", "update_retry"), ("erl", "internalise"), ("game", "update_critic")}
DISPENSABLE |= {("sdft", "refresh"), ("sdpo", "refresh"), ("process_rewards", "steps")}
DISPENSABLE |= {("mopd", "rest_logprobs")}  # the others' rows are not trained on then: here, none is left

LESS_BY_DAY = ("grpo", "ppo", "dpo")  # those that run without a node; the others are like one of them


def is_of_the_day(graph: str, node: str) -> bool:
    """Whether every commit tries it: what is refused takes no time, a run takes some seconds."""
    if (graph, node) in DISPENSABLE:
        return graph in LESS_BY_DAY
    return graph in FAMILIES


@pytest.mark.parametrize(("graph", "node"), rest_nightly(LESS, is_of_the_day))
def test_without_one_node_it_is_refused_by_check_or_runs(graph: str, node: str) -> None:
    Path("less.yaml").write_text(f"graph: less\nextends: {graph}\nedits:\n  - remove: [{node}]\n")
    settings = [setting for setting in tiny(graph) if setting.split(".")[0] != node]
    if (graph, node) in DISPENSABLE:
        assert runs("less.yaml", settings, "run")["step"] == 1
        return
    with pytest.raises(GraphError) as caught:
        runs("less.yaml", settings, "run")
    assert all(problem.mark for problem in caught.value.problems)
    assert not Path("run").exists()
