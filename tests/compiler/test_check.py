"""A check says the same on every machine: devices are those of the graph, of --devices or of --cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlgraph.api import load
from rlgraph.check import check_graph
from rlgraph.cli.main import main
from rlgraph.costs import detect
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.request import PlanRequest
from usual_settings import usual

FOUR = "models.policy.serve.tensor_parallel=4"
SIX_AND_FOUR = ("pools={train: {devices: 6}, gen: {devices: 4}}", "models.policy.serve.pool=gen")


def check(*args: str) -> Result:
    return CliRunner().invoke(main, ["check", *args])


@pytest.fixture(params=[(0, 1), (0, 2), (8, 64)], ids=["a core", "two cores", "eight GPUs"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A machine of so many GPUs and cores, as far as rlgraph can tell."""
    gpus, cores = request.param
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(detect, "_gpu_files", lambda: gpus)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(cores)})
    assert detect.local_devices() == (gpus or cores)
    return gpus, cores


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("dapo",), "dapo: ok, 15 steps per iteration"),
        (("dapo", FOUR), "dapo: ok, 15 steps per iteration on 4 devices in pool `main`"),
        (("decoupled_ppo", FOUR), "4 devices in pool `train`, 4 devices in pool `gen`"),
        (("grpo", "models.policy.train.shard=3", FOUR), "on 12 devices in pool `main`"),
        (("grpo", *SIX_AND_FOUR), "on 6 devices in pool `train`, 4 devices in pool `gen`"),
        (("grpo", *SIX_AND_FOUR, FOUR), "groups of `policy` (tensor_parallel: 4) begin at device 6"),
        (("grpo", "pools.main.devices=6", FOUR), "pool `main` has 6 devices, which `policy` can't share out"),
    ],
)
def test_the_verdict_is_that_of_every_machine(settings: tuple[str, ...], said: str) -> None:
    result = check(*settings, "prompts.files=[a.jsonl]")
    shown = result.output.rstrip()
    assert shown.endswith(said) if result.exit_code == 0 else said in shown, shown


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", shipped_graphs())
def test_every_shipped_graph_is_ok_on_every_machine(name: str) -> None:
    assert {*check_graph(PlanRequest(name))[0].pools.values()} == {2}
    assert load(name).check()


@pytest.mark.parametrize("command", ["check", "plan"])
def test_devices_that_pools_contradict(command: str, golden: Callable[[str, str], None]) -> None:
    result = CliRunner().invoke(main, [command, "grpo", *SIX_AND_FOUR, "--devices", "8"])
    assert result.exit_code == 1
    golden("check/devices_that_pools_contradict.txt", result.output)
    assert CliRunner().invoke(main, [command, "grpo", *SIX_AND_FOUR, "--devices", "10"]).exit_code == 0


def test_a_pool_that_is_smaller_than_what_is_asked_for_is_told_too() -> None:
    said = check("grpo", "pools.main.devices=4", "--devices", "8").output
    assert "have 4 devices (pools.main.devices: 4); 8 are asked for (--devices)" in said


@pytest.mark.slow
def test_a_check_takes_a_cluster() -> None:
    assert "on 8 devices in pool `main`" in check("grpo", "--cluster", "h100-8").stdout
    large = usual(["models.policy.path=Qwen/Qwen2.5-72B"])
    assert "does not fit" in check("grpo", "--cluster", "h100-8", *large).output
    both = check("grpo", "--cluster", "h100-8", "--devices", "8")
    assert (both.exit_code, "leave out --devices" in both.output) == (2, True)


def test_the_place_of_groups_is_the_line_that_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"graph: own\nextends: dapo\nedits:\n  - set: {{{FOUR.replace('=', ': ')}}}\n")
    assert f"{path}:4:" in check(str(path), "--devices", "6").output
