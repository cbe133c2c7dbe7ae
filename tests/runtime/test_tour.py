"""The notebook of the documents, docs/tour.ipynb, cell by cell."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"


def shown(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return what its last line shows."""
    *before, last = ast.parse(source).body
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


@pytest.mark.slow
def test_every_cell_runs(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("runs/demo_sft/models").mkdir(parents=True)
    Path("runs/demo_sft/models/policy").symlink_to(demo_files / "demo_files/model")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not kept: Restart and clear"
    names: dict[str, Any] = {}
    pages = [shown("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    printed = capsys.readouterr().out
    assert "did you mean `kl_coef`?" in printed and "repeat 500 times" in printed
    assert [type(page).__name__ for page in pages if page is not None] == ["Difference", "Planned", "Run"]
    assert all("<iframe" in page._repr_html_() for page in pages if page is not None)
    assert [line["step"] for line in names["run"].metrics()] == [*range(11)]
