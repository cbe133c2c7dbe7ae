"""Versions of a model's weights, counted from those on entry to the iteration: ``v``, ``v+1``, ``v-1``."""

from __future__ import annotations

import re
from typing import Self

from rlgraph.text_value import TextValue


class Version(TextValue):
    """A version of weights, as updates since entry to the iteration; negative where generation leads.

    Example:
        >>> Version(0), Version(1), Version.parse("v-1").offset
        ('v', 'v+1', -1)
    """

    offset: int

    def __new__(cls, offset: int) -> Self:
        made = super().__new__(cls, f"v{offset:+d}" if offset else "v")
        made.offset = offset
        return made

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a version as it prints.

        Raises:
            ValueError: it is none.
        """
        if not re.fullmatch(r"v([+-]\d+)?", text):
            raise ValueError(f"{text!r} is no version of weights: v, v+1, v-1")
        return cls(int(text[1:] or 0))

    @property
    def is_older(self) -> bool:
        """Return whether it is from before the iteration, as generation that runs ahead reads it."""
        return self.offset < 0

    @property
    def next(self) -> Self:
        """The version that an update of this one writes."""
        return type(self)(self.offset + 1)
