"""What an op returns is checked at once, by form, rows, tokens, finite numbers, and the op is named."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlgraph.errors import RunError
from rlgraph.ir.plan import ColumnPlan
from rlgraph.ir.steps import NONE
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops.column_types import ColumnType
from rlgraph.runtime.messages.errors import RaisedError, portable
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.worker.outputs import ColumnError, Wanted, together

PLAIN, RAGGED, TEXT = "float32[samples]", "int64[samples, tokens]", "text[samples]"
ROWS = [[1, 2, 3], [], [4]]


def wanted(kind: str, rows: int | None = 3, lengths: Any = None, finite: bool = True) -> Wanted:
    return Wanted("`n` (my.py:op)", "x", planned(kind), rows, lengths, finite)


def planned(kind: str, stored: str = "") -> ColumnPlan:
    """Return a column whose fixed axes are numbers."""
    column = ColumnType.parse(kind)
    return ColumnPlan(column, "samples", NONE, "n", "x", sizes=tuple(map(int, column.fixed)), stored=stored)


def ragged(offsets: list[int], dtype: torch.dtype = torch.int64) -> Ragged:
    return Ragged(torch.arange(4), torch.tensor(offsets, dtype=dtype))


CAME = [
    (PLAIN, None, "None"),
    (PLAIN, [1.0, 2.0], "a list of 2 (float) with 2 rows"),
    (PLAIN, {"a": 1.0}, "a dict"),
    ("int64[samples]", torch.zeros(3), "a tensor of float32 [3]"),
    ("boolean[samples]", torch.zeros(3, dtype=torch.int64), "a tensor of int64 [3]"),
    (PLAIN, torch.zeros(3, 1), "a tensor of float32 [3, 1]"),
    (PLAIN, torch.zeros(()), "a tensor of float32 []"),
    (PLAIN, torch.zeros(2), "a tensor of float32 [2] with 2 rows"),
    (PLAIN, torch.zeros(4), "a tensor of float32 [4] with 4 rows"),
    (PLAIN, Ragged.of([[1.0], [], []]), "a Ragged of values a tensor of float32 [1]"),
    (RAGGED, torch.zeros(3, dtype=torch.int64), "a tensor of int64 [3]"),
    (RAGGED, Ragged.of([[1.0], [], []]), "a Ragged of values a tensor of float32 [1]"),
    (RAGGED, Ragged.of([[1]]), "and offsets a tensor of int64 [2] with 1 rows"),
    (RAGGED, Ragged.of([[1, 2], [], [4, 3]]), "with 2 tokens in row 0, which has 3"),
    (RAGGED, ragged([1, 3, 3, 4]), "a Ragged of"),
    (RAGGED, ragged([0, 3, 2, 4]), "a Ragged of"),
    (RAGGED, ragged([0, 3, 3, 5]), "a Ragged of"),
    (RAGGED, ragged([0, 3, 3, 4], torch.int32), "offsets a tensor of int32 [4]"),
    (TEXT, ("a", "b", "c"), "a tuple"),
    (TEXT, ["a", 1, None], "a list of 3 (NoneType, int, str)"),
    (TEXT, ["a"], "a list of 1 (str) with 1 rows"),
    (TEXT, torch.zeros(3), "a tensor of float32 [3]"),
    ("float32[samples, 2]", torch.zeros(3), "a tensor of float32 [3]"),
    ("float32[samples, 2]", torch.zeros(3, 3), "a tensor of float32 [3, 3]"),
    ("float32[samples, 2]", torch.zeros(2, 2), "a tensor of float32 [2, 2] with 2 rows"),
    ("int64[samples, tokens, 2]", Ragged.of(ROWS), "a Ragged of values a tensor of int64 [4]"),
]


@pytest.mark.parametrize(("kind", "value", "came"), CAME)
def test_what_is_not_wanted_is_an_error_of_the_op(kind: str, value: Any, came: str) -> None:
    lengths = [3, 0, 1] if "tokens" in kind else None
    with pytest.raises(ColumnError) as caught:
        wanted(kind, lengths=lengths).packed(value)
    said = str(caught.value)
    assert said.startswith("`n` (my.py:op) returned ") and came in said
    assert f"as column `x`; wanted {kind}: a " in said and ", 3 rows\n" in said


@pytest.mark.parametrize(
    ("kind", "value"),
    [(PLAIN, torch.ones(3)), (RAGGED, Ragged.of(ROWS)), (TEXT, ["a", "", "c"]), (PLAIN, torch.ones(6)[::2])],
)
def test_what_is_wanted_is_packed(kind: str, value: Any) -> None:
    assert len(wanted(kind, lengths=[3, 0, 1] if kind == RAGGED else None).packed(value)) == 3


CONVERTED = [
    (PLAIN, [1, 0.5, True], [1.0, 0.5, 1.0]),
    (PLAIN, (1, 2, 3), [1.0, 2.0, 3.0]),
    (PLAIN, [np.float64(0.5), torch.tensor(2), np.int32(1)], [0.5, 2.0, 1.0]),
    (PLAIN, np.arange(3), [0.0, 1.0, 2.0]),
    (PLAIN, torch.tensor([1, 2, 3]), [1.0, 2.0, 3.0]),
    (PLAIN, torch.tensor([True, False, True]), [1.0, 0.0, 1.0]),
    (PLAIN, torch.tensor([0.5, 1, 2], dtype=torch.float64), [0.5, 1.0, 2.0]),
    (PLAIN, torch.tensor([0.5, 1, 2], dtype=torch.bfloat16), [0.5, 1.0, 2.0]),
    ("int64[samples]", [1, 2, 3], [1, 2, 3]),
    ("int64[samples]", torch.tensor([1, 2, 3], dtype=torch.int32), [1, 2, 3]),
    ("boolean[samples]", [True, False, True], [True, False, True]),
    ("float32[samples, tokens]", Ragged.of(ROWS), [1.0, 2.0, 3.0, 4.0]),
]


@pytest.mark.parametrize(("kind", "value", "values"), CONVERTED)
def test_numbers_of_other_kinds_become_the_column(kind: str, value: Any, values: list[Any]) -> None:
    column = wanted(kind, lengths=[3, 0, 1] if "tokens" in kind else None).packed(value).values
    assert column.tolist() == values
    assert {type(number) for number in column.tolist()} == {type(values[0])}


@pytest.mark.parametrize(
    ("kind", "value", "law"),
    [
        (PLAIN, [1.0, None, 2.0], "a list with None in row 1"),
        (PLAIN, [1.0, 2.0, "3"], "a list with '3' in row 2"),
        (PLAIN, [[1.0], 2.0, 3.0], "a list with [1.0] in row 0"),
        (PLAIN, [1.0, 10**400, 3.0], "in row 1"),
        ("int64[samples]", [1, 2, 3.0], "a list with 3.0 in row 2"),
        ("int64[samples]", [1, 2, 2**63], "a list with 9223372036854775808 in row 2"),
        ("boolean[samples]", [True, 1, False], "a list with 1 in row 1"),
    ],
)
def test_an_element_that_is_not_such_a_number_is_named_with_its_row(kind: str, value: Any, law: str) -> None:
    with pytest.raises(ColumnError) as caught:
        wanted(kind).packed(value)
    assert law in str(caught.value)
    assert re.search(r"\n  return one (number|whole number|True or False) for each row$", str(caught.value))
    beside = Wanted("`n` (my.py:op)", "x", planned(kind), 3, None, True, numbers=(7, 8, 9))
    row = int(law.rpartition(" ")[2])
    with pytest.raises(ColumnError, match=f"in row {7 + row} as column"):
        beside.packed(value)


def test_a_list_may_hold_numbers_that_are_not_finite_where_the_graph_allows_it() -> None:
    assert len(wanted(PLAIN, finite=False).packed([float("nan"), float("-inf"), 1.0])) == 3
    with pytest.raises(ColumnError, match="holds nan in row 0"):
        wanted(PLAIN).packed([float("nan"), 0.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "value", "remedy"),
    [
        (PLAIN, None, "end the function with a return statement"),
        (PLAIN, [1.0], "return one value per row"),
        (PLAIN, torch.zeros(2), "return one value per row"),
        (PLAIN, torch.zeros(3, 1), "give it the shape [rows], as by squeeze"),
        ("float32[samples, 2]", torch.zeros(3, 3), "give it the shape [rows, 2]"),
        ("int64[samples]", torch.zeros(3), "convert it, as value.to(torch.int64)"),
        (TEXT, torch.zeros(3), "return a list of str, one for each row"),
        (TEXT, ["a"], "return one value per row"),
        (RAGGED, torch.zeros(3, dtype=torch.int64), "return a Ragged with the rows and tokens"),
        (RAGGED, Ragged.of([[1, 2], [], [4, 3]]), "return a Ragged with the rows and tokens"),
        (PLAIN, {"a": 1.0}, "return a tensor of float32 or a list of numbers"),
    ],
)
def test_the_remedy_fits_the_mistake(kind: str, value: Any, remedy: str) -> None:
    with pytest.raises(ColumnError) as caught:
        wanted(kind, lengths=[3, 0, 1] if kind == RAGGED else None).packed(value)
    assert str(caught.value).splitlines()[-1].startswith(f"  {remedy}")


def test_fixed_axes_lie_behind_the_rows_or_tokens_and_may_be_stored_narrower() -> None:
    column = planned("int64[samples, tokens, 2, 3]", stored="int16")
    values = Ragged(torch.arange(24, dtype=torch.int16).view(4, 2, 3), torch.tensor([0, 3, 3, 4]))
    asked = Wanted("`n` (my.py:op)", "x", column, 3, [3, 0, 1], True)
    assert asked.packed(values).values.shape == (4, 2, 3)
    with pytest.raises(ColumnError, match=r"a Ragged of int16, each value \[2, 3\], 3 rows"):
        asked.packed(values.like(values.values.long()))
    odd = Ragged(torch.ones(4, 2), torch.tensor([0, 3, 3, 4]))
    odd.values[3, 1] = torch.nan
    with pytest.raises(ColumnError, match="holds nan in row 2; 1 of 8 values"):
        wanted("float32[samples, tokens, 2]").packed(odd)


def test_a_number_that_is_not_finite_is_named_with_its_row() -> None:
    flat = torch.tensor([0.0, torch.nan, torch.inf])
    law = r"`n` \(my.py:op\): column `x` holds nan in row 1; 2 of 3 values are not finite"
    with pytest.raises(ColumnError, match=law):
        wanted(PLAIN).packed(flat)
    rows = Ragged.of([[0.0, 1.0], [], [-torch.inf]])
    with pytest.raises(ColumnError, match="holds -inf in row 2; 1 of 3"):
        wanted("float32[samples, tokens]").packed(rows)
    assert len(wanted(PLAIN, finite=False).packed(flat)) == 3


def test_all_columns_of_an_op_have_as_many_rows() -> None:
    parts = [wanted(kind, rows=None).packed(value) for kind, value in ((PLAIN, torch.ones(2)), (TEXT, ["a"]))]
    with pytest.raises(ColumnError, match="different numbers of rows: `a` 2, `b` 1"):
        together("`n` (my.py:op)", ["a", "b"], parts)


OPS = """
import torch
from rlgraph.ops import Context, float32, op, samples, text

@op()
def {name}(ctx: Context, responses: text[samples]) -> float32[samples]:
    return {value}
"""
WRONG = {
    "short": "torch.zeros(len(responses) - 1)",
    "square": "torch.zeros(len(responses), 2)",
    "nothing": "None",
}


@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("name", WRONG)
def test_an_op_of_a_graph_is_named_at_once(name: str) -> None:
    Path(f"{name}.py").write_text(OPS.format(name=name, value=WRONG[name]))
    edit = f"  - remove: [eval]\n  - replace: {{rewards: {{op: '{name}.py:{name}'}}}}\n"
    Path("odd.yaml").write_text(f"graph: odd\nextends: {Path(__file__).parent / 'ones.yaml'}\nedits:\n{edit}")
    with pytest.raises(RunError, match=rf"^`rewards` .*{name}(.|\n)*: run rewards") as raised:
        run_graph("odd.yaml", (), 1, steps=1, run_dir=Path("out"), inline=True)
    assert "wanted float32[samples]: a tensor of float32, 28 rows" in str(raised.value)


def test_an_error_goes_to_another_process_as_it_is_or_as_text() -> None:
    plain = ValueError("no")
    assert portable(plain) is plain
    odd = subprocess.CalledProcessError(1, ["x"])
    assert portable(odd) is odd
    held = portable(ValueError(open, lambda: 0, "x" * 10**6))
    assert isinstance(held, RaisedError) and str(held).startswith("ValueError: ")
    assert "characters in all" in str(held) and len(str(held)) < 5000
