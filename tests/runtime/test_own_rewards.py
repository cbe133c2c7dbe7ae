"""Rewards and filters of a user's own ops are measured as shipped ones are, wherever metrics are read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ran import metrics

from rlgraph.api import Run
from rlgraph.compiler import compile_graph
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker.written_metrics import reward_prefixes
from rlgraph.sweep.combinations import Combination
from rlgraph.sweep.results import results

HERE = Path(__file__).parent
OPS = HERE / "own_reward_ops.py"
SPREAD = ("reward/mean", "reward/std", "reward/min", "reward/max")
BASE = f"""\
graph: own
extends: {HERE / "ones.yaml"}
edits:
  - remove: [ref_logprobs, models.ref, eval]
  - set:
      prompts.batch: 4
      rollout.n: 4
      rollout.max_new_tokens: 3
      update_policy.minibatches: 1
      update_policy.kl_coef: 0
      schedule: {{iterations: 2, save_every: 1}}
"""


@pytest.fixture(autouse=True)
def _in_demo(in_demo: None) -> None: ...


def graph(*edits: str) -> str:
    """Write a graph of a user's own ops; return its path."""
    Path("own.yaml").write_text(BASE + "".join(f"  - {edit}\n" for edit in edits))
    return "own.yaml"


def ran(*edits: str, devices: int = 1, **options: Any) -> list[dict[str, Any]]:
    run_graph(graph(*edits), (), devices, run_dir=Path("run"), inline=True, **options)
    return metrics("run")


def samples(run_dir: str, iteration: int) -> list[dict[str, Any]]:
    text = Path(run_dir, f"samples/step-{iteration:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


TRACKER = """
import json

class Tracker:
    def __init__(self, folder, graph):
        self.file = (folder / "tracked.jsonl").open("a")
    def log(self, values, step):
        print(json.dumps(values), file=self.file)
    def samples(self, name, rows, step): pass
    def close(self, failed):
        self.file.close()
"""


def test_a_reward_that_records_nothing_is_seen_wherever_metrics_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the console, in TensorBoard, in a tracker, on the page, in a sweep, and by ``schedule.stop``."""
    ops = Path("my_ops.py")
    ops.write_text((HERE / "ones_ops.py").read_text().replace("def ones(", "def my_reward(", 1))
    Path("my_tracker.py").write_text(TRACKER)
    stop = "set: {schedule.stop: {metric: reward/mean, at_least: 0}}"
    edits = ('replace: {rewards: {op: "my_ops.py:my_reward"}}', stop)
    lines = ran(*edits, track=["my_tracker.py:Tracker"])
    assert len(lines) == 1, "the reward ends the run after its first iteration"

    rewards = [row["rewards"] for row in samples("run", 1)]
    assert len(rewards) == 16 and len({*rewards}) > 1
    expected = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    assert {name: lines[0][name] for name in SPREAD} == pytest.approx(expected)
    assert "reward/failed" not in lines[0]

    mean = lines[0]["reward/mean"]
    said = capsys.readouterr().out
    assert f"iteration 1/2  reward {mean:.3f}  " in said
    assert f"`reward/mean` is {mean:.4g} after iteration 1" in said
    (events,) = Path("run/tensorboard").iterdir()
    assert all(name.encode() in events.read_bytes() for name in SPREAD)
    (tracked,) = Path("run/tracked.jsonl").read_text().splitlines()
    assert json.loads(tracked)["reward/mean"] == mean
    assert '"reward/mean"' in Run(Path("run")).html()
    Path("run").rename("seed=0")
    swept = results("own", [Combination({"seed": "0"}, ())], Path())
    assert swept.metrics == ["reward/mean"] and f"reward/mean {mean:.3f}" in swept.summary(swept.runs[0])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_measured_and_recorded_rewards_are_the_same_numbers(
    devices: int, run_on_devices: Callable[..., str]
) -> None:
    name = graph()
    recorded = f"nodes.rewards={{op: '{HERE / 'ones_ops.py'}:recorded_ones', per: 4}}"
    run_on_devices(name, "--devices", str(devices), "--run-dir", "measured")
    run_on_devices(name, recorded, "--devices", str(devices), "--run-dir", "recorded")
    for one, other in zip(metrics("measured"), metrics("recorded"), strict=True):
        assert one.keys() == other.keys()
        assert [one[metric] for metric in SPREAD] == [other[metric] for metric in SPREAD]
        assert one["reward/std"] > 0


def test_samples_without_a_reward_are_counted_and_not_averaged(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = ran(f"set: {{rewards: {{op: '{OPS}:sometimes'}}}}", steps=1)
    assert line["reward/failed"] == 0.5 and line["reward/max"] < 7
    said = f"iteration 1/1  reward {line['reward/mean']:.3f} (8 of 16 failed)  "
    assert said in capsys.readouterr().out


def test_a_run_in_which_all_rewards_failed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = ran(f"set: {{rewards: {{op: '{OPS}:never'}}}}", steps=1)
    assert line["reward/failed"] == 1 and line["reward/mean"] is None
    said = capsys.readouterr().out
    assert "iteration 1/1  reward - (16 of 16 failed)  " in said and "reward nan" not in said


def test_an_estimator_of_ones_own_and_rewards_by_token_are_measured() -> None:
    edits = (
        f"set: {{rewards: {{op: '{OPS}:each_token'}}}}",
        f"set: {{advantages: {{op: '{OPS}:by_token'}}}}",
    )
    (by_token,) = ran(*edits, steps=1)
    Path("run").rename("by_token")
    (by_sample,) = ran(f"set: {{advantages: {{op: '{OPS}:my_advantage'}}}}", steps=1)
    for name in SPREAD:
        assert by_token[name] == pytest.approx(by_sample[name], abs=1e-6)
    assert by_sample["reward/std"] > 0


def test_several_rewards_have_a_name_each() -> None:
    """The first has the plain name; what a node writes beside it, and what shapes it, have their own."""
    penalty = "overlong: {op: reward.overlong, limit: 3, buffer: 2}"
    (line,) = ran(
        f"set: {{rewards: {{op: '{OPS}:two'}}}}",
        f"insert: {{{penalty[:-1]}, on: rewards}}}}",
        "set: {advantages: {op: advantage.gdpo, in: {rewards: overlong, rewards_2: short}}}",
        steps=1,
    )
    assert {*SPREAD} <= line.keys()
    assert 0 < line["short/reward/mean"] < 1 and line["short/reward/max"] == 1
    shaped = line["reward/mean"] - line["reward/overlong"]
    assert line["overlong/reward/mean"] == pytest.approx(shaped) != line["reward/mean"]
    assert not [name for name in line if name.startswith("rewards/")]


def test_filters_of_ones_own_are_measured_and_one_that_keeps_nothing_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep = f"add: {{keep: {{op: '{OPS}:at_least', least: 9}}}}"
    lines = ran(keep, "set: {advantages.rows: keep}")
    assert [line["keep/kept"] for line in lines] == [0, 0]
    said = capsys.readouterr().out
    law = "a filter keeps no row, so nothing that reads its rows is trained: `keep/kept` (kept-nothing)"
    assert said.count("(kept-nothing)") == 1 and f"note: after iteration 1: {law}\n" in said
    assert "\n  try keep.refill=true\n" in said
    compile_graph("own.yaml", ("keep.refill=true",), 1)  # the remedy can be typed
    (alarm,) = map(json.loads, Path("run/alarms.jsonl").read_text().splitlines())
    assert alarm["rule"] == "kept-nothing"

    Path("run").rename("nothing")
    lines = ran(keep.replace("9", "0.25"), "set: {advantages.rows: keep}")
    for line in lines:
        rewards = [row["rewards"] for row in samples("run", line["step"])]
        assert 0 < line["keep/kept"] == sum(reward >= 0.25 for reward in rewards) / 16 < 1
    assert "kept-nothing" not in capsys.readouterr().out


def test_a_reward_that_only_a_filter_reads_is_measured() -> None:
    (line,) = ran(
        f"add: {{keep: {{op: '{OPS}:at_least', least: 0}}}}",
        "remove: [old_logprobs, advantages]",
        "replace: {update_policy: {op: update.policy, model: policy, rows: keep, loss: {kind: sft}}}",
        steps=1,
    )
    assert {*SPREAD, "keep/kept"} <= line.keys() and line["keep/kept"] == 1


def test_the_rewards_of_a_graph_are_those_that_its_nodes_read_as_such() -> None:
    """A number that a filter reads in place of a reward does not take its name."""
    assert reward_prefixes(compile_graph("dapo", (), 1)) == {
        "rewards": "reward/",
        "overlong": "overlong/reward/",
    }
    assert [*reward_prefixes(compile_graph("process_rewards", (), 1))] == ["step_rewards"]
    held = reward_prefixes(compile_graph("rest", (), 1))
    assert held == {"rewards/rollout": "reward/"}, "rows that are held were measured when they came"

    measured = graph(
        "remove: [old_logprobs, advantages]",
        "replace: {update_policy: {op: update.policy, model: policy, rows: keep, loss: {kind: sft}}}",
        f"add: {{length: {{op: '{OPS}:length'}}}}",
        "add: {long: {op: filter.threshold, min: 2, in: {rewards: length}}}",
        f"add: {{keep: {{op: '{OPS}:at_least', least: 0, rows: long}}}}",
    )
    prefixes = reward_prefixes(compile_graph(measured, (), 1))
    assert prefixes == {"length": "length/reward/", "rewards": "reward/"}
    with_advantages = graph(
        "add: {long: {op: filter.threshold, min: 2, in: {rewards: length}}}",
        f"add: {{length: {{op: '{OPS}:length'}}}}",
        "set: {advantages.rows: long}",
    )
    assert reward_prefixes(compile_graph(with_advantages, (), 1)) == {"rewards": "reward/"}


def test_a_loss_and_a_reward_of_ones_own_read_the_entropy_of_each_token() -> None:
    scored = "replace: {old_logprobs: {op: logprobs.entropy, model: policy, out: {logprobs: old_logprobs}}}"
    edits = (scored, f"set: {{rewards: {{op: '{OPS}:certain'}}}}")
    lines = {}
    for least in (0, 100):  # nats, of which no token has 100
        (lines[least],) = ran(
            *edits, f"set: {{update_policy.loss: {{kind: '{OPS}:at_forks', least: {least}}}}}", steps=1
        )
        Path("run").rename(f"run-{least}")
    assert lines[0]["update_policy/grad_norm"] > 0 == lines[100]["update_policy/grad_norm"]
    entropies = []
    for row in samples("run-0", 1):
        written = [value for value, mask in zip(row["entropy"], row["loss_mask"], strict=True) if mask]
        assert row["rewards"] == pytest.approx(-statistics.fmean(written), abs=1e-3)
        entropies += written
    # the update measures it with the weights of the only optimizer step, which are those before it
    assert lines[0]["update_policy/entropy"] == pytest.approx(statistics.fmean(entropies), abs=1e-3)


def test_two_main_rewards_of_one_op_keep_their_numbers_apart() -> None:
    (line,) = ran(
        f"set: {{rewards: {{op: '{OPS}:two'}}}}",
        "add: {other: {op: advantage.grpo, in: {rewards: short}}}",
        "replace: {advantages: {op: advantage.grpo}}",
        f"add: {{both: {{op: '{OPS}:sum_of_both', in: {{first: advantages, second: other}}}}}}",
        "set: {update_policy.in: {advantages: both}}",
        steps=1,
    )
    assert line["reward/max"] < 1 == line["short/reward/max"]
