"""Columns with fixed axes keep each value with its row: moved, shared, recorded, repeated, selected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Target
from rlgraph.nodes.data.recorded import load as load_recorded
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.record_file import RecordMetadata, read, steps_of, write
from rlgraph.ops.column_types import ColumnType
from rlgraph.printing.column_text import lineage_text
from rlgraph.runtime.columns.chunk import LONG_ROW, Chunk, concat, gather, load, save, unpack
from rlgraph.runtime.columns.shared_memory import LEAST
from rlgraph.runtime.columns.store import Store
from rlgraph.runtime.messages.tasks import HOST, ColumnRef, Task

HERE = Path(__file__).parent
OPS = HERE / "axes_ops.py"
GRAPH = f"""
graph: axes
extends: {HERE / "ones.yaml"}
edits:
  - remove: [eval]
  - set: {{schedule: {{iterations: 1, record_every: 1}}}}
  - add:
      marks: {{op: '{OPS}:marks', places: 3}}
      pairs: {{op: '{OPS}:pairs'}}
  - replace: {{rewards: {{op: '{OPS}:checked'}}}}
"""


def part(lengths: list[int], *fixed: int, dtype: Any = np.int16) -> Chunk:
    shape = (sum(lengths), *fixed)
    return Chunk(np.arange(np.prod(shape), dtype=dtype).reshape(shape), np.cumsum([0, *lengths]))


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), long=st.booleans(), data=st.data())
def test_rows_are_gathered_with_all_of_their_values(lengths: list[int], long: bool, data: Any) -> None:
    held = part([length * LONG_ROW * 2 * long + length for length in lengths], 2, 3)
    picks = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))
    taken, both = gather([held], picks), concat([held, held])
    rows = [unpack(held)[row] for row in range(len(lengths))]
    assert all(a.equal(rows[b]) for a, b in zip(unpack(taken), picks, strict=True))
    assert taken.values.shape[1:] == (2, 3) and taken.values.dtype == np.int16
    assert unpack(both)[len(lengths)].equal(rows[0])
    assert unpack(gather([held, held], [len(lengths)]))[0].equal(rows[0])


def test_a_padded_row_and_a_sum_have_the_fixed_axes() -> None:
    rows = Ragged(torch.arange(12.0).view(3, 2, 2), torch.tensor([0, 2, 3]))
    assert rows.padded(-1.0).shape == (2, 2, 2, 2) and rows.padded(-1.0)[1, 1].eq(-1).all()
    assert rows.sum().equal(torch.stack([rows[0].sum(0), rows[1].sum(0)]))
    assert rows.take(torch.tensor([1, 0]))[0].equal(rows[1])


@pytest.mark.parametrize("kind", ["ragged", "plain"])
def test_files_give_back_shape_and_type(kind: str, tmp_path: Path) -> None:
    held = part([2, 0, 3], 2, 3) if kind == "ragged" else Chunk(np.arange(12, dtype=np.float32).reshape(3, 4))
    save(str(tmp_path / "part.npz"), [held])
    write(tmp_path / "x.parquet", RecordMetadata("samples", None, 1, {"x": "int64[samples, 2]"}), {"x": held})
    for back in (load(str(tmp_path / "part.npz"))[0], read(tmp_path / "x.parquet", ["x"])["x"]):
        assert back.values.dtype == held.values.dtype and np.array_equal(back.values, held.values)
        assert (back.offsets is None) == (kind == "plain")
        assert kind == "plain" or np.array_equal(back.offsets, held.offsets)


def test_shared_memory_holds_the_array_as_it_is() -> None:
    store, reader = Store("rlgraph-test-axes"), Store("rlgraph-test-axes-reader")
    held = part([LEAST // 12 + 1, 2], 2, 3)
    try:
        ref = ColumnRef("routing", HOST)
        (placed,) = store.put(Task("run", (), outputs=(ref,)), [held])
        assert isinstance(placed, ColumnRef)
        (found,) = reader.arguments(Task("run", (), inputs=(ColumnRef("routing", 0),)), [placed])
        assert np.array_equal(found.values, held.values) and not found.values.flags.writeable
        assert unpack(found).values.shape == held.values.shape
    finally:
        store.close()
        reader.close()


@pytest.mark.usefixtures("in_demo")
def test_the_plan_knows_sizes_and_bytes() -> None:
    Path("axes.yaml").write_text(GRAPH)
    plan = compile_graph("axes.yaml", ["marks.places=5"], 2)
    column = plan.columns["train"]["marks"]
    assert (column.type, column.sizes) == ("int64[samples, tokens, places, 2]", (5, 2))
    said = lineage_text(plan, "marks").splitlines()[0]
    assert said == "marks: int64[samples, tokens, places, 2], places = 5, 20 bytes (int16) per token"
    copies = [c for c in plan.columns["train"].values() if c.origin == "pairs"]
    assert {(c.type, c.sizes) for c in copies} == {
        ("float32[prompts, 2]", (2,)),
        ("float32[samples, 2]", (2,)),
    }


@pytest.mark.usefixtures("in_demo")
def test_what_moves_is_priced_with_all_of_its_values() -> None:
    Path("axes.yaml").write_text(GRAPH.replace(":checked'", ":together'"))
    moved = []
    for places in (3, 6):
        plan = compile_graph("axes.yaml", [f"marks.places={places}"], 2, Target("cpu"))
        (step,) = [s for s in plan.steps if s.kind == "repartition" and "marks" in s.reads]
        moved.append(step.bytes)
    assert moved[1] == pytest.approx(2 * moved[0], rel=1e-6) and moved[0] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_checks_every_value_and_a_record_holds_them(
    devices: int, run_on_devices: Callable[..., str]
) -> None:
    Path("axes.yaml").write_text(GRAPH)
    run_on_devices("axes.yaml", "--devices", str(devices), "--run-dir", "kept")
    (metrics,) = map(json.loads, Path("kept/metrics.jsonl").read_text().splitlines())
    assert metrics["rewards/checked"] > 0
    kinds = {
        "marks": ColumnType.parse("int64[samples, tokens, 3, 2]"),
        "tokens": ColumnType.parse("int64[samples, tokens]"),
    }
    columns = load_recorded(steps_of(Path("kept"))[1], kinds)
    assert columns["marks"].values.dtype == torch.int64
    assert columns["marks"].values[:, 2, 1].equal((3 * columns["tokens"].values - 1).short().long())
