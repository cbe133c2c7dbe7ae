"""The demo's model and data with fewer questions to evaluate on, which would take most of a test's time."""

from __future__ import annotations

from pathlib import Path

from rlgraph.runtime.demo import make, questions, write_parquet

QUESTIONS = 50


def make_demo_files(directory: Path) -> None:
    """Make ``model``, ``train.parquet`` and ``test.parquet`` in a folder."""
    make(directory)
    write_parquet(directory / "test.parquet", questions(seed=0)[1][:QUESTIONS])
