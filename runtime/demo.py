"""Makes the demo's files, a tiny model and additions, so that nothing is downloaded.

    python -m rlgraph.runtime.demo DIR

makes ``DIR/model`` (a Qwen2 of 0.6 M random weights with a tokenizer of one token a character),
``DIR/train.parquet`` and ``DIR/test.parquet`` (questions such as ``12+34=`` with the answer ``46``; no
question is in both).
"""

from __future__ import annotations

import operator
import random
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rlgraph.errors import visible
from rlgraph.files import failure

CHARACTERS = "0123456789+-*/=() ."
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
TEST_ROWS = 500
FILES = ("model/model.safetensors", "model/tokenizer_config.json", "train.parquet", "test.parquet")


def make(directory: str | Path = "demo_files", seed: int = 0) -> bool:
    """Make the files that are not there yet, and return whether there were any.

    The weights depend on ``seed``, and which questions are for testing.
    """
    directory = Path(directory)
    if all((directory / name).is_file() for name in FILES):
        return False
    make_model(directory / "model", seed)
    train, test = questions(seed)
    write_parquet(directory / "train.parquet", train)
    write_parquet(directory / "test.parquet", test)
    return True


def questions(seed: int, sign: str = "+") -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return every sum of two numbers of two digits, or product (``*``), shuffled, as rows to train on and
    500 to test on."""
    pairs = product(range(10, 100), repeat=2)
    compute = {"+": operator.add, "*": operator.mul}[sign]
    rows = [{"question": f"{a}{sign}{b}=", "answer": str(compute(a, b))} for a, b in pairs]
    random.Random(seed).shuffle(rows)
    return rows[TEST_ROWS:], rows[:TEST_ROWS]


def make_model(directory: Path, seed: int) -> None:
    """Write a Hugging Face model directory: config, random weights, tokenizer."""
    tokenizer = make_tokenizer()
    write_model(directory, model_config(tokenizer), tokenizer, seed)


def write_model(directory: Path, config: Any, tokenizer: Any, seed: int) -> None:
    """Write a model of random weights that depend on the seed alone, and its tokenizer."""
    import torch
    from transformers import Qwen2ForCausalLM
    from transformers.utils import logging

    shows_progress = logging.is_progress_bar_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    if shows_progress:
        logging.enable_progress_bar()
    tokenizer.save_pretrained(directory)


def model_config(tokenizer: Any) -> Any:
    """Return a ``Qwen2Config`` of 0.6 M parameters."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=32,  # the characters and special tokens, rounded up
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,  # so small a model learns much more slowly at the usual 0.02
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )


def make_tokenizer() -> Any:
    """Return a tokenizer of one token per character (``transformers.PreTrainedTokenizerFast``)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["pad_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=64, **SPECIAL
    )


def write_parquet(file: Path, rows: list[dict[str, str]]) -> None:
    """Write rows with the columns ``question`` and ``answer``."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def make_for_command(
    arguments: Sequence[str], module: str, directory: str, make_files: Callable[[str], bool], contents: str
) -> None:
    """Make the files of a demo as a command does: one line, no line if they are there already, no traceback.

    Args:
        arguments: the words of the command line.
        module: the name of the module that is run.
        directory: where the files go unless the command line names another place.
        make_files: makes them, and returns whether there were any to make.
        contents: what they are, in words.
    """
    parser = ArgumentParser(prog=f"python -m {module}", description=f"Make {contents}.")
    parser.add_argument("directory", nargs="?", default=directory, metavar="DIR", help="[%(default)s]")
    place = parser.parse_args(arguments).directory
    try:
        is_new = make_files(place)
    except Exception as error:
        described = failure(error)
        if described is None:
            raise
        text, exit_code = described
        print(visible(text), file=sys.stderr)
        sys.exit(exit_code)
    if is_new:
        print(f"{place}: {contents}")


def main(arguments: Sequence[str]) -> None:
    """Make the files of the demo, as ``make_for_command`` does."""
    train, test = questions(0)
    contents = f"model (0.6 M parameters), train.parquet ({len(train)}), test.parquet ({len(test)})"
    make_for_command(arguments, "rlgraph.runtime.demo", "demo_files", make, contents)


if __name__ == "__main__":
    main(sys.argv[1:])
