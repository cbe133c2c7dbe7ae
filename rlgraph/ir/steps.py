"""The layout of a step's rows on devices, and the version of weights that it reads."""

from __future__ import annotations

import re
from typing import Self

from rlgraph.text_value import TextValue


class RowLayout(TextValue):
    """A way to lay rows on a pool's devices, and into how many mini-batches they are cut first; 0: into none.

    The ways are those of passes/partition.py.

    Example:
        >>> RowLayout("spread", 4), RowLayout.parse("spread/4").minibatches
        ('spread/4', 4)
    """

    way: str
    minibatches: int

    def __new__(cls, way: str, minibatches: int = 0) -> Self:
        layout = super().__new__(cls, f"{way}/{minibatches}" if minibatches else way)
        layout.way, layout.minibatches = way, minibatches
        return layout

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a layout as it prints; a ``ValueError`` where behind its ``/`` stands no number."""
        way, _, minibatches = text.partition("/")
        return cls(way, int(minibatches or 0))


NONE = RowLayout("")  # the layout of a step that has no rows
ONE = RowLayout("one")  # all rows on the pool's first device


class Version(TextValue):
    """A version of a model's weights, as updates since entry to the iteration: ``v``, ``v+1``, ``v-1``.

    It is negative where generation leads.

    Example:
        >>> Version(0), Version(1), Version.parse("v-1").offset
        ('v', 'v+1', -1)
    """

    offset: int

    def __new__(cls, offset: int) -> Self:
        version = super().__new__(cls, f"v{offset:+d}" if offset else "v")
        version.offset = offset
        return version

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a version as it prints; a ``ValueError`` where it is not one."""
        if not re.fullmatch(r"v([+-]\d+)?", text):
            raise ValueError(f"{text!r} is not a version of weights, as v, v+1, v-1")
        return cls(int(text[1:] or 0))

    @property
    def is_older(self) -> bool:
        """Return whether it is from before the iteration, as generation that runs ahead reads it."""
        return self.offset < 0

    @property
    def next(self) -> Self:
        """Return the version that an update of this one writes."""
        return type(self)(self.offset + 1)
