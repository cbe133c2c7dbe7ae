"""Metrics are the same number however their rows are cut, and a name is of one kind."""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.errors import RunError
from rlgraph.ops import SPREAD, Context, Metric
from rlgraph.runtime.engines.metric_sums import MetricSums

KINDS = ("mean", "sum", *SPREAD[1:], "p1", "p50", "p90")
FLOATS = st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 1e-300, 1e15, 1e15 + 2])
ROWS = st.lists(FLOATS, min_size=1, max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=6)


def cut(rows: Sequence[float], at: Sequence[int]) -> list[Sequence[float]]:
    places = [0, *sorted(at), len(rows)]
    return [rows[start:end] for start, end in pairwise(places)]


@given(ROWS, CUTS, st.randoms())
def test_no_cut_into_devices_or_rounds_shows_in_any_digit(rows: list[float], at: list[int], draw) -> None:
    shuffled = draw.sample(rows, len(rows))
    for kind in KINDS:
        whole = Metric.of(kind, rows, "samples")
        parts = [pickle.loads(pickle.dumps(Metric.of(kind, part, "samples"))) for part in cut(shuffled, at)]
        assert reduce(add, parts).value == whole.value, kind
        assert reduce(add, parts).parts == whole.parts, kind


@given(ROWS)
def test_kinds_are_what_statistics_says(rows: list[float]) -> None:
    value = {kind: Metric.of(kind, rows, "samples").value for kind in KINDS}
    exact = statistics.pvariance(map(statistics.Fraction, rows))
    assert value["mean"] == pytest.approx(statistics.mean(rows), rel=1e-15)
    assert value["std"] == pytest.approx(math.sqrt(exact), rel=1e-12)
    assert (value["min"], value["max"]) == (min(rows), max(rows))
    for kind, share in (("p50", 0.5), ("p90", 0.9)):
        nearest = sorted(rows)[math.ceil(len(rows) * share) - 1]
        assert value[kind] == pytest.approx(nearest, rel=1 / 512)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=20), CUTS)
def test_no_cut_into_micro_batches_shows(rows: list[tuple[float, float]], at: list[int]) -> None:
    def explained(part: Sequence[tuple[float, float]]) -> Metric:
        target, error = torch.tensor(part, dtype=torch.float64).reshape(-1, 2).unbind(1)
        sums = {"count": torch.tensor(len(part)), "total": target.sum(), "squares": target.square().sum()}
        of_error = {"error_total": error.sum(), "error_squares": error.square().sum()}
        return Metric("explained", "tokens", sums | of_error)

    whole, sums = explained(rows).value, MetricSums()
    for part in cut(rows, at):
        sums.add_metrics({"explained": explained(part)})
    assert sums.metrics["explained"].value == pytest.approx(whole, rel=1e-6, nan_ok=True)
    targets, errors = zip(*rows, strict=True)
    if statistics.pvariance(targets) > 1e-6:
        expected = 1 - statistics.pvariance(errors) / statistics.pvariance(targets)
        assert whole == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_what_is_not_a_number_of_any_row_is_not_one_of_all() -> None:
    for odd in (math.nan, math.inf, -math.inf):
        for rows in ([odd, 1.0], [1.0, odd]):
            for kind in KINDS:
                if (kind, odd) not in (("min", math.inf), ("max", -math.inf)):
                    metric = Metric.of(kind, rows[:1], "samples") + Metric.of(kind, rows[1:], "samples")
                    assert math.isnan(metric.value), (kind, rows)
    assert all(math.isnan(Metric.of(kind, [], "samples").value) for kind in KINDS if kind != "sum")


def test_an_op_records_several_kinds_under_one_beginning() -> None:
    ctx = Context("margins", 0, 0, over="samples")
    ctx.record("margin/", torch.tensor([1.0, 3.0]), kind=("mean", "std", "max"))
    ctx.record("length_", [5], kind=("p90",))
    ctx.record("cut", [True, False], kind="share")
    ctx.record("cut", 3, count=8, kind="share")
    found = {name: (metric.value, metric.over) for name, metric in ctx.metrics.items()}
    assert found == {
        "margin/mean": (2.0, "samples"),
        "margin/std": (1.0, "samples"),
        "margin/max": (3.0, "samples"),
        "margins/length_p90": (5.0, "samples"),
        "margins/cut": (0.4, "samples"),
    }


def test_the_op_of_the_documents_records_what_they_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    ctx = Context("margin", 0, 0)
    names["margin"](ctx, torch.tensor([2.0, 4.0]), torch.tensor([1.0, 5.0]))
    assert {name: metric.value for name, metric in ctx.metrics.items()} == {
        "margin/margin": 0.0,
        "margin/std": 1.0,
        "margin/min": -1.0,
        "margin/p90": 1.0,
        "margin/correct": 0.5,
        "margin/pairs": 2.0,
    }


WRONG = {
    "unknown": (
        {"kind": "maximum"},
        "a metric can't be `maximum`: kinds are mean, share, sum, min, max, std, and percentiles, p1 to p99"
        "\n  did you mean `max`?",
    ),
    "not of rows": ({"kind": "explained"}, "a metric can't be `explained`"),
    "another kind": (
        {"kind": "max"},
        "`node` records `node/x` as a max over rows, and as a mean over rows: a name has one kind and "
        "domain\n  record one of them under a name of its own, such as node/x_max",
    ),
    "another domain": ({"over": "tokens"}, "as a mean over tokens, and as a mean over rows"),
    "no share": ({"kind": "share"}, "its values are 0 and 1\n  record a mean: kind='mean'"),
    "no count": ({"kind": "std", "count": 2}, "a sum and its count make a mean or a share, and not a `std`"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_an_op_may_not_record(case: str) -> None:
    options, law = WRONG[case]
    ctx = Context("node", 0, 0)
    ctx.record("x", [1.0])
    with pytest.raises(RunError) as raised:
        ctx.record("x", 0.5, **options)
    assert law in str(raised.value)
