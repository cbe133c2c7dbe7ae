"""Make preferences out of the demo's sums: of each question the right answer, and a wrong one of a model.

    python benchmarks/preferences.py runs/demo_sft/models/policy demo_files demo_files/preferences

writes ``train.parquet`` and ``test.parquet`` with the columns ``question``, ``chosen`` and ``rejected``, and
``labelled.parquet``, the training pairs as single answers: ``question``, ``answer`` and ``label``. Answers
are sampled; a question is left out of which all samples are right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow
import pyarrow.parquet

SAMPLES, LONGEST = 4, 8  # of each question; tokens of an answer
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "files", "folder"):
        parser.add_argument(name, type=Path)
    make(**vars(parser.parse_args()))


def make(model: Path, files: Path, folder: Path, seed: int = 0) -> None:
    """Write the files.

    Args:
        model: a folder of a language model with its tokenizer, which gives the wrong answers.
        files: ``train.parquet`` and ``test.parquet``, with the columns ``question`` and ``answer``.
        folder: where they are written.
        seed: of the samples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {part: pairs(model, files / f"{part}.parquet", seed) for part in ("train", "test")}
    sides = [(row, row[side], side == "chosen") for row in made["train"] for side in ("chosen", "rejected")]
    labelled = [{"question": row["question"], "answer": text, "label": label} for row, text, label in sides]
    for name, rows in {**made, "labelled": labelled}.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")


def pairs(path: Path, file: Path, seed: int) -> list[Row]:
    """Of each question the right answer and the first wrong one out of several samples."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = pyarrow.parquet.read_table(file).to_pylist()
    asked = torch.tensor([tokenizer(row["question"]).input_ids for row in rows])  # all of one length
    options = {"max_new_tokens": LONGEST, "do_sample": True, "top_k": 0, "num_return_sequences": SAMPLES}
    given = model.generate(asked, **options)[:, asked.shape[1] :]
    texts = tokenizer.batch_decode(given, skip_special_tokens=True)
    found = []
    for number, row in enumerate(rows):
        wrong = [t for t in texts[number * SAMPLES : (number + 1) * SAMPLES] if t and t != row["answer"]]
        if wrong:
            found.append({"question": row["question"], "chosen": row["answer"], "rejected": wrong[0]})
    return found


if __name__ == "__main__":
    main()
