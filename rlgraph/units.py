"""Sizes, times and counts as text, times from text, and the middle of a range of times."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

TIME = re.compile(r"(?=.)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

# seconds below which a unit is used, and those of one; elements.js has the same
UNITS = (
    (0.9995, 1e-3, "ms"),
    (600, 1, "s"),
    (7200, 60, "min"),
    (172_800, 3600, "h"),
    (math.inf, 86_400, "days"),
)


def size_text(size: float) -> str:
    """Return bytes in decimal units, three digits.

    Example:
        >>> [size_text(size) for size in (0, 512, 13_300_000_000)]
        ['0 B', '512 B', '13.3 GB']
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{number_text(size)} {unit}"


def seconds_text(seconds: float) -> str:
    """Return milliseconds, seconds, minutes, hours or days, three digits at most.

    Example:
        >>> [seconds_text(seconds) for seconds in (0.0012, 1.26, 90, 750, 9000, 1e6)]
        ['1.2 ms', '1.26 s', '90 s', '12.5 min', '2.5 h', '11.6 days']
    """
    for limit, unit, name in UNITS:
        if seconds < limit:
            return f"{number_text(seconds / unit)} {name}"
    raise ValueError(f"{seconds} is not a number of seconds")


def plural(noun: str, count: float | Fraction) -> str:
    """Return a noun with its ``s`` unless there is one of it.

    Example:
        >>> plural("wave", 1), plural("wave", 2)
        ('wave', 'waves')
    """
    if count == 1:
        return noun
    return f"{noun}s"


def seconds_of(text: str) -> int | None:
    """Return the seconds in a text such as ``3h50m``; None if it is not a duration.

    Example:
        >>> [seconds_of(text) for text in ("90s", "3h50m", "1d", "h", "")]
        [90, 13800, 86400, None, None]
    """
    counts = TIME.fullmatch(text)
    if not counts:
        return None
    days, hours, minutes, seconds = (int(count or 0) for count in counts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def middle(seconds: tuple[float, float]) -> float:
    """Return the geometric mean of best and worst."""
    return math.sqrt(seconds[0] * seconds[1])


def range_text(seconds: tuple[float, float]) -> str:
    """Return a range of seconds, from best to worst."""
    return f"{seconds_text(seconds[0])} to {seconds_text(seconds[1])}"


def number_text(number: float) -> str:
    """Return a number with three digits, and commas between thousands."""
    digits = 0
    if number < 9.995:
        digits = 2
    elif number < 99.95:
        digits = 1
    text = f"{number:,.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text
