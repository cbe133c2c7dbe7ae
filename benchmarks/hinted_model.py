"""Make the model that self-distillation starts from: it adds as badly as the demo's, and can use a hint.

    python benchmarks/hinted_model.py runs/demo_sft/models/policy demo_files DIR

A model of 0.6 M weights does not learn from what stands in its prompt unless it was taught to. So SFT teaches
it to copy a number that stands before a question, a wrong one as a rule, beside half as many plain questions.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

ITERATIONS, RATE = 150, 5e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("begin", "files", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    make(options.begin, options.files, options.folder)


def make(begin: Path, files: Path, folder: Path, seed: int = 0) -> None:
    """Train it, a run in ``folder`` whose model is ``folder/models/policy``.

    Args:
        begin: a folder of the language model that it begins with.
        files: ``train.parquet`` and ``test.parquet``, with the columns ``question`` and ``answer``.
        folder: the run's directory.
        seed: of the hints, and of the order of training.
    """
    drawn = random.Random(seed)
    rows = []
    for row in pyarrow.parquet.read_table(files / "train.parquet").to_pylist():
        hint = str(drawn.randrange(20, 199))
        rows += [{"question": f"{hint} {row['question']}", "answer": hint}]
        rows += [row] if drawn.random() < 0.5 else []
    drawn.shuffle(rows)
    traces = folder.with_suffix(".parquet")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), traces)
    settings = [f"seed={seed}", f"models.policy.path={begin}", f"models.policy.optimizer.lr={RATE}"]
    settings += [f"examples.files=[{traces}]", f"eval.nodes.prompts.files=[{files}/test.parquet]"]
    settings += [f"schedule.iterations={ITERATIONS}"]
    command = [
        sys.executable,
        "-m",
        "rlgraph",
        "run",
        "demo_sft",
        *settings,
        "--inline",
        "--run-dir",
        str(folder),
    ]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
