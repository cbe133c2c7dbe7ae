"""Makes the questions of demo_smollm: sums of two numbers, asked in everyday words.

    Tom has 4 marbles and finds 9 more. How many marbles does Tom have? Reply with the number only.

No two numbers that are added in a question for testing are added, in this order, in one to train on.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

from rlgraph.runtime.demo import write_parquet

LARGEST = 20  # of the numbers that are added
TEST_ROWS = 100
NAMES = ("Tom", "Mia", "Omar", "Lena", "Ravi", "Ana", "Ken", "Zoe")
THINGS = ("marbles", "books", "coins", "stamps", "apples", "shells", "pencils", "buttons")
WORDINGS = (
    "{name} has {number} {things} and finds {added} more. How many {things} does {name} have?",
    "There are {number} {things} in a box and {added} {things} in a bag. How many {things} are there?",
    "What is {number} plus {added}?",
)
FORM = "Reply with the number only."
FILES = ("train.parquet", "test.parquet")


def make(directory: Path, seed: int = 0) -> bool:
    """Write ``train.parquet`` and ``test.parquet`` if one is missing, and return whether one was.

    They have the columns ``question`` and ``answer``. The seed decides which sums are for testing, and how
    each is asked.
    """
    if all((directory / name).is_file() for name in FILES):
        return False
    directory.mkdir(parents=True, exist_ok=True)
    train, test = questions(seed)
    write_parquet(directory / "train.parquet", train)
    write_parquet(directory / "test.parquet", test)
    return True


def questions(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return every sum of two numbers from 1 to 20, shuffled, as 300 rows to train on and 100 to test on."""
    generator = random.Random(seed)
    pairs = list(product(range(1, LARGEST + 1), repeat=2))
    generator.shuffle(pairs)
    rows = [question(number, added, generator) for number, added in pairs]
    return rows[TEST_ROWS:], rows[:TEST_ROWS]


def question(number: int, added: int, generator: random.Random) -> dict[str, str]:
    """Return one sum as a row, in words that are chosen at random."""
    wording = generator.choice(WORDINGS)
    name = generator.choice(NAMES)
    things = generator.choice(THINGS)
    text = wording.format(name=name, things=things, number=number, added=added)
    return {"question": f"{text} {FORM}", "answer": str(number + added)}
