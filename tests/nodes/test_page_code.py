"""Python blocks of the pages run as they stand: their imports are there, and their ops are declared right."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rlgraph.ops
from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.support.ragged import Ragged

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)  # a block with a name is run as a file
ELSEWHERE = {
    "from_trl.md": "one line of the reader's own script",
    "views.md": "tests/compiler/test_api.py runs it, but for its run",
}
EXAMPLES = [
    (path.name, number, text)
    for path in sorted(DOCS.glob("*.md"))
    if path.name not in ELSEWHERE
    for number, text in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
]
IMPORTED_BEFORE = {**vars(rlgraph.ops), "torch": torch, "Chat": Chat}  # by blocks that show one function


def run(page: str, text: str) -> dict[str, Any]:
    """Run a block as a module, and return its names."""
    module = ModuleType("block")
    vars(module).update(IMPORTED_BEFORE)
    code = compile(text, page, "exec", dont_inherit=True)
    exec(code, vars(module))
    return vars(module)


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page, _, text in EXAMPLES],
    ids=[f"{page}-{number}" for page, number, _ in EXAMPLES],
)
def test_a_block_runs(page: str, text: str) -> None:
    defined = re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE)
    assert defined
    names = run(page, text)
    assert all(callable(names[name]) for name in defined)


def test_the_length_penalty_of_the_language_subtracts_for_each_token() -> None:
    (text,) = [text for page, _, text in EXAMPLES if page == "language.md"]
    penalty = run("language.md", text)["length_penalty"]
    tokens = Ragged.of([[5, 6, 7], [5]])
    rewards = penalty(torch.tensor([1.0, 0.5]), tokens, coef=0.1)
    assert rewards.tolist() == pytest.approx([0.7, 0.4])
