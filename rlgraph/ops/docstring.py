"""Parses an op's docstring: summary, formula, attributes, example."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

HEADING = re.compile(r"^(Args|Attributes|Returns|Raises|Example):\n", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
SOURCE = re.compile(r"\b\d{4}\.\d{4,5}\b|\bdoi [^\s),;]+|https?://[^\s)]+|\bSource: [^.]+")


@dataclass(frozen=True)
class Docstring:
    """An op's docstring; ``body`` is the formula, its conventions and the metrics that it records."""

    summary: str
    body: str
    attributes: Mapping[str, str]
    example: str
    arguments: Mapping[str, str] = field(default_factory=dict)  # a tool's arguments of the model

    @property
    def sources(self) -> list[str]:
        """Return the method's sources: arXiv ids, dois, addresses, or text after ``Source:``, each once."""
        names = SOURCE.findall(f"{self.summary}\n{self.body}")
        named = (f"arXiv {name}" if name[0].isdigit() else name.removeprefix("Source: ") for name in names)
        return list(dict.fromkeys(named))


def read_docstring(text: str) -> Docstring:
    """Split a docstring into its parts, as Markdown; missing parts are empty.

    Example:
        >>> doc = read_docstring("Halve.\\n\\ny = x / 2.\\n\\nAttributes:\\n    x: a number,\\n        any.")
        >>> doc.summary, doc.body, doc.attributes
        ('Halve.', 'y = x / 2.', {'x': 'a number, any.'})
    """
    head, *rest = HEADING.split(text.replace("``", "`"))
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    summary, _, body = head.strip().partition("\n\n")
    return Docstring(
        summary=_joined(summary),
        body=body.strip(),
        attributes=_entries(parts.get("Attributes", "")),
        example=inspect.cleandoc(parts.get("Example", "")),
        arguments=_entries(parts.get("Args", "")),
    )


def _entries(text: str) -> dict[str, str]:
    _, *entries = ENTRY.split(text)
    return {n: _joined(t) for n, t in zip(entries[::2], entries[1::2], strict=True)}


def _joined(text: str) -> str:
    return " ".join(text.split())
