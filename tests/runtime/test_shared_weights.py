"""A reference whose weights another model holds takes no memory of its own, and scores as one that does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Target
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
LORA = "set: {models.policy.train.lora: {rank: 2, alpha: 8}, update_policy.kl_coef: 0.1}"
TEACHER = "add: {models.teacher: {path: demo_files/model, frozen: true}}"
SCORES = "add: {teacher_logprobs: {op: logprobs, model: teacher}}"
DISTILL = "replace: {advantages: {op: advantage.distill}}"
DATA = "demo_files/train.parquet"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    shutil.copytree("demo_files/model", "same")


def graph(reference: str, *edits: str) -> str:
    """GRPO on the demo's model, with a reference that is read from a directory."""
    settings = [
        "set: {models.policy: {path: demo_files/model, optimizer: {lr: 3e-2}}, rollout.max_new_tokens: 8}",
        f"replace: {{prompts: {{op: data.prompts, files: [{DATA}], batch: 5, template: plain}}}}",
        f"set: {{rollout.n: 3, schedule.iterations: 3, models.ref.path: {reference}}}",
        f"set: {{rewards: {{op: '{HERE / 'ones_ops.py'}:ones'}}}}",
    ]
    body = "".join(f"  - {edit}\n" for edit in (*settings, *edits))
    Path("edited.yaml").write_text(f"graph: edited\nextends: grpo\nedits:\n{body}")
    return "edited.yaml"


def measured(reference: str, *edits: str) -> list[dict[str, float]]:
    run_dir = Path(f"run-{reference.replace('/', '-')}")
    run_graph(graph(reference, *edits), (), 1, inline=True, run_dir=run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "tokens/", "perf/"))}
        for line in lines
    ]


def test_a_policy_with_its_adapter_off_is_its_own_reference() -> None:
    shared = compile_graph(graph("demo_files/model", LORA))
    apart = compile_graph(graph("same", LORA))
    assert (shared.models["ref"].shares, apart.models["ref"].shares) == ("policy", "")
    one, two = measured("demo_files/model", LORA), measured("same", LORA)
    assert one == two
    assert one[-1]["update_policy/kl_ref"] > 0, "the policy has left its reference"


def test_frozen_models_of_the_same_weights_are_one() -> None:
    teaching = (TEACHER, SCORES, DISTILL, "set: {update_policy.kl_coef: 0.1}")
    shared, apart = (compile_graph(graph(path, *teaching)) for path in ("demo_files/model", "same"))
    assert {name for name, model in shared.models.items() if model.shares} == {"teacher"}
    assert not any(model.shares for model in apart.models.values())
    one, two = measured("demo_files/model", *teaching), measured("same", *teaching)
    assert one == two


def test_what_is_shared_takes_no_memory() -> None:
    target = Target("h100-8")
    shared = compile_graph(graph("demo_files/model", LORA), target=target)
    apart = compile_graph(graph("same", LORA), target=target)
    held = [plan.peak["main"].parts["weights"] for plan in (shared, apart)]
    assert held[0] < held[1]
