"""mypy knows a column annotation as the type of the column's values, in ops of users, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlgraph.ops.column_types import TokenAxis

ROOT = Path(__file__).parents[2]
MY_OP = """
from typing import Any, Literal, NamedTuple

from rlgraph.ops import anything, boolean, float32, int64, json, op, prompts, samples, text, tokens


class Written(NamedTuple):
    tokens: int64[samples, tokens]
    loss_mask: boolean[samples, tokens]


@op()
def mine(
    rewards: float32[samples],
    logprobs: float32[samples, tokens],
    three: float32[samples, Literal[3]],
    mask: boolean[samples, tokens] | None,
    answer: text[prompts],
    tests: json[prompts],
    other: anything[samples],
    written: Written,
) -> int64[samples]:
    reveal_type(rewards)
    reveal_type(logprobs)
    reveal_type(three)
    reveal_type(mask)
    reveal_type(answer)
    reveal_type(tests)
    reveal_type(other)
    reveal_type(written.loss_mask)
    return logprobs
"""


@pytest.mark.slow
def test_a_body_knows_its_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MY_OP)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "mine.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    lines = [line.split(": ", 2)[2] for line in done.stdout.splitlines() if "mine.py" in line]
    tensor, ragged = "torch._tensor.Tensor", "rlgraph.nodes.support.ragged.Ragged"
    revealed = [tensor, ragged, tensor, f"{ragged} | None", "list[str]", "list[Any]", "Any", ragged]
    assert [line.replace("builtins.", "") for line in lines[:-1]] == [
        f'Revealed type is "{name}"' for name in revealed
    ], done.stdout + done.stderr
    assert lines[-1].startswith('Incompatible return value type (got "Ragged", expected "Tensor")')


def test_the_plugin_names_what_there_is() -> None:
    from rlgraph.ops import column_types, mypy_plugin

    assert all(hasattr(column_types, name.rpartition(".")[2]) for name in mypy_plugin.NUMBERS)
    assert TokenAxis.__module__ == mypy_plugin.COLUMN_TYPES


def test_a_module_lies_where_its_import_path_says() -> None:
    for name in ("graphs", "nodes", "runtime"):
        linked = ROOT / "rlgraph" / name
        assert linked.is_symlink() and linked.resolve() == ROOT / name
    code = "import rlgraph.nodes.loss.policy as policy; print(policy.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT / "rlgraph/nodes/loss/policy.py")
