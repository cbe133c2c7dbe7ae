"""Intervals that are not a number of iterations: a duration, or epochs of a source's rows.

save_every: 50                       iterations
save_every: 30 min                   of the run's time: s, min, h, days
save_every: 0.5 epochs               of the rows of the graph's one source
save_every: 1 epoch of prompts       of a source by its name
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rlgraph.text_value import TextValue
from rlgraph.units import plural, seconds_of

UNITS = {
    **dict.fromkeys(("s", "second", "seconds"), 1),
    **dict.fromkeys(("min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("day", "days"), 86_400),
}  # a unit of time -> its seconds
SHORT = {1: "s", 60: "min", 3600: "h", 86_400: "days"}
EPOCHS = ("epoch", "epochs")
FORM = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]+)(?: +of +([A-Za-z_]\w*))?")
PATTERN = rf"^\d+(\.\d+)? *({'|'.join(UNITS)}|epochs?( +of +[A-Za-z_]\w*)?)$"


class Interval(TextValue):
    """A duration or a number of epochs, as ``30 min`` or ``0.5 epochs of prompts``.

    Attributes:
        seconds: the length of a duration; 0 for epochs.
        epochs: how often all rows of the source are taken, exactly as it is written; 0 for a duration.
        source: the node that gives the rows; "" if it is not named, since the graph has one source.

    Example:
        >>> Interval.parse("30min"), Interval.parse("1.0 epochs").of("prompts")
        ('30 min', '1 epoch of prompts')
        >>> Interval.parse("0.1 epochs").epochs, Interval.parse("2 h").seconds
        (Fraction(1, 10), 7200.0)
    """

    seconds: float
    epochs: Fraction
    source: str

    def __new__(cls, count: Fraction, unit: str, source: str = "") -> Self:
        number = f"{float(count):.12f}".rstrip("0").rstrip(".")
        count = Fraction(number)  # the number that is read back from the text
        text = f"{number} {_shown_unit(unit, count)}"
        if source:
            text += f" of {source}"
        interval = super().__new__(cls, text)
        interval.epochs, interval.seconds = Fraction(0), 0.0
        if unit in EPOCHS:
            interval.epochs = count
        else:
            interval.seconds = float(count * UNITS[unit])
        interval.source = source
        return interval

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an interval.

        Raises:
            ValueError: it has another form, or is 0.
        """
        match = FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(_law(text, ""))
        count, unit, source = match.groups()
        is_duration = unit in UNITS and not source
        if unit not in EPOCHS and not is_duration:
            raise ValueError(_law(text, count))
        if not Fraction(count):
            raise ValueError(f"must be more than 0 {unit}")
        return cls(Fraction(count), unit, source or "")

    def of(self, source: str) -> Self:
        """Return the same epochs of a source."""
        return type(self)(self.epochs, "epochs", source)

    @classmethod
    def _read(cls, value: Any) -> Self:
        if isinstance(value, str):
            return cls.parse(value)
        return cls.parse(f"{value} iterations")  # which raises, and says what an interval may be

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # in a union with numbers, an error about any other value then lists the forms of an interval
        return core_schema.no_info_plain_validator_function(cls._read)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {"type": "string", "pattern": PATTERN, "format": "interval"}


def _shown_unit(unit: str, count: Fraction) -> str:
    if unit in EPOCHS:
        return plural("epoch", count)
    short = SHORT[UNITS[unit]]
    if short == "days" and count == 1:
        return "day"
    return short


def _law(text: str, count: str) -> str:
    """Return what an interval has to be, with the forms that are nearest to what was written."""
    compound = seconds_of(re.sub(r"\s", "", text))  # a duration as --time-limit takes it, such as 3h50m
    if compound:
        return f"must be a duration in one unit, as '{compound / 60:g} min'"
    number = count or "30"
    seconds, minutes, hours, days = (f"'{number} {unit}'" for unit in SHORT.values())
    durations = f"{seconds}, {minutes}, {hours} or {days}"
    return f"must be a duration, as {durations}, or epochs, as '{number} epochs'"
