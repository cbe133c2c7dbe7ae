"""Layouts hold every row once; balanced ones are balanced in each mini-batch; columns survive being moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlgraph.ir.plan import ColumnPlan, ModelPlan, TrainPlan
from rlgraph.ir.steps import NONE
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops.column_types import ColumnType
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.columns.chunk import Chunk, concat, empty, gather, pack, unpack
from rlgraph.runtime.driver.rows import Rows

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LENGTHS = st.lists(st.integers(1, 500), max_size=60)
quick = settings(deadline=None, max_examples=80, derandomize=True)


def held(layout: layouts.Layout) -> list[int]:
    return sorted(row for rows in layout for row in rows.tolist())


@quick
@given(rows=st.integers(0, 50), devices=st.integers(1, 8), times=st.integers(1, 5))
def test_every_row_is_somewhere_once(rows: int, devices: int, times: int) -> None:
    for layout in (layouts.one(rows, devices), layouts.even(rows, devices)):
        assert len(layout) == devices
        assert held(layout) == list(range(rows))
        assert held(layouts.children(layout, times)) == list(range(rows * times))
    sizes = [len(share) for share in layouts.even(rows, devices)]
    assert max(sizes) - min(sizes) <= 1
    for span in (2, 4):  # consecutive devices, as a server has
        together = [sum(sizes[first : first + span]) for first in range(0, devices, span)]
        assert devices % span or max(together) - min(together) <= 1


@quick
@given(lengths=LENGTHS, devices=st.integers(1, 8), minibatches=st.integers(1, 4))
def test_balanced_layouts_spread_the_work_of_each_minibatch(
    lengths: list[int], devices: int, minibatches: int
) -> None:
    weights = np.array(lengths, np.int64)
    layout = layouts.balanced(weights, devices, minibatches)
    assert len(layout) == devices and held(layout) == list(range(len(lengths)))
    assert all((np.diff(rows) > 0).all() for rows in layout)
    owner = np.arange(len(lengths)) * minibatches // max(len(lengths), 1)
    for number in range(minibatches):
        loads = [int(weights[rows[owner[rows] == number]].sum()) for rows in layout]
        # no bin is over the lightest by more than the heaviest row: else a row could move
        assert max(loads) - min(loads) <= max(lengths, default=0)


def heaviest(work: Any, groups: Any, devices: int) -> float:
    return float(np.bincount(groups, work, devices).max() * devices / work.sum())


@pytest.mark.parametrize(("rows", "devices"), [(16, 2), (64, 8), (256, 64), (512, 8), (1024, 128)])
def test_the_busiest_device_has_hardly_more_than_the_best_there_is(rows: int, devices: int) -> None:
    for seed in range(20):
        work = np.random.default_rng(seed).exponential(1000, rows).astype(np.int64) + 100
        best = max(1.0, float(work.max() * devices / work.sum()))
        assert heaviest(work, layouts.spread(work, devices), devices) <= 1.02 * best


def test_swaps_mend_what_going_by_size_gets_wrong() -> None:
    # the largest first would make it 3 + 2 + 2 and 3 + 2
    assert heaviest(np.array([3, 3, 2, 2, 2]), layouts.spread(np.array([3, 3, 2, 2, 2]), 2), 2) == 1.0


class Reported(Rows):
    """Rows whose lengths are known."""

    def lengths(self, domain: str) -> Any:
        return np.array([4096, 1024, 1024, 1024, 1024, 0])


def test_a_long_row_is_more_work_than_short_ones_of_as_many_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    long, *short = Reported({}, (), {}, {}, {"policy": model(str(tmp_path))}).work("samples")
    share = 2 * 4 * 64 / (4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 100 * 64)
    assert long == round(4096 * (1 + share * 2048)) and long > 2 * sum(short)
    # by work the long row has a device to itself, and two of the short ones would not be as much
    spread = layouts.balanced(np.array([long, *short]), 2, 1)
    assert sorted(rows.tolist() for rows in spread)[0] == [0]
    unknown = Reported({}, (), {}, {}, {"policy": model("nobody/knows")}).work("samples")
    assert unknown.tolist() == [4096, 1024, 1024, 1024, 1024, 0]


def model(path: str) -> ModelPlan:
    return ModelPlan(path, "lm", True, None, TrainPlan(pool="main"), None)


@quick
@given(rows=st.integers(1, 40), devices=st.integers(1, 4), data=st.data())
def test_rows_that_a_filter_kept_stay_where_they_were(rows: int, devices: int, data: Any) -> None:
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1)))), np.int64)
    whole = layouts.even(rows, devices)
    part = layouts.some(whole, kept)
    assert held(part) == list(range(len(kept)))
    for before, after in zip(whole, part, strict=True):
        assert set(kept[after].tolist()) == set(before.tolist()) & set(kept.tolist())


def test_where_a_row_is() -> None:
    device, place = layouts.where([np.array([2, 0]), np.array([1])], 3)
    assert device.tolist() == [0, 1, 0]
    assert place.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.5, -2.0]),
        torch.tensor([True, False]),
        Ragged.of([[1, 2, 3], [], [4]]),
        ["a", ""],
    ],
)
def test_packing_and_back(value: Any) -> None:
    back = unpack(pack(value))
    assert (back.tolist() if hasattr(back, "tolist") else back) == (
        value.tolist() if hasattr(value, "tolist") else value
    )


def test_a_ragged_column_without_rows_is_a_column() -> None:
    part = pack(Ragged.of([], torch.float32))
    assert len(part) == 0
    assert part.offsets.tolist() == [0]


@quick
@given(rows=st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8), data=st.data())
def test_taking_rows_and_laying_parts_end_to_end(rows: list[list[int]], data: Any) -> None:
    part = pack(Ragged.of(rows, torch.int64))
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    taken = gather([part], np.array(picks, np.int64))
    assert unpack(taken).tolist() == [rows[pick] for pick in picks]
    both = concat([part, taken])
    assert unpack(both).tolist() == rows + [rows[pick] for pick in picks]
    assert both.lengths.tolist() == [len(row) for row in unpack(both).tolist()]


@pytest.mark.parametrize("kind", ["float32[samples]", "int64[samples, tokens]", "text[prompts]"])
def test_an_empty_part_is_of_its_type(kind: str) -> None:
    part = empty(ColumnPlan(ColumnType.parse(kind), "", NONE, "", ""))
    assert len(part) == 0
    assert len(concat([part, part])) == 0
    assert isinstance(part.values, list) == kind.startswith("text")
    assert isinstance(part, Chunk)
