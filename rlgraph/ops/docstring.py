"""Parses an op's docstring: summary, formula, attributes, example."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import field

from rlgraph.records import dataclass

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
        sources = []
        for text in SOURCE.findall(f"{self.summary}\n{self.body}"):
            is_arxiv_id = text[0].isdigit()
            sources.append(f"arXiv {text}" if is_arxiv_id else text.removeprefix("Source: "))
        return list(dict.fromkeys(sources))


def read_docstring(text: str) -> Docstring:
    """Split a docstring into its parts, as Markdown; missing parts are empty.

    Example:
        >>> doc = read_docstring("Halve.\\n\\ny = x / 2.\\n\\nAttributes:\\n    x: a number,\\n        any.")
        >>> doc.summary, doc.body, doc.attributes
        ('Halve.', 'y = x / 2.', {'x': 'a number, any.'})
    """
    head, *headings_and_texts = HEADING.split(text.replace("``", "`"))
    sections = dict(zip(headings_and_texts[::2], headings_and_texts[1::2], strict=True))
    summary, _, body = head.strip().partition("\n\n")
    return Docstring(
        summary=_joined(summary),
        body=body.strip(),
        attributes=_entries(sections.get("Attributes", "")),
        example=inspect.cleandoc(sections.get("Example", "")),
        arguments=_entries(sections.get("Args", "")),
    )


def _entries(text: str) -> dict[str, str]:
    _, *names_and_texts = ENTRY.split(text)
    entries = zip(names_and_texts[::2], names_and_texts[1::2], strict=True)
    return {name: _joined(description) for name, description in entries}


def _joined(text: str) -> str:
    return " ".join(text.split())
