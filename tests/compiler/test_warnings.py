"""What a graph likely does not mean: every graph under warned/ has a golden text, and edits that mend it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from rlgraph.api import load
from rlgraph.check import check_report
from rlgraph.cli.main import main
from rlgraph.compiler import Compilation
from rlgraph.errors import GraphError, Problem
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.lowering import lower_tree
from rlgraph.request import PlanRequest
from rlgraph.syntax.interpolate import interpolate
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.warnings.find import find_warnings

WARNED = Path(__file__).parent / "warned"
NAMES = sorted(path.stem for path in WARNED.glob("*.yaml"))
# each graph -> ways to mend it; one that the text proposes stands in it as it is here
MENDED = {
    "best_of_one_evaluation": ["set: {eval.every: 20}", "set: {eval.every: 0.5 epochs}"],
    "blind": ["replace: {rewards: {op: reward.math}}"],
    "changed_sampling": [
        "add: {rollout_weights: {op: correction.tis}}",
        "set: {rollout.repetition_penalty: 1.0, rollout.min_new_tokens: 0}",
        "set: {update_policy.in.old_logprobs: rollout_logprobs}, remove: [old_logprobs]",
    ],
    "changing_evaluation": [
        "set: {eval.nodes.rollout.max_new_tokens: 4}",
        "set: {eval.nodes.rollout.max_new_tokens: {steps: {1: 3, 20: 4}}}",
        "set: {eval.before: false}",
    ],
    "cut_sampling": ["set: {rollout.top_p: 1.0, rollout.top_k: 0}"],
    "dead_model": ["remove: [models.teacher]"],
    "dead_settings": ["remove: [models.ref.serve, models.ref.optimizer, eval.nodes.update_policy]"],
    "dropped": ["remove: [second]", "set: {advantages.in.rewards: second}, remove: [rewards]"],
    "dropped_by_a_setting": ["remove: [ref_logprobs, models.ref]", "set: {update_policy.kl_coef: 0.01}"],
    "idle_kl": ["set: {update_policy.kl: k2}", "set: {update_policy.kl: k3}"],
    "dropped_chain": [
        "remove: [shaped, ref_logprobs, rewards, models.ref]",
        "set: {advantages.in.rewards: shaped}, remove: [steps]",
    ],
    "endless": ["set: {rollout.min_new_tokens: 0}", "set: {rollout.max_new_tokens: 65}"],
    "greedy_evaluation": ["set: {eval.nodes.rollout.temperature: 1.0}"],
    "greedy_group": ["set: {rollout.temperature: 1.0}"],
    "long_interval": ["set: {schedule.save_every: 0}", "set: {schedule.save_every: 1 epoch}"],
    "long_interval_of_evaluations": ["set: {eval.every: 0}", "set: {eval.every: 30 min}"],
    "no_room": ["set: {prompts.max_prompt_tokens: 768}", "set: {rollout.max_total_tokens: 1280}"],
    "rising": ["set: {models.policy.optimizer.warmup_steps: 0.1}", "set: {schedule.iterations: 1251}"],
    "stale_clip": [
        "set: {update_policy.in.old_logprobs: old_logprobs, "
        "update_policy.loss.kind: decoupled_ppo, update_policy.loss.cap: 2.0}, "
        "add: {old_logprobs: {op: logprobs, model: policy}}",
        "set: {schedule.buffer.staleness: 1}",
    ],
    "too_long": ["set: {rollout.max_new_tokens: 32256}"],
    "too_long_prompts": ["set: {prompts.max_prompt_tokens: 31744}"],
    "unread_settings": [
        "remove: [models.policy.optimizer.cycles, models.policy.optimizer.min_lr_ratio], "
        "set: {models.policy.serve.sglang.request_timeout: 3000}",
        "set: {models.policy.optimizer.schedule: cosine, schedule.timeout: 5000}",
    ],
    "untrained": ["set: {models.ref.frozen: true}, remove: [models.ref.optimizer]"],
    "untrained_critic": ["add: {update_critic: {op: update.critic, model: critic}}"],
    "untrained_head": ["set: {models.reward.path: org/reward}"],
}


def warned(graph: str, *overrides: str) -> Sequence[Problem]:
    return Compilation(PlanRequest(graph, overrides, 1)).warnings


def edited(graph: str, *texts: str) -> list[Problem]:
    """The warnings of a graph with edits, each text written in one line as remedies are."""
    algorithm = load(graph)
    for word, content in (edit for text in texts for edit in yaml.safe_load(f"{{{text}}}").items()):
        algorithm = algorithm.edit(**{word: content})
    algorithm.check()
    written = algorithm.written()
    return find_warnings(written, lower_tree(interpolate(written), 1))


@pytest.mark.parametrize(
    ("graph", "node", "column"),
    [
        ("grpo", "update_policy", "rollout_logprobs"),
        ("grpo", "update_policy", "drawn"),
        ("erl", "update_retry", "retry_logprobs"),  # another rollout's rows than old_logprobs has
    ],
)
def test_a_remedy_of_a_stale_clip_has_the_columns_of_the_rows_that_it_is_for(
    graph: str, node: str, column: str
) -> None:
    edit = "set: {pools: {train: {devices: auto}, gen: {devices: auto}}, "
    edit += "schedule.buffer: {staleness: 2, by: batch}, "
    edit += f"{'rollout.out.rollout_logprobs: drawn, ' if column == 'drawn' else ''}"
    edit += f"update_policy.in.old_logprobs: {column if graph == 'grpo' else 'rollout_logprobs'}}}"
    remedies = [one.remedy for one in edited(graph, edit) if one.kind == "stale-clip"]
    assert any(f"set: {{{node}." in remedy for remedy in remedies)
    assert "stale-clip" not in {one.kind for one in edited(graph, edit, *remedies)}


def dead(graph: str, text: str) -> set[str]:
    return {problem.law.split("`")[1] for problem in edited(graph, text) if problem.kind == "dead"}


@pytest.mark.parametrize("name", NAMES)
def test_warned_graph(name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    text = "\n\n".join(problem.render() for problem in warned(f"{name}.yaml")) + "\n"
    golden(f"warnings/{name}.txt", text.replace(f"{graphs_folder()}/", "graphs/"))


@pytest.mark.parametrize(("name", "edit"), [(name, edit) for name in NAMES for edit in MENDED[name]])
def test_a_remedy_mends_its_graph(name: str, edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    assert edited(f"{name}.yaml", edit) == []


@pytest.mark.parametrize(
    "name", sorted({*NAMES} - {"blind", "dead_model", "dead_settings", "unread_settings", "untrained_head"})
)
def test_a_remedy_can_be_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    (problem,) = warned(f"{name}.yaml")
    remedy = problem.remedy.replace("and remove", "remove")
    assert all(edit.partition("}, ")[0].rstrip("}") in remedy for edit in MENDED[name][:1])


def test_every_golden_warning_has_its_graph() -> None:
    folder = Path(__file__).parent.parent / "golden" / "warnings"
    assert sorted(path.stem for path in folder.glob("*.txt")) == NAMES == sorted(MENDED)


def test_every_place_is_in_the_users_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    for name in NAMES:
        for problem in warned(f"{name}.yaml"):
            assert problem.mark is not None
            assert problem.mark.source.name == f"{name}.yaml", problem.render()


@pytest.mark.parametrize("name", shipped_graphs())
def test_shipped_graphs_have_no_warnings(name: str) -> None:
    assert warned(name) == []


# settings that decide nothing, by edits of a shipped graph
DEAD = [
    ("demo", "set: {models.ref.serve: {dtype: bfloat16}}", {"models.ref.serve"}),
    ("demo", "set: {models.ref.serve.pool: main, models.ref.serve.sglang.restarts: 1}", {"models.ref.serve"}),
    ("demo", "set: {models.policy.vocabulary: mine}", {"models.policy.vocabulary"}),
    ("demo_sft", "set: {models.policy.serve.max_rows: 8}, remove: [eval]", {"models.policy.serve"}),
    ("demo", "add: {eval.nodes.ref_logprobs: {temperature: 1.0}}", {"eval.nodes.ref_logprobs"}),
    ("grpo", "set: {update_policy.kl_coef: 0, update_policy.in.ref_logprobs: x}", {"nodes.update_policy.in"}),
    ("grpo", "add: {models.a: {path: b/c, frozen: true, serve: {engine: sglang}}}", {"models.a"}),
    ("grpo", "remove: [ref_logprobs], set: {update_policy.kl_coef: 0}", {"models.ref"}),
]  # fmt: skip
# attributes that an op reads only where another is not 0
DEAD += [
    ("grpo", "set: {update_policy.kl: k1, update_policy.kl_coef: 0}, remove: [ref_logprobs, models.ref]",
     {"nodes.update_policy.kl"}),
    ("grpo", "set: {advantages.scale: false, advantages.eps: 0.1}", {"nodes.advantages.eps"}),
    ("demo", "set: {eval.nodes.rollout.top_p: 0.9}", {"eval.nodes.rollout.top_p"}),
    ("remax", "set: {greedy.top_k: 5}", {"nodes.greedy.top_k"}),
]  # fmt: skip
# settings that look idle and are not
LIVE = [
    ("demo", "set: {models.policy.serve.max_rows: 65, models.policy.serve.dtype: float32}"),
    ("demo", "set: {models.policy.train.micro_tokens: 16384, models.policy.train.recompute: false}"),
    ("demo", "set: {eval.nodes.rollout.temperature: 1.0, eval.every: 10, eval.nodes.rollout.n: 8}"),
    ("demo", "set: {eval.nodes.prompts.files: [demo_files/train.parquet]}"),
    ("demo", "set: {update_policy.every: 1, update_policy.loss.clip: 0.2, schedule.keep: 2}"),
    ("demo", "set: {pools.main.devices: 1, models.policy.train.pool: main, models.policy.serve.pool: main}"),
    ("grpo", "set: {models.policy.optimizer.lr: {linear: [1.0e-5, 1.0e-6], over: 100}, seed: 0}"),
    ("demo", "set: {models.policy.config: {rope_parameters: {rope_type: default}}, "
     "models.ref.config: {rope_parameters: {rope_type: default}}}"),
    ("grpo", "set: {update_policy.minibatches: 1, update_policy.in.old_logprobs: old_logprobs}"),
    ("grpo", "set: {old_logprobs.keep: false, old_logprobs.temperature: 1.0, update_policy.minibatches: 1}"),
    ("grpo", "set: {update_policy.kl: k1, advantages.eps: 0.1, rollout.top_p: 0.9}"),
    ("grpo", "set: {update_policy.kl: k1, update_policy.kl_coef: {linear: [0.0, 0.1], over: 9}}"),
    ("grpo", "set: {update_policy.kl: k1, update_policy.kl_coef: '???'}"),
    ("demo", "set: {rollout.top_p: 0.9, eval.nodes.rollout.temperature: 0}"),
    ("dapo", "set: {informative.refill: {rounds: 10, expected: 1.0, over_sample: 1.0}}"),
    ("distill", "set: {models.teacher.path: a/b, models.policy.vocabulary: v, models.teacher.vocabulary: v}"),
    ("calculator_tool", "set: {rollout.tools.calculator.kind: calculator}"),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "edit", "paths"), DEAD)
def test_dead_settings_are_found(graph: str, edit: str, paths: set[str]) -> None:
    assert dead(graph, edit) == paths


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("set: {eval.nodes.rollout.min_new_tokens: 300, eval.nodes.rollout.max_new_tokens: 256}", "(256)"),
        ("set: {rollout.max_new_tokens: {steps: {1: 8, 9: 16}}, "
         "eval.nodes.rollout: {min_new_tokens: 3, max_new_tokens: 16, n: 1, temperature: 0}}", ""),
        ("set: {rollout: {op: rollout.agent, model: policy, max_new_tokens: 99, max_turn_tokens: 9, n: 4, "
         "min_new_tokens: 9}}, add: {rollout_weights: {op: correction.tis}}", "`max_turn_tokens` (9)"),
        ("set: {models.policy.optimizer: {lr: 0.1, schedule: cosine, warmup_steps: 50, total_steps: 40}}",
         "the schedule has 40"),
        ("set: {models.policy.optimizer: {lr: 0.1, schedule: cosine, warmup_steps: 50, total_steps: 51}}",
         ""),
        ("set: {models.policy.optimizer.warmup_steps: 800}", "the run makes 800"),
        ("set: {models.policy.optimizer.warmup_steps: 0.9}", ""),
    ],
)  # fmt: skip
def test_what_leaves_no_room_is_said_with_its_limit(
    edit: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the demo's model may lie elsewhere, and has a context of its own
    laws = [problem.law for problem in edited("demo", edit)]
    assert len(laws) == bool(said) and all(said in law for law in laws)


@pytest.mark.parametrize(("graph", "edit"), LIVE)
def test_what_decides_something_is_not_dead(graph: str, edit: str) -> None:
    assert dead(graph, edit) == set()


def test_a_value_that_others_refer_to_is_not_dead(tmp_path: Path) -> None:
    text = "graph: g\nextends: grpo\nedits:\n  - add: {models.base: {path: a/b, frozen: true}}\n"
    path = tmp_path / "g.yaml"
    path.write_text(text)
    assert [problem.kind for problem in warned(str(path))] == ["dead"]
    path.write_text(f'{text}  - set: {{models.policy.path: "${{models.base.path}}"}}\n')
    assert warned(str(path)) == []


def test_what_an_evaluation_reports_is_not_dropped() -> None:
    assert edited("demo", "add: {length: {op: reward.exact}}, set: {eval.report.second: length}") == []


def test_a_course_of_weights_changes_no_evaluation_that_takes_all_rows() -> None:
    files = "files: {a: [a.parquet], b: [b.parquet]}"
    course = f"prompts.{files}, prompts.weights: {{a: {{linear: [1, 0], over: 9}}, b: 1}}"
    assert edited("demo", f"set: {{{course}, eval.nodes.prompts: {{{files}, batch: all}}}}") == []
    (warning,) = edited("demo", f"set: {{{course}, eval.nodes.prompts: {{{files}, batch: 64}}}}")
    assert warning.kind == "changing-evaluation" and "`prompts.weights.a`" in warning.law


def test_samples_of_one_greedy_response_are_legal() -> None:
    assert edited("demo", "set: {eval.nodes.rollout.temperature: 0}") == []
    assert edited("grpo", "set: {rollout.temperature: {linear: [1.0, 0.1], over: 100}}") == []


def test_a_target_critic_is_no_random_one() -> None:
    edit = "add: {models.target: {path: '${models.critic.path}', head: value, frozen: true}, "
    edit += (
        "copy: {op: update.copy, model: target, of: critic}, target_values: {op: values, model: target}}, "
    )
    edit += "set: {advantages.in: {rewards: shaped, values: target_values}}"
    assert "untrained" not in {problem.kind for problem in edited("ppo", edit)}
    assert [p.kind for p in edited("ppo", "remove: [update_critic]")] == ["untrained"]


def test_the_context_is_that_of_the_config(tmp_path: Path) -> None:
    shutil.copytree(graphs_folder(), tmp_path / "graphs")
    config = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert warned("grpo", f"models.policy.path={tmp_path}") == []
    (found,) = warned("grpo", f"models.policy.path={tmp_path}", "rollout.max_new_tokens=1025")
    assert found.kind == "context" and "has, 1,536" in found.law
    longer = ["models.policy.config={max_position_embeddings: 4096}"]
    longer += ["models.ref.config={max_position_embeddings: 4096}"]
    assert warned("grpo", f"models.policy.path={tmp_path}", "rollout.max_new_tokens=1025", *longer) == []
    assert warned("grpo", "models.policy.path=some/unknown", "rollout.max_new_tokens=10000000") == []


def test_check_prints_warnings_behind_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    result = CliRunner().invoke(main, ["check", "dropped.yaml"])
    verdict, empty, warning, *_ = result.stdout.splitlines()[1:]
    assert result.exit_code == 0
    assert verdict.endswith("steps per iteration, 1 warning")
    assert empty == "" and warning.startswith("dropped.yaml:4:11: warning: node `second`")


def test_strict_makes_errors_of_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    result = CliRunner().invoke(main, ["check", "dropped.yaml", "--strict"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("dropped.yaml:4:11: node `second`")
    assert CliRunner().invoke(main, ["check", "grpo", "--strict"]).exit_code == 0


def test_check_as_json_lists_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WARNED)
    report: dict[str, Any] = check_report(PlanRequest("dropped.yaml", devices=1))
    assert report["ok"] and report["problems"] == []
    assert [(w["kind"], w["grade"], w["line"]) for w in report["warnings"]] == [("dropped", "warning", 4)]
    strict = check_report(PlanRequest("dropped.yaml", devices=1), strict=True)
    assert not strict["ok"] and strict["warnings"] == []
    assert [(p["kind"], p["grade"], p["line"]) for p in strict["problems"]] == [("dropped", "error", 4)]


def test_plan_prints_warnings_beside_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(WARNED)
    result = CliRunner().invoke(main, ["plan", "dropped.yaml", "--format", "json"])
    assert json.loads(result.stdout)["graph"] == "dropped"
    assert "warning: node `second`" in result.stderr


def test_strict_makes_an_error_of_a_warning_only() -> None:
    with pytest.raises(GraphError) as caught:
        Compilation(PlanRequest("grpo", ["rollout.temperature=0"], 1)).warn(strict=True)
    assert {problem.grade for problem in caught.value.problems} == {"error"}
