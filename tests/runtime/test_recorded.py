"""Columns that a run keeps on disk, and graphs that train on them in place of a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlgraph.errors import GraphError
from rlgraph.nodes.data.recorded import load, wanted_types
from rlgraph.nodes.support.record_file import Recorded, about, read, steps_of
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
DATA = "demo_files/train.parquet"
ONE = "set: {pools: {main: {devices: 1}}}"
RATIO = "set: {update_policy.in: {old_logprobs: rollout_logprobs}}"
REWARDS = "columns: {rewards: 'float32[samples]'}"
TRAIN = f"replace: {{rollout: {{op: data.recorded, model: policy, run: kept, {REWARDS}}}}}"
WITHOUT = "remove: [prompts, rewards]"


@pytest.fixture(autouse=True)
def _files(demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")


def graph(*edits: str, base: str = "grpo") -> str:
    settings = [
        "set: {models.policy: {path: demo_files/model, optimizer: {lr: 1e-3}}}",
        f"replace: {{prompts: {{op: data.prompts, files: [{DATA}], batch: 4, template: plain}}}}",
        "set: {rollout.n: 3, rollout.max_new_tokens: 6, schedule: {iterations: 3, record_every: 1}}",
        f"set: {{rewards: {{op: '{HERE / 'ones_ops.py'}:ones'}}, update_policy.minibatches: 1}}",
    ]
    body = "".join(f"  - {edit}\n" for edit in (*settings, *edits))
    Path("edited.yaml").write_text(f"graph: edited\nextends: {base}\nedits:\n{body}")
    return "edited.yaml"


def ran(path: str, run_dir: str, devices: int = 1, **options: Any) -> list[dict[str, Any]]:
    run_graph(path, (), devices, run_dir=Path(run_dir), **{"inline": devices == 1, **options})
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]


def same_models(a: str, b: str) -> bool:
    one, other = (load_file(f"{run}/models/policy/model.safetensors") for run in (a, b))
    return all(one[name].equal(other[name]) for name in one)


def equal(a: Recorded, b: Recorded) -> bool:
    if isinstance(a.values, list):
        return bool(a.values == b.values)
    same = (a.values == b.values).all() and a.values.dtype == b.values.dtype
    return bool(same and (a.offsets is None or (a.offsets == b.offsets).all()))


def test_a_run_trains_on_what_another_recorded_as_that_did() -> None:
    first = ran(graph(ONE, RATIO), "kept")
    again = ran(graph(ONE, RATIO, TRAIN, WITHOUT), "trained")
    names = [name for name in first[0] if name.startswith("update_policy/")]
    assert names
    assert [[line[name] for name in names] for line in again] == [
        [line[name] for name in names] for line in first
    ]
    assert [line["rollout/iteration"] for line in again] == [1, 2, 3]
    assert same_models("kept", "trained")
    # after the last iteration that was recorded comes the first again
    more = ran(graph(ONE, RATIO, TRAIN, WITHOUT, "set: {schedule.iterations: 4}"), "more")
    assert [line["rollout/iteration"] for line in more] == [1, 2, 3, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_files_hold_every_column_with_its_type_whatever_the_devices() -> None:
    filtered = ("add: {kept: {op: filter.mixed}}", "set: {advantages.rows: kept, rollout.n: 4}")
    path = graph(*filtered, "set: {schedule: {iterations: 2, record_every: 2}}")
    ran(path, "one")
    ran(path, "two", devices=2)
    assert [*steps_of(Path("one"))] == [*steps_of(Path("two"))] == [1]
    folders = [steps_of(Path(run))[1] for run in ("one", "two")]
    assert sorted(p.name for p in folders[0].iterdir()) == [
        "prompts.parquet",
        "samples.kept.parquet",
        "samples.parquet",
    ]
    for name in ("prompts.parquet", "samples.parquet"):
        one, two = (about(folder / name) for folder in folders)
        assert one == two
        a, b = (read(folder / name, [*one.types]) for folder in folders)
        exact = [column for column in one.types if "float" not in one.types[column]]
        assert exact and all(equal(a[column], b[column]) for column in exact)
        assert all(len(a[c].values) == len(b[c].values) for c in one.types)
    samples = about(folders[0] / "samples.parquet")
    assert samples.types["tokens"] == "int64[samples, tokens]"
    assert (samples.parent, samples.times) == ("prompts", 4)
    assert about(folders[0] / "samples.kept.parquet").types == {"advantages": "float32[samples, tokens]"}


def test_what_was_recorded_a_prompt_is_repeated() -> None:
    ran(graph(ONE, f"set: {{rewards: {{op: '{HERE / 'recorded_ops.py'}:near'}}}}"), "kept", steps=1)
    folder = steps_of(Path("kept"))[1]
    found = load(folder, wanted_types({"answer": "text[samples]", "prompt": "int64[samples, prompt_tokens]"}))
    prompts = read(folder / "prompts.parquet", ["answer", "prompt"])
    assert found["answer"] == [answer for answer in prompts["answer"].values for _ in range(3)]
    lengths = found["prompt"].offsets[1:] - found["prompt"].offsets[:-1]
    for row, length in enumerate(lengths):
        start, own = found["prompt"].offsets[row], found["tokens"].offsets[row]
        part = found["tokens"].values[own : own + length]
        assert found["prompt"].values[start : start + length].equal(part)


def test_rewards_are_computed_anew_from_recorded_answers() -> None:
    near = f"set: {{rewards: {{op: '{HERE / 'recorded_ops.py'}:near'}}}}"
    first = ran(graph(ONE, RATIO, near), "kept")
    answers = TRAIN.replace("rewards: 'float32", "answer: 'text").replace("float32", "text")
    again = ran(graph(ONE, RATIO, near, answers, "remove: [prompts]"), "trained")
    assert [line["reward/mean"] for line in again] == [line["reward/mean"] for line in first]


def test_a_run_may_only_roll_out() -> None:
    only = "remove: [update_policy, advantages, old_logprobs, ref_logprobs, models.ref]"
    lines = ran(graph(ONE, only, "set: {schedule.iterations: 2}"), "rolled")
    assert [line["rollout/length"] > 0 for line in lines] == [True, True]
    assert "tokens" in about(steps_of(Path("rolled"))[2] / "samples.parquet").types


def test_a_resumed_run_records_what_it_would_have() -> None:
    path = graph(ONE, "set: {schedule.iterations: 4}")
    ran(path, "whole")
    ran(path, "cut", steps=2)
    ran(path, "cut", resume=True)
    for iteration, folder in steps_of(Path("whole")).items():
        names = [*about(folder / "samples.parquet").types]
        a, b = (read(steps_of(Path(r))[iteration] / "samples.parquet", names) for r in ("whole", "cut"))
        unlike = {name: (a[name].values, b[name].values) for name in names if not equal(a[name], b[name])}
        assert not unlike, f"in iteration {iteration}"


def test_what_was_not_recorded_is_named_before_the_run() -> None:
    ran(graph(ONE), "kept", steps=1)
    mixed = TRAIN.replace("}}}", ", answer: 'float32[samples]'}}}")
    for edit, said in (
        (
            TRAIN.replace("run: kept", "run: elsewhere"),
            "(?s)there is no run .*elsewhere.*  one with schedule.record_",
        ),
        (
            TRAIN.replace("rewards:", "marks:"),
            "(?s)has no column `marks` for its samples.*  it has advantages, ",
        ),
        (
            TRAIN.replace("run: kept", "run: kept, temperature: 0.5"),
            "(?s)kept sampled at temperature 1.*  the graph",
        ),
        (mixed, r"(?s)has `answer` as text\[prompts\].*  the graph says float32\[samples\]"),
    ):
        reads = "set: {advantages.in: {rewards: marks}}" if "marks" in edit else ONE
        with pytest.raises(GraphError, match=said):
            run_graph(graph(ONE, RATIO, edit, WITHOUT, reads), (), 1, inline=True)
