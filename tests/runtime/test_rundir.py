"""A run directory is its user's own: nobody else reads it, and no link in it leads a run elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlgraph.errors import RunError
from rlgraph.runtime.run import run_graph
from rlgraph.runtime.rundir.rundir import RunDir

ONES = str(Path(__file__).parent / "ones.yaml")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_for_its_user_alone_unless_it_was_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    try:
        assert mode(RunDir.fresh(None, "grpo").path) == 0o700
        assert mode(RunDir.fresh(Path("deep/run"), "grpo").path) == 0o700
        assert mode(Path("runs")) == mode(Path("deep")) == 0o755
        Path("shared").mkdir()
        assert mode(RunDir.fresh(Path("shared"), "grpo").path) == 0o755
    finally:
        os.umask(before)


@pytest.mark.usefixtures("in_demo")
def test_no_link_in_it_is_written_through() -> None:
    run_graph(ONES, (), 1, steps=0, run_dir=Path("run"), inline=True)
    for inside in ("metrics.jsonl", "samples/step-000009.jsonl", "checkpoints/writing"):
        Path("precious").write_text("precious")
        place = Path("run", inside)
        place.unlink(missing_ok=True)
        place.symlink_to(Path("precious").absolute())
        with pytest.raises(
            RunError, match=f"run/{inside} is a link, and a run writes to its own files alone"
        ):
            run_graph(ONES, (), 1, steps=1, run_dir=Path("run"), resume=True, inline=True)
        place.unlink()
        assert Path("precious").read_text() == "precious"


def test_links_of_weights_and_biases_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to(tmp_path)
    assert RunDir.existing(tmp_path).path == tmp_path
