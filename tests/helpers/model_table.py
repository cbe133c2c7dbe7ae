"""The table of docs/models.md: a row per family, a column per thing that is tried, and why where it fails.

Tests give the cells that they have found; ``pytest --bless`` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
YES, REFUSED = "yes", "refused"
# the rows: as the page calls them, and as families.py does
ROWS = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Mistral, sliding windows": "mistral, windows",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Mixtral": "mixtral",
    "Gemma 3, text": "gemma3_text",
    "GLM 4": "glm4",
    "GLM 4.5": "glm4_moe",
    "DeepSeek V3": "deepseek_v3",
    "Phi 3": "phi3",
    "Phi 3, longrope": "phi3, longrope",
    "OLMo 2": "olmo2",
    "gpt-oss": "gpt_oss",
    "Qwen3-Next": "qwen3_next",
}
Cell = tuple[str, str]  # a word, and why it is not ``yes``


def compare(label: str, found: Mapping[str, Cell], bless: bool) -> None:
    """Compare what a test has found of a family, by column, with the page; or write it there."""
    if bless:
        PAGE.write_text(_written(label, found), encoding="utf-8")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    said = dict(zip(_columns(lines), _cells(lines[_row(lines, label)]), strict=True))
    assert {column: said[column] for column in found} == {column: word for column, (word, _) in found.items()}
    whys = {_why(label, column, why) for column, (_, why) in found.items() if why}
    ours = {line for line in lines if any(line.startswith(_why(label, column, "")) for column in found)}
    assert ours == whys


def _written(label: str, found: Mapping[str, Cell]) -> str:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    row = _row(lines, label)
    cells = dict(zip(_columns(lines), _cells(lines[row]), strict=True))
    cells |= {column: word for column, (word, _) in found.items()}
    lines[row] = f"| {' | '.join(cells.values())} |"
    own = tuple(_why(label, column, "") for column in found)
    whys = {line for line in lines if line.startswith("- **") and not line.startswith(own)}
    whys |= {_why(label, column, why) for column, (_, why) in found.items() if why}
    order = [*ROWS]
    listed = sorted(whys, key=lambda line: (order.index(line.split("**")[1]), line))
    rest = [line for line in lines if not line.startswith("- **")]
    here = next(index for index, line in enumerate(rest) if line.startswith("## What is refused")) + 2
    return "\n".join([*rest[:here], *listed, *rest[here:]]) + "\n"


def _why(label: str, column: str, why: str) -> str:
    return f"- **{label}** {column}: {' '.join(why.split())}"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _columns(lines: list[str]) -> list[str]:
    return _cells(next(line for line in lines if line.startswith("| family")))


def _row(lines: list[str], label: str) -> int:
    return next(index for index, line in enumerate(lines) if line.startswith(f"| {label} |"))
