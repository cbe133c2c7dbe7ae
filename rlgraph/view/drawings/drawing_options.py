"""The options of pictures, which the command line reads before it knows whether there is one to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DrawingOptions:
    """The options of a picture: its direction, and what it shows besides the steps that the user wrote."""

    types: bool = False  # of the columns on arrows
    inserted: bool = False  # steps that rlgraph inserted
    direction: Literal["down", "right"] = "down"


SHOWN = DrawingOptions()
