"""benchmarks/published.py prints what its recorded table has, which docs/cost_model.md sums up."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

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


def test_the_recorded_table_is_what_is_printed(
    published: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    published.main()
    assert capsys.readouterr().out.strip() == PRINTED.read_text(encoding="utf-8").strip()


def test_the_page_shows_the_errors_of_both_parts_of_the_table() -> None:
    page = ROOT / "docs" / "cost_model.md"
    printed, shown = (
        [line for line in file.read_text(encoding="utf-8").splitlines() if ": geometric error" in line]
        for file in (PRINTED, page)
    )
    assert len(printed) == 7
    assert shown == printed


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
