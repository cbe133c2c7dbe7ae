"""Whole runs of small graphs, inline and on Ray."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from processes import ProcessCluster
from ran import assert_gone, metrics, rlgraph, wait_for
from ray.runtime_env import RuntimeEnv

from rlgraph.errors import RunError
from rlgraph.reports.report import make_report, report_text
from rlgraph.runtime.messages.log_level import LEVEL, with_level
from rlgraph.runtime.run import run_graph
from rlgraph.syntax.settings import RuntimeEnvKey

HERE = Path(__file__).parent
ONES = str(HERE / "ones.yaml")
pytestmark = pytest.mark.usefixtures("in_demo")


def inline(*args: str, steps: int | None = None, run_dir: str | None = None, resume: bool = False) -> None:
    """Run in this process: importing torch anew takes longer than these runs."""
    folder = None if run_dir is None else Path(run_dir)
    run_graph(ONES, args, 1, steps=steps, run_dir=folder, resume=resume, inline=True)


def assert_close(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float) -> None:
    assert [line.keys() for line in a] == [line.keys() for line in b]
    for left, right in zip(a, b, strict=True):
        for name in left:
            if left[name] is None:  # nothing to measure, as the norm of an update without a step
                assert right[name] is None, (name, left, right)
                continue
            assert math.isclose(left[name], right[name], rel_tol=tolerance, abs_tol=tolerance), (
                name,
                left,
                right,
            )


@pytest.mark.slow
def test_one_and_two_ranks_inline_and_in_processes_give_the_same_metrics(
    run_on_devices: Callable[..., str],
) -> None:
    inline(run_dir="inline")
    run_on_devices(ONES, "--devices", "1", "--run-dir", "one")
    run_on_devices(ONES, "--devices", "2", "--run-dir", "two")
    alone = metrics("inline")
    assert [line["step"] for line in alone] == [0, 1, 2, 3, 4]
    assert alone[-1]["update_policy/grad_norm"] > 0
    assert alone[-1]["reward/mean"] > 0
    assert_close(alone, metrics("one"), 1e-6)
    assert_close(alone, metrics("two"), 1e-4)


@pytest.mark.slow
def test_filtered_rows_train_alike_on_one_and_two_ranks(run_on_devices: Callable[..., str]) -> None:
    body = "  - add: {informative: {op: filter.mixed, min_std: 0.08}}\n"
    body += "  - set: {advantages.rows: informative, ref_logprobs.rows: informative}\n"
    body += f"  - set: {{rewards.op: '{HERE / 'ones_ops.py'}:ones', rewards.per: 16}}\n"
    Path("filtered.yaml").write_text(f"graph: filtered\nextends: {ONES}\nedits:\n{body}")
    run_graph("filtered.yaml", (), 1, inline=True, run_dir=Path("one"))
    run_on_devices("filtered.yaml", "--devices", "2", "--run-dir", "two")
    assert any(0 < line.get("informative/kept", 0) < 1 for line in metrics("one"))
    assert metrics("one")[-1]["update_policy/grad_norm"] > 0
    assert_close(metrics("one"), metrics("two"), 1e-4)


def test_a_users_own_update_makes_the_next_version() -> None:
    body = f"  - replace: {{update_policy: {{op: '{HERE / 'ones_ops.py'}:imitate', model: policy}}}}\n"
    body += f"  - set: {{rewards.op: '{HERE / 'ones_ops.py'}:ones'}}\n"
    Path("own.yaml").write_text(f"graph: own\nextends: {ONES}\nedits:\n{body}")
    # the worker counts versions too, and stops where the plan promised another
    run_graph("own.yaml", (), 1, inline=True, steps=3, run_dir=Path("own"))
    lines = metrics("own")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["eval/accuracy"] != lines[3]["eval/accuracy"]  # the rollout saw the new weights
    assert "policy@v+1" in Path("own/plan.txt").read_text()


@pytest.mark.slow
def test_a_recompute_that_is_left_out_changes_nothing() -> None:
    inline("update_policy.minibatches=1", "old_logprobs.keep=true", steps=3, run_dir="kept")
    inline("update_policy.minibatches=1", steps=3, run_dir="left_out")
    assert metrics("left_out")[-1]["update_policy/grad_norm"] > 0
    assert_close(metrics("kept"), metrics("left_out"), 1e-5)
    assert "run old_logprobs" in Path("kept/plan.txt").read_text()
    assert "run old_logprobs" not in Path("left_out/plan.txt").read_text()


def test_a_run_directory_holds_what_the_readme_says() -> None:
    inline("schedule.save_every=1", "schedule.keep=1", steps=2)
    run = Path("runs/ones")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert "graph: ones" in (run / "graph.yaml").read_text()
    assert "run rollout (rollout)" in (run / "plan.txt").read_text()
    assert json.loads((run / "plan.json").read_text())["graph"] == "ones"
    events = json.loads((run / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    assert {"rollout", "update_policy", "sync:policy"} <= {event["name"] for event in events}
    sample = json.loads((run / "samples" / "step-000002.jsonl").read_text().splitlines()[0])
    assert {"tokens", "responses", "rewards"} <= sample.keys()
    assert sample["rewards"] == sample["responses"].count("1") / 4
    assert "update_policy" in report_text(make_report(run))
    (events_file,) = (run / "tensorboard").iterdir()
    assert b"reward/mean" in events_file.read_bytes()
    inline(steps=0)
    assert Path("runs/ones-2").is_dir()


def test_the_exported_model_is_the_trained_one() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inline(steps=1, run_dir="a")
    before = AutoModelForCausalLM.from_pretrained(os.environ["RLGRAPH_TEST_FILES"] + "/model")
    after = AutoModelForCausalLM.from_pretrained("a/models/policy")
    ids = AutoTokenizer.from_pretrained("a/models/policy")("12+34=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert not torch.allclose(before(input_ids=ids).logits, after(input_ids=ids).logits)
    # what the next run starts from is what this one ended with
    inline("models.policy.path=a/models/policy", steps=0, run_dir="b")
    inline(steps=1, resume=True, run_dir="a")
    assert metrics("b")[0]["eval/accuracy"] == metrics("a")[1]["eval/accuracy"]


@pytest.mark.slow
def test_three_iterations_and_three_after_a_resume_are_six_bit_for_bit() -> None:
    # ten rows in batches of four: epochs end inside the third batch and with the fifth
    rows = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(10, 20)]
    Path("ten.jsonl").write_text("\n".join(rows) + "\n")
    settings = ["prompts.files=[ten.jsonl]", "prompts.batch=4"]
    inline(*settings, steps=6, run_dir="six")
    inline(*settings, steps=3, run_dir="three")
    inline(*settings, steps=6, run_dir="three", resume=True)
    six = {line["step"]: line for line in metrics("six")}
    for line in metrics("three"):
        expected = {name: value for name, value in six[line["step"]].items() if name in line}
        assert {name: line[name] for name in expected} == expected


def test_a_resume_refuses_another_graph_and_a_fresh_run_an_old_folder() -> None:
    inline(steps=1, run_dir="a")
    with pytest.raises(RunError, match="holds files already"):
        inline(run_dir="a")
    with pytest.raises(RunError, match="seed"):
        inline("seed=7", run_dir="a", resume=True)
    with pytest.raises(RunError, match="holds no run"):
        inline(run_dir="b", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", [["--inline"], pytest.param(["--devices", "2"], marks=pytest.mark.nightly)])
def test_a_failing_op_marks_its_step_and_leaves_no_process(place: list[str]) -> None:
    token = uuid.uuid4().hex
    override = f"nodes.rewards={{op: {HERE / 'ones_ops.py'}:raises}}"
    text = rlgraph("run", ONES, override, *place, "--run-dir", "a", expect=1, RLGRAPH_TEST_TOKEN=token)
    shown = text[text.index("ones_ops.py:") :].splitlines()
    assert re.match(
        r".*ones_ops.py:\d+: raise ArithmeticError\(", "ones_ops.py:" + shown[0].partition(":")[2]
    )
    assert shown[1] == "ArithmeticError: the abacus broke"
    assert re.match(r"  step \d+ of iteration 2 failed on main\[\d\]: run rewards", shown[2])
    assert shown[3].endswith(": a/failure.txt")
    assert "Traceback" not in text and "repeat " not in text, "the plan and the traceback are in the file"
    details = Path("a/failure.txt").read_text()
    assert any(line.startswith("!") and "run rewards" in line for line in details.splitlines())
    assert "Traceback (most recent call last)" in details and "runtime/worker/worker.py" in details
    assert [line["step"] for line in metrics("a")] == [0, 1]
    assert_gone(token)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_leaves_no_process_and_a_run_that_resumes(number: signal.Signals) -> None:
    token = uuid.uuid4().hex
    # the learning rate falls towards the last iteration, so all three runs must be of one length
    settings = ["run", ONES, "schedule.iterations=100000", "--devices", "2", "--run-dir"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlgraph", *settings, "stopped"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"RLGRAPH_TEST_TOKEN": token},
        start_new_session=True,
    )
    wait_for(lambda: Path("stopped/metrics.jsonl").is_file() and len(metrics("stopped")) > 2)
    os.killpg(process.pid, number)  # as a terminal or `timeout` does: the whole group gets it
    output, _ = process.communicate(timeout=120)
    assert process.returncode == (1 if number == signal.SIGINT else 75), output
    assert "continue with: rlgraph resume" in output
    assert_gone(token)
    done = metrics("stopped")[-1]["step"]
    rlgraph(*settings, "stopped", "--resume", "--steps", str(done + 2))
    rlgraph(*settings, "whole", "--steps", str(done + 2))
    whole = metrics("whole")
    assert_close(metrics("stopped")[:-1], whole[:-1], 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_workers_meet_at_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    class AtSix(ProcessCluster):
        def call(self, place: Any, method: str, *args: Any, returns: int = 1) -> list[Any]:
            called.extend(args if method == "setup" else ())
            six = [self.put(("one", "::1", ""))]
            return six if method == "place" else super().call(place, method, *args, returns=returns)

    monkeypatch.setattr("rlgraph.runtime.run.RayCluster", AtSix)
    run_graph(ONES, ("eval.before=false",), 2, steps=1, run_dir=Path("six"))
    assert [line["step"] for line in metrics("six")] == [1]
    assert any(re.fullmatch(r"tcp://\[::1\]:\d+", arg) for arg in called if isinstance(arg, str))


def test_an_environment_without_variables_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    assert with_level({"env_vars": None, "pip": ["six"]}) == {"env_vars": None, "pip": ["six"]}
    monkeypatch.setenv(LEVEL, "info")
    assert with_level({"env_vars": None})["env_vars"][LEVEL] == "info"


def test_the_keys_of_a_runtime_env_are_rays() -> None:
    known = {key for key in RuntimeEnv.known_fields if not key.startswith("_")} - {"java_jars"}
    assert {*get_args(RuntimeEnvKey)} == known | {"nsight", "rocprof_sys"}  # as it is told of these


@pytest.mark.slow
def test_workers_have_the_environment_and_the_log_level_that_they_are_given(tmp_path: Path) -> None:
    Path("told.py").write_text(
        "import logging, os\n"
        "import torch\n"
        "from rlgraph.ops import Context, float32, op, samples, text\n\n"
        "@op()\n"
        "def told(ctx: Context, responses: text[samples]) -> float32[samples]:\n"
        "    logging.getLogger('mine').info('scored')\n"
        "    rewards = torch.full((len(responses),), len(os.environ['PROBE']) / 16)\n"
        "    ctx.record('reward/mean', rewards)\n"
        "    return rewards\n"
    )
    edits = "[{remove: [eval, update_policy.kl_coef]}, {replace: {rewards: {op: 'told.py:told'}}}]"
    Path("told.yaml").write_text(f"extends: {ONES}\nedits: {edits}\n")
    env = "schedule.runtime_env={env_vars: {PROBE: '${env:GIVEN}'}}"
    rlgraph("run", "told.yaml", env, "--steps=1", "--log-level=info", "--run-dir=a", GIVEN="twelve-chars")
    assert metrics("a")[-1]["reward/mean"] == 0.75
    logs = [path.read_text() for path in Path("a/logs").glob("*.log")]
    assert any("scored" in text for text in logs)
    assert "twelve-chars" not in Path("a/plan.json").read_text()
