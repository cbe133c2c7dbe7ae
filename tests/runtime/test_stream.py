"""Regions that stream: every prompt is used once, no row is too old, whatever finishes when; and resumes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from ran import metrics, same_weights
from safetensors.torch import load_file

from rlgraph.errors import RunError
from rlgraph.runtime.driver.region import RunningRegion
from rlgraph.runtime.run import run_graph

GRAPH = str(Path(__file__).parent / "streamed.yaml")
ROWS, N = 16, 2
pytestmark = pytest.mark.usefixtures("in_demo")


def run(
    run_dir: str, *settings: str, graph: str = GRAPH, inline: bool = True, **given: Any
) -> list[dict[str, Any]]:
    """Run, and return what each iteration has used; of one that ran twice, the last."""
    note = f"update.note={Path(f'{run_dir}.jsonl').resolve()}"
    run_graph(graph, (note, *settings), run_dir=Path(run_dir), inline=inline, **given)
    return used(run_dir)


def used(run_dir: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(f"{run_dir}.jsonl").read_text().splitlines())
    return [*{line["iteration"]: line for line in lines}.values()]


def check(iterations: list[dict[str, Any]], staleness: int, whole: bool = True) -> list[int]:
    """Hold what was used to what a stream promises; return the prompts, each once."""
    assert [one["iteration"] for one in iterations] == [*range(len(iterations))]
    assert {len(one["groups"]) for one in iterations} == {ROWS}
    groups = [*chain.from_iterable(one["groups"] for one in iterations)]
    assert {groups.count(group) for group in groups} == {N}, "a prompt came twice, or in part"
    for one in iterations:
        # every update makes one version, so an iteration's number is that of the weights that it starts from
        ages = [one["iteration"] - version for version in one["versions"]]
        assert 0 <= min(ages) <= max(ages) <= staleness
    begun = max(groups) + 1
    left = begun - len({*groups})
    assert left * N <= (staleness + 1) * ROWS if whole else True
    return list(dict.fromkeys(groups))


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_every_prompt_is_used_once_and_no_row_is_too_old(staleness: int) -> None:
    iterations = run("a", f"schedule.buffer.staleness={staleness}")
    check(iterations, staleness)
    ages = [line["finished/age_max"] for line in metrics("a")]
    assert max(ages) <= staleness and len(ages) == 8


def test_in_order_prompts_come_as_they_are_and_each_is_of_one_version() -> None:
    iterations = run("a", "schedule.buffer.order=in_order")
    assert check(iterations, 2) == [*range(8 * ROWS // N)]
    assert iterations == run("b", "schedule.buffer={order: in_order, staleness: 2, chunk: 3}")


def test_a_filter_drops_groups_and_iterations_are_full() -> None:
    ops = Path(__file__).parent / "stream_ops.py"
    text = f"graph: kept\nextends: {GRAPH}\nedits:\n"
    text += f"  - add: {{some: {{op: '{ops}:some', refill: true}}}}\n  - set: {{update.rows: some}}\n"
    Path("kept.yaml").write_text(text)
    iterations = run("a", graph="kept.yaml")
    prompts = check(iterations, 2, whole=False)
    assert all(prompt % 3 != 1 for prompt in prompts)
    assert min(line["some/stayed"] for line in metrics("a")) < 1


def test_what_is_too_old_is_dropped_where_the_graph_says_so() -> None:
    iterations = run("a", "schedule.buffer={staleness: 1, too_old: drop, chunk: 2}")
    check(iterations, 1, whole=False)
    assert sum(line["finished/dropped"] for line in metrics("a")) > 0


def test_what_is_too_old_is_used_where_a_loss_corrects() -> None:
    iterations = run("a", "schedule.buffer={staleness: 1, too_old: correct, chunk: 2}")
    ages = [one["iteration"] - version for one in iterations for version in one["versions"]]
    assert max(ages) > 1


def test_a_run_goes_on_with_what_was_begun() -> None:
    run("a", "schedule={iterations: 4, buffer: {staleness: 2, chunk: 6}}")
    kept = json.loads(Path("a/checkpoints/step-000004/state.json").read_text())
    assert kept["positions"]["numbers"] == 4 * ROWS // N  # nothing more is begun for a run that ends
    whole = run("b", "schedule={iterations: 8, save_every: 3, buffer: {staleness: 2, chunk: 6}}", steps=3)
    waiting = json.loads(Path("b/checkpoints/step-000003/state.json").read_text())["waiting"]["finished"]
    assert waiting
    whole = run("b", "schedule={iterations: 8, save_every: 3, buffer: {staleness: 2, chunk: 6}}", resume=True)
    check(whole, 2)


@pytest.mark.slow
def test_in_order_a_run_is_the_same_on_any_number_of_devices() -> None:
    graph, runs = str(Path(__file__).parent / "ones.yaml"), ((1, True), (1, True), (2, False))
    stream = "schedule={iterations: 3, buffer: {staleness: 1, order: in_order, chunk: 2}}"
    settings = (stream, "update_policy.in.old_logprobs=rollout_logprobs", "eval.before=false")
    for number, (devices, inline) in enumerate(runs):
        pools = f"pools={{train: {{devices: 1}}, gen: {{devices: {devices}}}}}"
        run_graph(graph, (*settings, pools), run_dir=Path(str(number)), inline=inline)
    assert same_weights("0", "1")
    weights = [load_file(f"{run}/models/policy/model.safetensors") for run in ("0", "2")]
    for name, weight in weights[0].items():  # other batches are rounded otherwise; the samples are the same
        assert weight.allclose(weights[1][name], atol=2e-6), name


@pytest.mark.parametrize("staleness", [0, 2])
def test_in_order_a_resumed_run_is_the_one_that_went_on(staleness: int) -> None:
    stream = f"{{staleness: {staleness}, order: in_order, chunk: 6}}"
    settings = f"schedule={{iterations: 8, save_every: 3, buffer: {stream}}}"
    run("a", settings, steps=3)
    assert run("a", settings, resume=True) == run("b", settings)


def test_prompts_that_a_filter_drops_before_generation_leave_others_as_they_are() -> None:
    ops = Path(__file__).parent / "stream_ops.py"
    nodes = f"few: {{op: '{ops}:few'}}, whole: {{op: filter.all, refill: true}}"
    text = f"graph: chosen\nextends: {GRAPH}\nedits:\n  - add: {{{nodes}}}\n"
    text += "  - set: {numbers.pool: gen, drawn.rows: few, update.rows: whole}\n"
    Path("chosen.yaml").write_text(text)
    prompts = check(run("a", "schedule.buffer.chunk=3", graph="chosen.yaml"), 2, whole=False)
    assert all(prompt % 3 != 1 for prompt in prompts)


POLICIES = """
def none(waiting, wanted):
    return []

def wrong(waiting, wanted):
    return [-1]

def late(waiting, wanted):
    return sorted(range(len(waiting)), key=lambda i: -waiting[i].prompt)
"""


def test_a_function_says_which_groups_come_next_and_one_that_takes_none_leaves_the_order() -> None:
    Path("policies.py").write_text(POLICIES)
    orders = {"a": "fifo", "b": "policies.py:none", "c": "policies.py:late"}
    stream = "schedule.buffer={{staleness: 3, chunk: 40, order: '{}'}}"
    first, same, other = (run(name, stream.format(order)) for name, order in orders.items())
    assert first == same
    assert min(other[0]["groups"]) > max(first[0]["groups"])
    check(other, 3)
    with pytest.raises(RunError, match=r"policies.py:wrong returned"):
        run("d", stream.format("policies.py:wrong"))


def test_nothing_is_kept_of_rows_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[RunningRegion] = []

    def noted(*args: Any) -> RunningRegion:
        regions.append(RunningRegion(*args))
        return regions[-1]

    monkeypatch.setattr("rlgraph.runtime.segments.RunningRegion", noted)
    Path("policies.py").write_text(POLICIES)
    run("a", "schedule.buffer={staleness: 1, too_old: drop, chunk: 8, order: 'policies.py:late'}")
    assert sum(line["finished/dropped"] for line in metrics("a")) > 0
    (region,) = regions
    assert region.clock.times.keys() <= {*region.ledger.in_flight, *region.buffer.prompts.tolist()}
    assert region.ledger.row_prompts == region.buffer.prompts.tolist()
    assert region.ledger.row_weights == region.buffer.iterations.tolist()


def test_a_source_that_gives_fewer_rows_than_asked_for_is_named() -> None:
    with pytest.raises(RunError, match=r"`numbers` .* returned .* with \d+ rows .* \d+ rows"):
        run("a", f"numbers={{op: '{Path(__file__).parent / 'stream_ops.py'}:few_numbers', batch: 8}}")
