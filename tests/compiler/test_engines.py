"""The registry of engines: each record is true, and it is the one place that knows an engine's name."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlgraph.compiler import Compilation, compile_graph
from rlgraph.engines.registry import EMBEDDED, REFUSED, SERVERS, SERVING, TRAINING, is_installed, takers
from rlgraph.ir.mesh import ON_ONE_DEVICE
from rlgraph.ir.plan import Target
from rlgraph.laws.views import is_changed
from rlgraph.printing.step_text import PATHS
from rlgraph.request import PlanRequest
from rlgraph.syntax.model_settings import Serve, SharedServe, Train

ROOT = Path(__file__).parents[2]
ENGINES, REGISTRY = ROOT / "runtime/engines", ROOT / "rlgraph/engines/registry.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
H100, MODEL = Target("h100-8"), "models.policy.path=Qwen/Qwen3-8B"
NAMES = {*SERVING, *TRAINING}
DISTRIBUTIONS = {  # ask which packages are installed, and some have an engine's name
    "runtime/doctor/checks.py",
    "runtime/doctor/doctor.py",
    "runtime/doctor/probes.py",
    "runtime/rundir/environment.py",
}


def strings(path: Path) -> Iterator[str]:
    """The string constants of a file, without its docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def product() -> Iterator[Path]:
    """The Python files of the product that belong to no engine."""
    for folder in ("rlgraph", "nodes", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any((ENGINES / name) in path.parents for name in NAMES):
                yield path


def test_no_other_file_names_an_engine() -> None:
    named = {str(path.relative_to(ROOT)) for path in product() if NAMES & {*strings(path)}}
    assert named - DISTRIBUTIONS == {str(REGISTRY.relative_to(ROOT))}


@pytest.mark.parametrize("name", SERVING)
def test_a_record_says_what_its_package_has(name: str) -> None:
    engine = SERVING[name]
    for target in filter(None, (engine.builder, engine.preflight)):
        assert defined(target, name)
    own = engine.settings.model_fields.keys() if engine.settings else set()
    assert engine.options.keys() - own <= SharedServe.model_fields.keys()
    assert own | {*engine.needs} <= engine.options.keys() and own >= {*engine.claims}
    if engine.settings:
        assert Serve.model_fields[name].annotation is engine.settings
    assert {*engine.paths} <= PATHS.keys()
    assert not engine.owned() or "options" in engine.options
    extras, packages = PROJECT["project"]["optional-dependencies"], PROJECT["tool"]["setuptools"]["packages"]
    assert not engine.module or name in extras, f"pyproject.toml has no extra `{name}`"
    package = f"rlgraph.runtime.engines.{name}"
    assert package in packages, f"the packages of pyproject.toml lack {package}"


@pytest.mark.parametrize("name", TRAINING)
def test_a_train_engine_takes_all_of_its_section(name: str) -> None:
    assert defined(TRAINING[name].builder, name)
    assert {*TRAINING[name].options} == Train.model_fields.keys() - {"engine", "pool", *ON_ONE_DEVICE}


@pytest.mark.parametrize("name", ["openai"])
def test_a_serving_engine_is_its_package_and_two_files(name: str) -> None:
    """What knows it: its package, the registry, and pyproject.toml, which lists packages."""
    assert {path for path in product() if name in {*strings(path)}} == {REGISTRY}
    assert not [path for path in product() if f"engines.{name}" in path.read_text()]
    assert f"engines.{name}" in (ROOT / "pyproject.toml").read_text()


JUDGED = """extends: grpo
edits:
  - set: {prompts.tokenizer: policy}
  - add: {models.judge: {path: some/judge, frozen: true, serve: SERVE}}
  - replace: {rewards: {op: reward.judge, model: judge}}
"""


def test_a_judge_behind_an_endpoint_has_no_weights_in_the_run(tmp_path: Path) -> None:
    plans = {}
    engines = {"here": "{engine: transformers}", "there": "{engine: openai, openai: {addresses: [AT]}}"}
    for name, serve in engines.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(JUDGED.replace("SERVE", serve).replace("AT", '"http://one:8000"'))
        plans[name] = compile_graph(str(path), ["models.judge.path=Qwen/Qwen3-8B", MODEL], target=H100)
    here, there = plans["here"], plans["there"]
    assert here.models["judge"].train and there.models["judge"].train is None
    syncs = {name: {step.node for step in plan.steps if step.kind == "sync"} for name, plan in plans.items()}
    assert syncs["here"] - syncs["there"] == {"sync:judge"}
    assert there.peak and here.peak
    held = [sum(plan.peak["main"].parts.values()) for plan in (there, here)]
    assert held[0] < held[1]
    assert not any("judge" in step.models for step in there.steps if step.kind in ("wake", "sleep", "load"))


def defined(target: str, engine: str) -> bool:
    """Whether a ``module:name`` is defined in an engine's package; it is not imported."""
    module, _, attribute = target.partition(":")
    name = attribute.partition(".")[0]
    path = ROOT / f"{module.removeprefix('rlgraph.').replace('.', '/')}.py"
    held = {getattr(node, "name", "") for node in ast.parse(path.read_text()).body}
    return ENGINES / engine in path.parents and name in held


def test_every_key_that_may_be_refused_has_an_engine_that_takes_it() -> None:
    assert all(SERVERS in takers(key) and EMBEDDED not in takers(key) for key in REFUSED)
    assert not any(is_changed(Serve(), key) for key in REFUSED)
    assert [key for key in REFUSED if is_changed(Serve(tensor_parallel=2), key)] == ["tensor_parallel"]


def test_the_embedded_engine_needs_nothing_beside_rlgraph() -> None:
    assert is_installed(EMBEDDED)


def test_options_of_an_engines_own_are_told_to_be_in_no_price() -> None:
    options = "models.policy.serve.sglang.options={stream_interval: 8, attention_backend: fa3}"
    said = "memory and time are planned without `models.policy.serve.sglang.options` "
    said += "(stream_interval, attention_backend)"
    assert said in compile_graph("grpo", [MODEL, options], target=H100).notes
    assert not any(
        "serve.sglang.options" in note for note in compile_graph("grpo", [MODEL], target=H100).notes
    )


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ((), 1800.0),
        (("schedule.timeout=600",), 300.0),
        (("models.policy.serve.sglang.request_timeout=9",), 9.0),
    ],
)
def test_a_second_try_of_a_sample_has_as_long_before_its_step_is_given_up(
    given: tuple[str, ...], seconds: float
) -> None:
    serve = (
        compile_graph("grpo", [MODEL, "models.policy.serve.engine=sglang", *given], 1).models["policy"].serve
    )
    assert serve and serve.request_timeout == seconds
    embedded = compile_graph("grpo", [MODEL, *given[:1]], 1) if "serve" not in "".join(given) else None
    assert embedded is None or embedded.models["policy"].serve.request_timeout is None


@pytest.mark.parametrize(("engine", "dead"), [("auto", False), ("transformers", True)])
def test_a_section_waits_for_its_engine_where_the_machine_chooses(engine: str, dead: bool) -> None:
    settings = (f"models.policy.serve.engine={engine}", "models.policy.serve.sglang.restarts=0")
    laws = [warning.law for warning in Compilation(PlanRequest("demo", settings)).warnings]
    assert any("`models.policy.serve.sglang` has no effect" in law for law in laws) is dead
