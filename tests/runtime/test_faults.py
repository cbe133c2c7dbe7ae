"""Workers that are lost at each kind of step, restarts, full disks, and numbers that are not finite."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ran import assert_gone, begun, holders, same_weights, wait_for

from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.reports.measured import read_metrics
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
ONE, TWO = str(HERE / "ones.yaml"), str(HERE / "ones_two.yaml")
OPS = HERE / "ones_ops.py"
SYNC = "sync policy@v from the train engine on pool train to the serve engine on gen[0], by broadcast"
OLD = "run old_logprobs (logprobs) with policy@v on train[0]"
UPDATE = "run update_policy (update.policy) with policy@v on train[0]"
POLICY = "run update_policy (update.policy) with policy@v on main[0-1]"
pytestmark = pytest.mark.usefixtures("in_demo")


def inline(graph: str, *settings: str, run_dir: str, steps: int | None = None, resume: bool = False) -> None:
    run_graph(graph, settings, 1, steps=steps, run_dir=Path(run_dir), resume=resume, inline=True)


def lines(run_dir: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A file of JSON lines, without what depends on wall time, and without the metrics of traps."""
    found = [json.loads(line) for line in Path(run_dir, name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time", "perf/", "trap_"))} for line in found]


def with_traps(graph: str, **pools: dict[str, int]) -> str:
    """The graph with a trap on each of some pools, for the functions that it runs from some iteration on."""
    folder = Path("sprung").resolve()
    folder.mkdir()
    edits = "".join(
        f"  - insert: {{trap_{pool}: {{op: '{OPS}:trapped', on: rewards, pool: {pool}, folder: '{folder}', "
        f"traps: {json.dumps(traps)}}}}}\n"
        for pool, traps in pools.items()
    )
    Path("trapped.yaml").write_text(f"graph: trapped\nextends: {graph}\nedits:\n{edits}")
    return "trapped.yaml"


@pytest.mark.slow
def test_a_worker_lost_in_a_rollout_and_one_in_an_update_are_replaced_and_change_no_weight(
    run_on_devices: Callable[..., str],
) -> None:
    graph, token = with_traps(TWO, gen={"rollout": 2}, train={"policy": 3}), uuid.uuid4().hex
    schedule = "schedule={iterations: 3, restarts: 2}"
    run_on_devices(graph, schedule, "eval.every=5", "--run-dir", "a", RLGRAPH_TEST_TOKEN=token)
    assert_gone(token)
    assert sorted(os.listdir("sprung")) == ["policy", "rollout"]
    assert [(note["after"], note["reason"].splitlines()[0]) for note in lines("a", "restarts.jsonl")] == [
        (2, "step 3 of iteration 3 failed on gen[0]: run rollout (rollout) with policy@v on gen[0]"),
        (2, f"step 10 of iteration 3 failed on train[0]: {UPDATE}"),
    ]
    inline(TWO, schedule, "eval.every=5", run_dir="b")
    assert lines("a") == lines("b")
    assert same_weights("a", "b")


@pytest.mark.nightly
def test_a_worker_lost_at_any_kind_of_step_is_replaced_and_changes_no_weight(
    run_on_devices: Callable[..., str],
) -> None:
    gen = {"prompts": 1, "rollout": 3, "EngineHost.receive": 4, "Worker.mean": 5}
    train = {"logprobs": 2, "policy": 6, "EngineHost.begin_save": 7}
    graph, token = with_traps(TWO, gen=gen, train=train), uuid.uuid4().hex
    schedule = "schedule={iterations: 7, restarts: 7}"
    text = run_on_devices(graph, schedule, "eval.every=5", "--run-dir", "a", RLGRAPH_TEST_TOKEN=token)
    assert_gone(token)
    assert sorted(os.listdir("sprung")) == sorted([*gen, *train])
    notes = lines("a", "restarts.jsonl")
    assert [(note["after"], note["reason"].splitlines()[0]) for note in notes] == [
        (0, "step 1 of iteration 1 failed on gen[0]: run prompts (data.prompts) on gen[0]"),
        (
            1,
            "step 7 of iteration 2 failed on train[0]: run old_logprobs (logprobs) with policy@v on train[0]",
        ),
        (3, "step 3 of iteration 4 failed on gen[0]: run rollout (rollout) with policy@v on gen[0]"),
        (4, f"step 2 of iteration 5 failed on gen[0]: {SYNC}"),
        (4, "`mean` in the evaluation after iteration 5 failed on gen[0]"),
        (5, f"step 10 of iteration 6 failed on train[0]: {UPDATE}"),
        (6, "`begin_save` after iteration 7 failed on train[0]"),
    ]
    assert "restart 7 of 7" in text
    inline(TWO, schedule, "eval.every=5", run_dir="b")
    assert lines("a") == lines("b")
    assert same_weights("a", "b")
    assert os.listdir("a/checkpoints") == ["step-000007"]


WORKER = "ray::Worker"
LOST = {
    "raylet": r"Ray's raylet on this machine \(process \d+\): its process is stopped \(SIGSTOP",
    "ray::Worker": r"`\w+` before the first iteration failed on main\[0\]\n  its worker is gone",
    "gcs_server": r"Ray's gcs_server on this machine \(process \d+\): its process has ended\n  there is no",
}


@pytest.mark.nightly
def test_a_worker_that_stops_while_it_starts_is_told_within_seconds() -> None:
    token = uuid.uuid4().hex
    with begun(ONE, "--devices", "1", "--run-dir", "a", RLGRAPH_TEST_TOKEN=token) as run:
        stopped = set[int]()
        wait_for(lambda: stopped.update(p for p, name in holders(token).items() if WORKER in name) or stopped)
        stopped_at = time.monotonic()
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        said, _ = run.communicate(timeout=200)
    assert run.returncode == 1
    law = r"worker.* on this machine \(process \d+\): its process is stopped \(SIGSTOP, or a "
    assert re.search(law, said), said
    assert time.monotonic() - stopped_at < 100, "schedule.timeout is 3600 s"
    assert_gone(token)


@pytest.mark.nightly
@pytest.mark.parametrize("process", LOST)
def test_what_is_lost_while_models_load_ends_the_run(process: str) -> None:
    token = uuid.uuid4().hex
    said = []
    with begun(ONE, "--devices", "1", "--run-dir", "a", RLGRAPH_TEST_TOKEN=token) as run:
        assert run.stdout
        for line in run.stdout:
            said.append(line)
            if line == "loading models\n":
                (lost,) = (
                    pid
                    for pid, name in holders(token).items()
                    if process in Path(name.partition("\0")[0]).name
                )
                os.kill(lost, signal.SIGSTOP if process == "raylet" else signal.SIGKILL)
    assert run.returncode == 1
    assert re.search(LOST[process], "".join(said))
    assert_gone(token)


@pytest.mark.slow
def test_a_lost_peer_breaks_a_collective_and_is_named(run_on_devices: Callable[..., str]) -> None:
    traps = {"policy": 2, "Worker.repartition": 3}
    graph, token = with_traps(ONE, main=traps), uuid.uuid4().hex
    settings = ("trap_main.first=false", "schedule={iterations: 4, restarts: 1}", "--devices", "2")
    text = run_on_devices(graph, *settings, "--run-dir", "a", expect=1, RLGRAPH_TEST_TOKEN=token)
    assert_gone(token)
    (note,) = lines("a", "restarts.jsonl")
    assert note["reason"].splitlines()[0].endswith(" of iteration 2 failed on main[1]: " + POLICY)
    assert "restart 1 of 1" in text
    (mark,) = [line for line in Path("a/failure.txt").read_text().splitlines() if line.startswith("!")]
    assert "repartition " in mark
    assert f"of iteration 3 failed on main[1]: {mark[7:]}" in text
    assert "1 restarts were used up" in text
    assert "the last checkpoint is that after iteration 2: continue with: rlgraph resume a" in text
    assert sorted(os.listdir("a/checkpoints")) == ["restart-000002"]
    assert not Path("a/models").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [pytest.param("Worker.repartition", marks=pytest.mark.nightly), "EngineHost.finish_save"]
)
def test_a_worker_that_stops_is_named_and_replaced(
    run_on_devices: Callable[..., str], workers: str, where: str
) -> None:
    graph, token = with_traps(ONE, main={where: 1}), uuid.uuid4().hex
    limit = 8 if workers == "processes" else 60  # Ray's have to start within it too
    schedule = f"schedule={{iterations: 2, restarts: 1, timeout: {limit}}}"
    settings = ("trap_main.first=false", "trap_main.kill=SIGSTOP", schedule, "--devices", "2")
    run_on_devices(graph, *settings, "--run-dir", "a", RLGRAPH_TEST_TOKEN=token)
    assert_gone(token)
    (note,) = lines("a", "restarts.jsonl")
    assert "main[1]" in note["reason"]
    assert "its process is stopped (SIGSTOP, or a debugger)" in note["reason"]


def not_finite(on_nan: str, loss: str = "infinite") -> tuple[str, ...]:
    return (
        f"update_policy.loss={{kind: '{OPS}:{loss}'}}",
        f"schedule={{iterations: 2, on_nan: {on_nan}}}",
        "models.policy.train.micro_tokens=64",
    )


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_or_ends_the_run() -> None:
    inline(ONE, *not_finite("null"), run_dir="skip")
    assert [line["update_policy/skipped"] for line in lines("skip")[1:]] == [1, 1]
    text = Path("skip/metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [line["update_policy/loss"] for line in lines("skip")[1:]] == [None, None]
    assert ["update_policy/loss" in line for line in read_metrics(Path("skip"))] == [False] * 3
    with pytest.raises(RunError, match="`update_policy`: a loss or gradient was not finite"):
        inline(ONE, *not_finite("stop"), run_dir="stop")
    assert not Path("stop/dumps").exists()


@pytest.mark.slow
def test_a_dump_holds_the_rows_of_the_micro_batch() -> None:
    with pytest.raises(
        RunError, match=r"step \d+ of iteration 1 failed on main\[0\]: run update_policy"
    ) as raised:
        inline(ONE, *not_finite("dump"), run_dir="dump")
    assert "the rows of such micro-batches: " in str(raised.value)
    rows = lines("dump", "dumps/step-000001-update_policy-main-0.jsonl")
    assert 0 < len(rows) < 28
    assert 0 in {row["group"] for row in rows}
    with pytest.raises(RunError):
        inline(ONE, *not_finite("dump", "steep"), run_dir="steep")
    assert len(lines("steep", "dumps/step-000001-update_policy-main-0.jsonl")) == 28


@pytest.mark.slow
def test_a_run_of_which_every_update_was_skipped_is_not_done() -> None:
    """Two runs by command: the one that took no step says so last, and fails; one that took some is done."""
    graph = ["run", ONE, "--inline", *not_finite("skip"), "--run-dir"]
    done = CliRunner().invoke(main, [*graph, "none", "update_policy.minibatches=1"])
    assert done.exit_code == 1
    law = "`update_policy` left out 2 optimizer steps, whose gradients were not finite, and took none"
    assert f"{law}\n  what was exported is as untrained" in done.output and "is done" not in done.output
    assert os.listdir("none/checkpoints") == ["step-000002"] and Path("none/models/policy").is_dir()
    done = CliRunner().invoke(main, [*graph, "some"])
    assert done.exit_code == 0, done.output
    assert "note: `update_policy` left out 2 optimizer steps" in done.output and "is done" in done.output


def test_a_reward_that_is_not_finite_is_an_error_of_its_op_unless_the_graph_says_so() -> None:
    bad = f"rewards={{op: '{OPS}:unbounded'}}"
    graph = (
        "graph: unbounded\nextends: "
        + ONE
        + "\nedits:\n  - remove: [eval]\n  - replace: {"
        + bad.replace("=", ": ", 1)
        + "}\n"
    )
    Path("unbounded.yaml").write_text(graph)
    settings = ("schedule.iterations=1", "update_policy.minibatches=1")
    with pytest.raises(RunError, match=r"step \d+ of iteration 1 failed on main\[0\]: run rewards") as raised:
        inline("unbounded.yaml", *settings, run_dir="a")
    law = f"`rewards` ({OPS}:unbounded): column `rewards` holds inf in row 2; 2 of 28 values are not finite"
    assert law in str(raised.value) and "schedule.on_nan=skip" in str(raised.value)
    with pytest.raises(RunError, match="took none"):
        inline("unbounded.yaml", *settings, "schedule.on_nan=skip", run_dir="b")
    assert lines("b")[-1]["reward/mean"] is None
    samples = Path("b/samples/step-000001.jsonl").read_text()
    assert [json.loads(line, parse_constant=float)["rewards"] for line in samples.splitlines()][2:4] == [
        None
    ] * 2


@pytest.mark.parametrize("kind", ["cannot_be_pickled", "cannot_be_unpickled", "cannot_be_read"])
def test_an_error_that_no_other_process_can_read_is_the_op_s(
    kind: str, run_on_devices: Callable[..., str]
) -> None:
    graph = f"graph: odd\nextends: {ONE}\nedits:\n  - replace: {{rewards: {{op: '{OPS}:{kind}'}}}}\n"
    Path("odd.yaml").write_text(graph)
    settings = ("odd.yaml", "schedule={iterations: 1, restarts: 2}", "eval.every=5", "--devices", "1")
    text = run_on_devices(*settings, "--run-dir", "a", expect=1)
    assert "failed on main[0]: run rewards" in text and "the abacus broke" in text
    assert "restart " not in text and not Path("a/restarts.jsonl").exists()
    assert len(text) < 20_000
    assert "Traceback" not in text and "ones_ops.py" in Path("a/failure.txt").read_text()
