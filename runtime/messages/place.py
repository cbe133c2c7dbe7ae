"""A device's address: its pool, and its number in that."""

from __future__ import annotations

Place = tuple[str, int]  # a pool, and a device's number in it


def place_text(place: Place) -> str:
    """Return an address as plans write it: ``gen[1]``."""
    return f"{place[0]}[{place[1]}]"
