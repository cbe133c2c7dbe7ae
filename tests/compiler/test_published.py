"""benchmarks/published.py prints what its recorded table has, which docs/cost_model.md sums up."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.step_rates import PUBLISHED, rate_of
from rlgraph.ir.plan import Target
from rlgraph.units import middle

ROOT = Path(__file__).parents[2]
PRINTED = ROOT / "benchmarks" / "results" / "published.txt"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_recorded_table_is_what_is_printed(
    published: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    published.main()
    assert capsys.readouterr().out.strip() == PRINTED.read_text(encoding="utf-8").strip()


def test_the_page_shows_the_errors_of_all_parts_of_the_table() -> None:
    page = ROOT / "docs" / "cost_model.md"
    printed, shown = (
        [line for line in file.read_text(encoding="utf-8").splitlines() if ": geometric error" in line]
        for file in (PRINTED, page)
    )
    assert len(printed) == 3 + 5 + 3
    assert shown == printed


@pytest.mark.slow
def test_what_was_measured_decides_nothing_where_lengths_are_published(published: ModuleType) -> None:
    rows = [run for run in published.runs() if not run.inferred]
    assert len(rows) >= 12 and {run.source for run in rows} >= {"nemo-0.4", "nemo-0.5", "nemo-0.6", "llm-d"}
    for run in rows[:2]:
        other = replace(run, seconds=dict.fromkeys(run.seconds, 1.0))
        assert published.with_length(published.fitting(other)).predicted == run.predicted


def test_an_inferred_length_is_the_one_of_the_phase_that_it_names(published: ModuleType) -> None:
    run = next(run for run in published.runs() if run.inferred)
    assert middle(run.predicted[run.inferred]) == pytest.approx(run.seconds[run.inferred], rel=0.01)


def test_a_run_that_does_not_fit_takes_the_first_change_that_is_offered(published: ModuleType) -> None:
    large = next(run for run in published.runs() if run.cluster == "h100-128")
    fits = published.fitting(replace(large, experts=1, server=8))
    assert any(setting.startswith("models.policy.train.") for setting in fits.changed)
    assert fits.planned().predicted


def test_the_error_of_a_prediction_is_the_same_up_and_down(published: ModuleType) -> None:
    assert published.error([2.0]) == pytest.approx(published.error([0.5])) == pytest.approx(2)


def test_the_page_shows_the_shares_of_an_iteration() -> None:
    page = (ROOT / "docs" / "cost_model.md").read_text(encoding="utf-8")
    printed = [line for line in PRINTED.read_text(encoding="utf-8").splitlines() if "longest: " in line]
    assert len(printed) == 6
    for line in printed:
        assert line in page


def test_work_that_was_measured_alone_is_within_its_range(published: ModuleType) -> None:
    outside = []
    for row in published.alone():
        best, worst = row.predicted
        assert worst < 2.9 * best, row.work
        if not best <= row.seconds <= worst:
            outside.append(row.work)
    # its prompts are random tokens, for which a router chooses fewer experts than text does
    assert outside == ["Qwen3-30B-A3B, H100, 10 rows"]


def test_generation_of_a_mixture_on_h20_is_found_to_be_the_longest_phase(published: ModuleType) -> None:
    run = next(run for run in published.runs() if run.run == "Qwen3-30B-A3B, 128 x H20")
    predicted = run.predicted
    assert published.longest(run) == "yes"
    for phase in ("generation", "update", "iteration"):
        best, worst = predicted[phase]
        assert best <= run.seconds[phase] <= worst
    assert predicted["generation"][0] > predicted["update"][1]  # their ranges do not overlap
    # with CUDA graphs, as rlgraph starts SGLang unless it is told otherwise, it takes less than half as long
    captured = replace(run, eager=False).predicted["generation"]
    assert captured[1] < predicted["generation"][0]


def test_the_longest_phase_is_found_or_among_those_that_may_be_it(published: ModuleType) -> None:
    runs = [run for run in published.runs() if not run.apart and {"generation", "update"} <= {*run.seconds}]
    missed = [run.run for run in runs if published.longest(run) == "no"]
    assert len(runs) == 6
    assert missed == ["Qwen2.5-Math-7B, 32 x H20"]  # its mean length is inferred


def test_phases_that_were_published_have_ranges_below_one_to_two(published: ModuleType) -> None:
    for cluster in ("a100-8", "h100-8", "h20-8"):
        settings = [f"models.{name}.path=Qwen/Qwen2.5-7B" for name in ("policy", "ref")]
        plan = compile_graph("grpo", settings, target=Target(cluster))
        for step in plan.steps:
            if rate_of(step) in PUBLISHED:
                assert step.seconds
                best, worst = step.seconds
                assert worst < 2 * best, (cluster, step.node)
        assert plan.predicted
        notes = "\n".join(plan.predicted.assumed)
        assert "seconds of generate, update: within the range of published measurements" in notes
        assert "score, sync: within assumed ranges (--calibration)" in notes
