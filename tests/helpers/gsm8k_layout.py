"""A data set in the layout that verl's gsm8k.py writes, and a model small enough to train on it anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from byte_tokenizer import CHATML, tokenizer_of

ROWS = 64
ASKED = (
    "Tom has {0} apples and buys {1}. How many has he? Let's think step by step and output the answer after"
)


def row(number: int, split: str) -> dict[str, Any]:
    """One row: the columns and nested fields of verl's examples/data_preprocess/gsm8k.py."""
    first, second = number + 2, 2 * number + 1
    answer = str(first + second)
    question = f"{ASKED.format(first, second)} ####."
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": number,
            "answer": f"{first} + {second} = {answer}\n#### {answer}",
            "question": question,
        },
    }


def make_data(folder: Path) -> None:
    """Write ``train.parquet`` and ``test.parquet`` of 64 rows each."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        table = pyarrow.Table.from_pylist([row(number, split) for number in range(ROWS)])
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")


def make_model(folder: Path) -> None:
    """Write a Qwen2 of random weights that reads bytes and has a chat template."""
    from rlgraph.runtime.demo import model_config, write_model

    tokenizer = tokenizer_of(CHATML)
    config = model_config(tokenizer)
    config.vocab_size = -(-len(tokenizer) // 64) * 64
    config.max_position_embeddings = 32_768
    write_model(folder, config, tokenizer, seed=0)
