"""Experts that a rollout tells are a column: who reads it, of what size, and what it takes."""

from __future__ import annotations

from pathlib import Path

from rlgraph.compiler import compile_graph
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.memory import Footprint
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.ir.plan import Plan, Target
from rlgraph.printing.column_text import lineage_text

MIXTURE = "models.policy.path=Qwen/Qwen3-30B-A3B"
ASKED = (MIXTURE, "prompts.files=[x.jsonl]", "rollout.routing=true", "old_logprobs.keep=true")


def reads(plan: Plan) -> set[str]:
    return {node for node, function in plan.functions["train"].items() if "routing" in function.ins}


def test_log_probs_and_update_of_the_policy_read_it_and_a_reference_does_not() -> None:
    plan = compile_graph("grpo", ASKED, 8)
    assert {*plan.functions["train"]} > reads(plan) == {"old_logprobs", "update_policy"}
    assert plan.models["policy"].serve and not plan.models["policy"].serve.options
    asked = compile_graph("grpo", [*ASKED, "ref_logprobs.in={routing: routing}"], 8)
    assert "ref_logprobs" in reads(asked)
    assert not reads(compile_graph("grpo", [MIXTURE, "prompts.files=[x.jsonl]"], 8))


def test_its_size_is_that_of_the_card_and_it_is_stored_in_two_bytes() -> None:
    said = lineage_text(compile_graph("grpo", ASKED, 8), "routing")
    whole = "routing: int64[samples, tokens, layers, k], layers = 48, k = 8, 768 bytes (int16) per token"
    assert said.splitlines()[0] == whole
    left_open = compile_graph("grpo", [*ASKED, "models.policy.path='???'"], 1).columns["train"]["routing"]
    assert (left_open.sizes, left_open.stored) == ((), "int16")


def test_memory_holds_it_for_the_tokens_of_a_pass() -> None:
    held = []
    for asks in ("true", "false"):
        plan = compile_graph("grpo", [*ASKED, f"rollout.routing={asks}"], 64, Target("h100-64"))
        footprint = Footprint(plan, load_cluster("h100-64"), workload(plan), sizes_of(plan))
        step = next(step for step in plan.steps if step.node == "update_policy")
        held.append({name: parts.total() for name, parts in footprint.passing(step).items()})
    train = plan.models["policy"].train
    assert train and {a - b for a, b in zip(*(h.values() for h in held), strict=True)} >= {
        768 * train.micro_tokens
    }


def test_servers_of_sglang_are_started_so_that_they_tell() -> None:
    asked = compile_graph("grpo", [*ASKED, "models.policy.serve.engine=sglang"], 8).models["policy"].serve
    assert asked and asked.options == {"enable_return_routed_experts": True}


def test_recorded_rows_have_it_where_the_graph_says_so(tmp_path: Path) -> None:
    columns = 'columns: {rewards: "float32[samples]", routing: "int64[samples, tokens, layers, k]"}'
    (tmp_path / "again.yaml").write_text(
        "graph: again\nextends: grpo\nedits:\n"
        f"  - replace: {{rollout: {{op: data.recorded, model: policy, run: runs/x, {columns}}}}}\n"
        "  - remove: [prompts, rewards]\n  - set: {models.policy.path: Qwen/Qwen3-30B-A3B}\n"
    )
    ratio = "update_policy.in={old_logprobs: rollout_logprobs}"
    plan = compile_graph(str(tmp_path / "again.yaml"), [ratio, "old_logprobs.keep=true"], 1)
    assert reads(plan) == {"update_policy"}
    assert plan.columns["train"]["routing"].sizes == (48, 8)


def test_the_graph_on_the_page_replays(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text(encoding="utf-8")
    graph = page.partition("graph: grpo_mixture")[2].partition("```")[0]
    (tmp_path / "mixture.yaml").write_text(f"graph: grpo_mixture{graph}")
    assert reads(compile_graph(str(tmp_path / "mixture.yaml"), (), 8)) >= {"old_logprobs", "update_policy"}
