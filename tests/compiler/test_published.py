"""docs/cost_model.md shows what benchmarks/published.py prints, and says no more than that."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MEAN = 1097


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)

    sys.modules["published"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_table(published: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    published.main()
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "cost_model.md").read_text(encoding="utf-8")


def test_only_the_length_is_inferred(published: ModuleType) -> None:
    mean = published.inferred_length(published.BASE)
    again = published.of_length(published.BASE, mean)
    assert published.middle(again, "old log-probs") == pytest.approx(70, rel=1e-3)
    assert {run.minibatches for run in published.RUNS} == {published.LLAMA.minibatches}


def test_half_as_long_on_twice_the_devices_but_for_generation(published: ModuleType) -> None:
    """As was measured, generation shrinks less than the rest: its tail stays."""
    small, large = (published.of_length(run, MEAN) for run in published.RUNS[:2])
    update, generation = (
        published.middle(small, phase) / published.middle(large, phase) for phase in ("update", "generation")
    )
    assert generation < update <= 2.05


def test_what_was_calibrated_on_is_met_and_not_held_out(published: ModuleType) -> None:
    base = published.of_length(published.BASE, MEAN)
    met = published.calibrated(base, published.factors(base))
    for phase in ("generation", "old log-probs", "update"):
        assert met[phase] == pytest.approx(base.measured[phase])
    assert met["step"] == pytest.approx(365, rel=0.05)  # what is not a phase is not calibrated
    held = {name for name, *_ in published.held_out(MEAN)}
    assert held == {run.name for run in (*published.RUNS, published.LLAMA)} - {base.name}


def test_what_is_held_out_decides_nothing(published: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = [row[3] for row in published.held_out(MEAN)]
    runs = [
        run if run is published.BASE else replace(run, measured=dict.fromkeys(run.measured, 1.0))
        for run in published.RUNS
    ]
    monkeypatch.setattr(published, "RUNS", tuple(runs))
    changed = [*published.held_out(MEAN)]
    assert [row[3] for row in changed] == predicted
    assert [row[2] for row in changed][:8] == [1.0] * 8


def test_the_errors_that_the_page_names(published: ModuleType) -> None:
    mean = published.inferred_length(published.BASE)
    errors = {(name, phase): seconds / took - 1 for name, phase, took, seconds in published.held_out(mean)}
    phases = [abs(error) for (name, phase), error in errors.items() if "H20" in name and phase != "step"]
    assert (round(min(phases), 2), round(max(phases), 2)) == (0.01, 0.40)
    steps = [round(error, 2) for (_, phase), error in errors.items() if phase == "step"]
    assert steps == [-0.19, -0.36, 0.44]
