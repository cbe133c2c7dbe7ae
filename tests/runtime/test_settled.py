"""A run on devices that it was not planned for is refused; servers start where the plan has room for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import GraphError, RunError
from rlgraph.frontend.compose import compose
from rlgraph.ir.actions import Kind, MoveEngine
from rlgraph.ir.plan import Plan, Target
from rlgraph.runtime.preflight import preflight
from rlgraph.runtime.rundir.changes import changes
from rlgraph.runtime.worker.engine_host import EngineHost
from rlgraph.runtime.worker.process_groups import Groups

H100 = Target("h100-8")
PREFLIGHT = "rlgraph.runtime.engines.sglang.preflight"
MODEL = "models.policy.path=demo_files/model"
FLOAT32 = "models.policy.serve.dtype=float32"


@pytest.mark.parametrize(("settings", "refused"), [([FLOAT32], True), ([], False)])
def test_sglang_in_float32_is_refused_on_cuda(
    demo_files: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], refused: bool
) -> None:
    monkeypatch.chdir(demo_files)
    monkeypatch.setattr(f"{PREFLIGHT}.find_spec", lambda name: name)  # as if it were installed
    settings = [MODEL, *settings]
    tree, plan = compose("demo", settings), compile_graph("demo", settings, target=H100)
    if not refused:
        preflight(plan, tree)
        return
    with pytest.raises(GraphError) as caught:
        preflight(plan, tree)
    assert [problem.kind for problem in caught.value.problems] == ["wrong-dtype"]
    assert "take no float32" in str(caught.value) and "serve.dtype=bfloat16" in str(caught.value)


def test_without_sglang_a_run_on_cuda_says_what_to_do(
    demo_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo_files)
    monkeypatch.setattr(f"{PREFLIGHT}.find_spec", lambda name: None)
    tree, plan = compose("demo", [MODEL]), compile_graph("demo", [MODEL], target=H100)
    with pytest.raises(GraphError, match=r"pip install 'rlgraph-compiler\[sglang\]'.*engine=transformers"):
        preflight(plan, tree)


def test_a_run_goes_on_where_it_began(tmp_path: Path) -> None:
    began, again = (compile_graph("grpo", target=target) for target in (None, H100))
    assert changes(tmp_path, began.fields, began) == []
    with pytest.raises(RunError, match="planned for cpu devices, and this is for cuda"):
        changes(tmp_path, began.fields, again)


class Recorder:
    """An engine that says which of its parts are away."""

    def __init__(self) -> None:
        self.away: set[str] = set()

    def offload(self, parts: tuple[str, ...]) -> None:
        assert not self.away & {*parts}
        self.away |= {*parts}

    sleep = offload

    def reload(self, parts: tuple[str, ...]) -> None:
        assert self.away >= {*parts}
        self.away -= {*parts}


def test_what_leaves_at_some_time_is_away_while_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server would find less memory than the plan has for it while it generates."""
    long = ("models.policy.path=Qwen/Qwen2.5-14B", "rollout.max_new_tokens=16384")
    plan = compile_graph("grpo", long, target=H100)
    leaves = moved(plan, "policy")
    assert leaves - {*plan.away.get("policy.train", ())}, "some part leaves that is there between iterations"
    started: list[set[str]] = []

    def served(engines: EngineHost, *_: Any) -> Recorder:
        started.append(set(engines.train["policy"].away))
        return Recorder()

    monkeypatch.setattr(EngineHost, "_trainer", lambda *_: Recorder())
    monkeypatch.setattr(EngineHost, "_served", served)
    mesh: Any = None
    engines = EngineHost(plan, "main", "cuda", Groups(mesh, {}, {}, {}), Path("logs"))
    assert started == [leaves]
    for name, engine in engines.train.items():
        assert engine.away == {*plan.away.get(f"{name}.train", ())}


def moved(plan: Plan, model: str) -> set[str]:
    """What leaves the devices of a model's train engine in an iteration."""
    moves = [step.action for step in plan.steps if isinstance(step.action, MoveEngine)]
    offloads = [move for move in moves if move.kind is Kind.OFFLOAD and move.model == model]
    return {part for move in offloads for part in move.parts}
