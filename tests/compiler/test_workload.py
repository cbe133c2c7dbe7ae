"""How much work an iteration is: rows, tokens, and how long responses are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.compiler import compile_graph
from rlgraph.costs.workload import workload
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.lengths import Lengths
from rlgraph.reports.plan_file import compile_again, load


@pytest.mark.parametrize(("mean", "longest"), [(512, 1024), (100, 1024), (1000, 1024), (700, 28_000)])
def test_lengths_have_their_mean(mean: float, longest: float) -> None:
    lengths, points = Lengths(mean, longest), 20_000
    alive = [math.exp(-lengths.rate * (i + 0.5) * longest / points) for i in range(points)]
    assert sum(alive) * longest / points == pytest.approx(mean, rel=1e-3)
    square = sum(2 * (i + 0.5) * longest / points * a for i, a in enumerate(alive)) * longest / points
    assert lengths.square == pytest.approx(square, rel=1e-3)


def test_responses_that_all_reach_the_limit() -> None:
    lengths = Lengths(100, 100)
    assert lengths.square == 100**2 and lengths.of_longest(7) == 100
    assert {live for _, live, _ in lengths.alive(7)} == {7}


def test_percentiles_are_those_that_are_said() -> None:
    lengths = Lengths.of({"p50": 100, "p90": 300, "p99": 2000}, 1e9)
    assert [lengths.at(share) for share in (0.5, 0.9, 0.99)] == pytest.approx([100, 300, 2000])
    assert sum(lengths.spread(20_000)) / 20_000 == pytest.approx(lengths.mean, rel=0.01)
    assert lengths.share_longer_than(300) == pytest.approx(0.1, rel=0.01)
    squares = sum(tokens**2 for tokens in lengths.spread(4096)) / 4096
    assert lengths.square == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize(("mean", "limit"), [(50, 8000), (700, 8000), (7500, 8000)])
def test_percentiles_beside_a_mean_are_a_shape(mean: float, limit: float) -> None:
    lengths = Lengths.of({"mean": mean, "p50": 1, "p99": 10}, limit)
    spread = lengths.spread(4096)
    assert sum(spread) / 4096 == pytest.approx(mean, rel=1e-3)
    assert max(spread) <= limit
    if lengths.at(0.99) < limit:
        assert lengths.at(0.99) == pytest.approx(10 * lengths.at(0.5))


def test_lengths_that_are_all_alike() -> None:
    lengths = Lengths.of({"p50": 64, "p99": 64}, 8000)
    assert lengths.of_longest(100) == pytest.approx(64) and lengths.spread(2) == pytest.approx([64, 64])


@pytest.mark.parametrize("said", [{"p50": 9}, {"p50": 9, "p90": 8}, {"p0": 1, "p50": 9}, {"median": 9}])
def test_what_is_no_distribution_is_refused(said: dict[str, float]) -> None:
    with pytest.raises(GraphError, match=r"is not a percentile|two percentiles or more"):
        Lengths.of(said, 100)


def test_lengths_are_given_or_those_of_a_run(tmp_path: Path) -> None:
    lines = [
        {"step": n + 1, "time/step": 1.0, "rollout/length": 200.0, "rollout/length_p50": p50}
        | {"rollout/length_p10": 20.0, "rollout/length_p90": 400.0, "rollout/length_p99": 900.0}
        for n, p50 in enumerate((1.0, 90.0, 110.0))  # the first iteration warms up
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def told(given: str) -> str:
        result = CliRunner().invoke(main, ["plan", "grpo", "--cluster", "h100-8", "--response-tokens", given])
        return result.output

    assert "lengths p50 100, p99 900 up to 1,024" in told("p50=100,p99=900")
    measured = told(str(tmp_path))
    assert "responses of 200 tokens (--response-tokens), lengths p10 2" in measured
    assert "lengths exponential" in told("800")
    assert "two percentiles or more" in told("p50=100")
    assert "runs/none holds no run" in told("runs/none")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    assert "has not generated" in told(str(tmp_path))


def test_rows_and_tokens_come_from_the_graph() -> None:
    work = workload(compile_graph("grpo", ["rollout.n=16"], 2))
    assert work.rows["prompts"] == 128 and work.rows["samples"] == 2048
    assert (work.prompt, work.longest_prompt) == (256, 512)
    assert (work.responses.mean, work.responses.longest) == (512, 1024)
    given = workload(compile_graph("grpo", (), 2), 100, 5000)
    assert (given.prompt, given.responses.mean) == (100, 1024)


def test_responses_that_a_limit_cuts_are_said_to_be() -> None:
    work = workload(compile_graph("grpo", (), 2), response_tokens=5000)
    said = "responses of 1,024 tokens (max_new_tokens, which --response-tokens 5000 exceeds)"
    assert any(said in line for line in work.assumed), work.assumed


@pytest.mark.parametrize(
    ("settings", "asked", "mean", "longest", "origin"),
    [
        (("examples.max_tokens=null",), 6000, 6000, 12000, "(--response-tokens)"),
        (("examples.max_tokens=null",), None, 512, 1024, "(assumed; --response-tokens)"),
        (("examples.max_tokens=4001",), None, 2000, 4000, "(half of max_tokens; --response-tokens)"),
        (
            ("examples.max_tokens=4001",),
            6000,
            4000,
            4000,
            "(max_tokens, which --response-tokens 6000 exceeds)",
        ),
    ],
)
def test_recorded_responses_are_as_long_as_their_source_allows(
    settings: tuple[str, ...], asked: float | None, mean: float, longest: float, origin: str
) -> None:
    work = workload(compile_graph("sft", settings, 2), response_tokens=asked)
    assert (work.responses.mean, work.responses.longest) == (mean, longest)
    assert any(f"responses of {mean:,} tokens {origin}" in line for line in work.assumed), work.assumed


def test_a_filter_is_taken_to_keep_every_row() -> None:
    work = workload(compile_graph("dapo", (), 2))
    assert work.rows["samples/informative"] == work.rows["samples"]
    assert "filters keep every row" in work.assumed


def test_a_filter_keeps_what_is_said() -> None:
    plan = compile_graph("best_of_n", (), 2)
    for said in ({"": 0.125}, {"best": 0.125}):
        work = workload(plan, kept_rows=said)
        assert work.rows["samples/best"] == work.rows["samples"] / 8
        assert "`best` keeps 0.125 of its rows (--kept-rows)" in work.assumed
    with pytest.raises(GraphError, match=r"`other` is not a filter .*\n  accepted: best"):
        workload(plan, kept_rows={"other": 0.5})
    with pytest.raises(GraphError, match=r"there is no filter .*\n  one with `refill` says it itself"):
        workload(compile_graph("dapo", (), 2), kept_rows={"": 0.5})


def test_rows_that_go_take_no_time_and_the_memory_that_they_may_take() -> None:
    path = ["models.policy.path=Qwen/Qwen2.5-7B"]
    all_rows, few = (
        compile_graph("best_of_n", path, target=Target("h100-8", kept_rows=kept)) for kept in ({}, {"": 0.01})
    )
    before, after = (next(s.seconds for s in plan.steps if s.updated) for plan in (all_rows, few))
    assert before and after and after[0] < before[0] / 5
    assert few.peak == all_rows.peak


def test_conversations_have_turns_between_which_tools_take_time() -> None:
    plan = compile_graph("search_tool", (), 2)
    rollout = plan.functions["train"]["rollout"]
    assert workload(plan).turns_of(rollout) == rollout.attributes["max_turns"] / 2
    assert workload(plan, turns=100).turns_of(rollout) == rollout.attributes["max_turns"]
    assert workload(plan, turns=3).turns_of(compile_graph("grpo", (), 2).functions["train"]["rollout"]) == 1

    def seconds(**said: float) -> tuple[float, float]:
        target = Target("h100-8", **said)  # type: ignore[arg-type]
        took = next(s.seconds for s in compile_graph("search_tool", target=target).steps if s.generates)
        assert took
        return took

    quick, slow, longer = (seconds(turns=t, tool_seconds=s) for t, s in ((3, 0), (3, 5), (4, 5)))
    assert slow[0] == pytest.approx(quick[0] + 2 * 5)
    assert slow[1] >= quick[1] + 2 * 5
    assert longer[0] == pytest.approx(quick[0] + 3 * 5) and longer[1] > slow[1] + 5
    said = workload(plan, turns=3, tool_seconds=5).assumed
    assert "`rollout` has 3 turns (--turns), tools take 5 s per turn (--tool-seconds)" in said


def test_assumptions_are_options_and_come_back_from_a_saved_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["--kept-rows", "best=0.25", "--turns", "2", "--tool-seconds", "1.5"]
    args = ["plan", "best_of_n", "--cluster", "h100-8", *options, "-o", str(path)]
    assert CliRunner().invoke(main, args).exit_code == 0
    plan = load(path)
    target = Target("h100-8", kept_rows={"best": 0.25}, turns=2, tool_seconds=1.5)
    assert plan.origin and plan.origin.target == target and compile_again(path).plan == plan
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(GraphError, match=r"--turns 2 --tool-seconds 1.5 --kept-rows best=0.25"):
        load(path)
    for wrong in ("2", "best=", "0"):
        assert CliRunner().invoke(main, ["plan", "best_of_n", "--kept-rows", wrong]).exit_code == 2


OWN_OP = """
from rlgraph.ops import float32, op, samples, text


@op()
def length(
    responses: text[samples], *,
    max_prompt_tokens: int = 7000, max_new_tokens: int = 9, batch: int = 3, epochs: int = 5,
) -> float32[samples]:
    "Shorter is better."
    return -responses
"""


def planned(folder: Path, declared: str) -> Plan:
    """GRPO with an op of the user's in place of its reward."""
    (folder / "mine.py").write_text(OWN_OP.replace("@op()", declared))
    path = folder / "mine.yaml"
    path.write_text("graph: grpo\nextends: grpo\nedits:\n- set: {rewards: {op: 'mine.py:length'}}\n")
    return compile_graph(str(path), devices=2)


def test_an_attribute_means_nothing_by_its_name(tmp_path: Path) -> None:
    own = planned(tmp_path, "@op()")
    assert own.functions["train"]["rewards"].attributes["max_prompt_tokens"] == 7000
    assert workload(own) == workload(compile_graph("grpo", devices=2))


def test_an_attribute_means_what_its_op_declares(tmp_path: Path) -> None:
    work = workload(planned(tmp_path, "@op(roles={'prompt_limit': 'max_prompt_tokens'})"))
    assert (work.prompt, work.longest_prompt) == (3500, 7000)
    (tmp_path / "wrong").mkdir()
    with pytest.raises(GraphError, match="roles"):
        planned(tmp_path / "wrong", "@op(roles={'prompt_limit': 'longest'})")
