"""What is trained is saved before anything that comes behind it can end the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ran import metrics

from rlgraph.errors import RunError
from rlgraph.files import damaged, read_sums
from rlgraph.runtime.run import run_graph

ONE = str(Path(__file__).parent / "ones.yaml")
FEW = ("prompts.batch=2", "rollout.n=2", "schedule={iterations: 2, save_every: 0}", "eval.before=false")
FAILING = """
import sys
from pathlib import Path

from rlgraph.ops import Context, float32, op, samples


@op()
def unmeasured(rewards: float32[samples], *, how: str = "raise") -> float32[samples]:
    \"\"\"Fails, or exits.\"\"\"
    if how == "exit":
        sys.exit("enough")
    raise ValueError("this can't be measured")


@op()
def unmeasured_here(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    \"\"\"Fails on the device that has the first row.\"\"\"
    if 0 in ctx.rows:
        raise ValueError("this can't be measured")
    return rewards


@op()
def blocks(ctx: Context, rewards: float32[samples], *, file: str) -> float32[samples]:
    \"\"\"Rewards as they are; in the last iteration, a folder takes the place of a file of the run.\"\"\"
    if ctx.iteration == 1:
        path = Path(file)
        path.unlink(missing_ok=True)
        path.mkdir(exist_ok=True)
    return rewards


@op()
def renames(ctx: Context, rewards: float32[samples]) -> float32[samples]:
    \"\"\"Rewards as they are; in the last iteration, a metric changes its kind.\"\"\"
    ctx.record("reward/mean", [1.0], kind="sum" if ctx.iteration == 1 else "mean")
    return rewards
"""

TRACKER = """
class Tracker:
    def __init__(self, folder, graph): pass
    def log(self, values, step): pass
    def samples(self, name, rows, step): pass
    def close(self, failed): raise OSError("the disk is full")
"""


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None) -> None:
    Path("failing.py").write_text(FAILING)


def bad_evaluation(name: str, **attributes: str) -> tuple[str, ...]:
    rest = "".join(f", {key}: {value}" for key, value in attributes.items())
    return (f"eval.nodes.bad={{op: 'failing.py:{name}'{rest}}}", "eval.report={bad: bad}")


def assert_saved(run_dir: str, iteration: int = 2) -> None:
    """The last checkpoint is whole, there is a model, and the run can be resumed from it."""
    *_, checkpoint = sorted(Path(run_dir, "checkpoints").iterdir())
    assert checkpoint.name == f"step-{iteration:06d}"
    sums = read_sums(checkpoint)
    assert sums and not damaged(checkpoint, sums, sums)
    assert Path(run_dir, "models/policy/config.json").is_file()


def test_an_evaluation_that_exits_loses_nothing_and_is_named() -> None:
    with pytest.raises(RunError, match="SystemExit: enough"):
        run_graph(ONE, (*FEW, *bad_evaluation("unmeasured", how="exit")), 1, run_dir=Path("a"), inline=True)
    assert_saved("a")


@pytest.mark.slow
def test_an_evaluation_that_fails_on_one_worker_loses_nothing(run_on_devices: Callable[..., str]) -> None:
    settings = (*FEW, "--devices", "2", "--run-dir", "a")
    said = run_on_devices(ONE, *settings, *bad_evaluation("unmeasured_here"), expect=1)
    assert "this can't be measured" in said
    assert "iteration 2 was saved before this error ended the run" in said
    assert_saved("a")
    run_on_devices(
        ONE, *FEW, "schedule.iterations=3", "--devices", "2", "--run-dir", "a", "--resume", "--drop-settings"
    )
    assert metrics("a")[-1]["step"] == 3 and "eval/accuracy" in metrics("a")[-1]


@pytest.mark.slow
def test_an_evaluation_that_exits_on_workers_loses_nothing(run_on_devices: Callable[..., str]) -> None:
    settings = (*FEW, "--devices", "2", "--run-dir", "a")
    said = run_on_devices(ONE, *settings, *bad_evaluation("unmeasured", how="exit"), expect=1)
    assert "SystemExit: enough" in said
    assert_saved("a")


def test_an_evaluation_that_fails_in_a_resumed_run_loses_nothing() -> None:
    options = {"run_dir": Path("a"), "inline": True}
    run_graph(ONE, FEW, 1, steps=1, **options)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="this can't be measured"):
        run_graph(ONE, (*FEW, *bad_evaluation("unmeasured")), 1, resume=True, **options)  # type: ignore[arg-type]
    assert_saved("a")
    run_graph(ONE, (*FEW, "schedule.iterations=3"), 1, resume=True, keep_settings=False, **options)  # type: ignore[arg-type]
    assert metrics("a")[-1]["step"] == 3


@pytest.mark.parametrize(
    "file", ["samples/step-000002.jsonl", "samples/step-000002-eval.jsonl", "metrics.jsonl", "timeline.json"]
)
def test_a_file_that_can_not_be_written_loses_nothing(file: str) -> None:
    blocked = Path("a", file).resolve()
    with pytest.raises((RunError, OSError), match=blocked.name):
        run_graph(inserted("blocks", f", file: '{blocked}'"), FEW, 1, run_dir=Path("a"), inline=True)
    blocked.rmdir()
    assert_saved("a")


def test_metrics_that_can_not_be_added_up_lose_nothing() -> None:
    with pytest.raises(RunError, match="reward/mean"):
        run_graph(inserted("renames"), FEW, 1, run_dir=Path("a"), inline=True)
    assert_saved("a")


def inserted(name: str, attributes: str = "") -> str:
    """A graph with an op of ``failing.py`` behind the rewards."""
    edit = f"insert: {{odd: {{op: 'failing.py:{name}', on: rewards{attributes}}}}}"
    Path("odd.yaml").write_text(f"graph: odd\nextends: {ONE}\nedits:\n  - {edit}\n")
    return "odd.yaml"


@pytest.mark.slow
def test_a_reader_of_the_output_that_has_gone_loses_nothing() -> None:
    """As ``rlgraph run ... | head -2``: Python and rich make an error of it, and an exit."""
    command = [
        sys.executable,
        "-m",
        "rlgraph",
        "run",
        ONE,
        *FEW,
        "--devices",
        "1",
        "--inline",
        "--run-dir",
        "a",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout and run.stderr
        while not run.stdout.readline().startswith(b"  train sample 1"):  # of the last iteration
            pass
        run.stdout.close()
        said = run.stderr.read().decode()
    assert run.returncode, said
    assert_saved("a")


def test_trackers_that_fail_to_close_are_named_and_the_run_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("own.py").write_text(TRACKER)
    run_graph(ONE, FEW, 1, run_dir=Path("a"), inline=True, track=["own.py:Tracker"])
    said = capsys.readouterr().out
    assert "the tracker own.py:Tracker failed: OSError: the disk is full" in said
    assert_saved("a")
