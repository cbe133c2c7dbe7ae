"""docs/cost_model.md shows what benchmarks/published.py prints, and says no more than that."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


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
    first = published.RUNS[0]
    mean = published.inferred_length(first)
    again = published.of_length(first, mean)
    assert published.middle(again, "old log-probs") == pytest.approx(108, rel=1e-3)
    assert {run.minibatches for run in published.RUNS} == {published.LLAMA.minibatches}


def test_half_as_long_on_twice_the_devices_but_for_generation(published: ModuleType) -> None:
    """As was measured, generation shrinks less than the rest: its tail stays."""
    small, large = (published.of_length(run, 769) for run in published.RUNS[:2])
    update, generation = (
        published.middle(small, phase) / published.middle(large, phase) for phase in ("update", "generation")
    )
    assert generation < update <= 2.05
