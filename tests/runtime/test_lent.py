"""A pool that trains and waits draws some of what another has begun: no sample and no promise is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ran import metrics
from test_stream import check, run

from rlgraph.nodes.support.record_file import about, read, steps_of

ONES = str(Path(__file__).parent / "ones.yaml")
pytestmark = pytest.mark.usefixtures("in_demo")


def lent_rounds(run_dir: str) -> float:
    return sum(line["finished/lent_rounds"] for line in metrics(run_dir))


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_rounds_run_on_both_pools_and_no_promise_changes(staleness: int) -> None:
    iterations = run("a", f"schedule.buffer={{staleness: {staleness}, chunk: 2, lend: true}}")
    check(iterations, staleness)
    assert lent_rounds("a") > 0
    assert max(line["finished/age_max"] for line in metrics("a")) <= staleness


@pytest.mark.parametrize("too_old", ["drop", "correct"])
def test_what_is_too_old_is_dropped_or_used(too_old: str) -> None:
    iterations = run("a", f"schedule.buffer={{staleness: 1, too_old: {too_old}, chunk: 2, lend: true}}")
    check(iterations, 1 if too_old == "drop" else 8, whole=False)
    assert lent_rounds("a") > 0


def test_a_run_goes_on_with_what_both_pools_have_begun() -> None:
    settings = "schedule={iterations: 8, save_every: 3, buffer: {staleness: 2, chunk: 4, lend: true}}"
    run("a", settings, steps=3)
    state = json.loads(Path("a/checkpoints/step-000003/state.json").read_text())
    assert state["waiting"]["finished"]
    check(run("a", settings, resume=True), 2)


@pytest.mark.slow
def test_a_pool_is_lent_with_its_own_weights_while_an_evaluation_has_newer_ones(run_on_devices: Any) -> None:
    """Evaluations bring weights to the pool that generates, and to no pool that is lent."""
    stream = "schedule={iterations: 4, buffer: {staleness: 1, chunk: 2, lend: true}}"
    settings = ("pools={train: {devices: 1}, gen: {devices: 1}}", "rollout.max_new_tokens=24", "eval.every=1")
    run_on_devices(
        ONES, "--run-dir", "a", *settings, "update_policy.in.old_logprobs=rollout_logprobs", stream
    )
    lines = metrics("a")
    assert len([line for line in lines if "eval/accuracy" in line]) == 5
    assert sum(line["finished/lent_rounds"] for line in lines[1:]) > 0


def recorded(run_dir: str) -> dict[tuple[int, ...], list[tuple[Any, Any]]]:
    """Of each prompt that was used, the tokens and log-probs of its samples."""
    made: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
    for folder in steps_of(Path(run_dir)).values():
        columns: dict[str, Any] = {}
        for path in folder.glob("*.parquet"):
            columns |= read(path, [*about(path).types])
        names = ("tokens/finished", "rollout_logprobs/finished", "loss_mask/finished")
        for row, last in enumerate(columns[names[0]].offsets[1:]):
            first = columns[names[0]].offsets[row]
            tokens, logprobs, mask = (columns[name].values[first:last] for name in names)
            made.setdefault(tuple(tokens[: mask.argmax()].tolist()), []).append((tokens, logprobs))
    return made


@pytest.mark.slow
def test_a_sample_is_the_same_whichever_pool_draws_it(run_on_devices: Any) -> None:
    """Of an iteration all is drawn in it, and rounds of processes are under way on both pools at once."""
    stream = "schedule={iterations: 4, record_every: 1, buffer: {staleness: 0, chunk: 2, lend: LEND}}"
    settings = ("models.policy.optimizer={lr: 1e-30, weight_decay: 0}", "eval.before=false")  # weights stay
    settings += ("pools={train: {devices: 1}, gen: {devices: 2}}", "rollout.max_new_tokens=24")
    settings += ("update_policy.in.old_logprobs=rollout_logprobs",)
    for name, lend in (("lent", "true"), ("alone", "false")):
        run_on_devices(ONES, "--run-dir", name, *settings, stream.replace("LEND", lend))
    assert sum(line["finished/lent_tokens"] for line in metrics("lent")) > 50
    one, other = recorded("lent"), recorded("alone")
    both = [prompt for prompt in one if len(one[prompt]) == len(other.get(prompt, ())) == 4]
    assert len(both) > 10
    for prompt in both:
        for (tokens, logprobs), (others, measured) in zip(one[prompt], other[prompt], strict=True):
            assert tokens.tolist() == others.tolist()
            assert logprobs.tolist() == pytest.approx(measured.tolist(), abs=1e-5)
