"""Rows of a step or a column lie on a pool's devices in one of these layouts: see passes/partition.py."""

from __future__ import annotations

from typing import Self

from rlgraph.text_value import TextValue


class RowLayout(TextValue):
    """A way to lay rows, and into how many mini-batches they are cut first; 0: into none.

    Example:
        >>> RowLayout("spread", 4), RowLayout.parse("spread/4").minibatches
        ('spread/4', 4)
    """

    way: str
    minibatches: int

    def __new__(cls, way: str, minibatches: int = 0) -> Self:
        made = super().__new__(cls, f"{way}/{minibatches}" if minibatches else way)
        made.way, made.minibatches = way, minibatches
        return made

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a layout as it prints.

        Raises:
            ValueError: behind its ``/`` stands no number.
        """
        way, _, minibatches = text.partition("/")
        return cls(way, int(minibatches or 0))


NONE = RowLayout("")  # of a step that has no rows
ONE = RowLayout("one")  # all rows on the pool's first device
