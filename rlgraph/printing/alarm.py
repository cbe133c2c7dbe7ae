"""An alarm of a run's watchdog as text."""

from collections.abc import Mapping
from typing import Any


def alarm_text(alarm: Mapping[str, Any]) -> str:
    """Return an alarm as text: what is wrong, why that is, and settings to go on with.

    Example:
        >>> alarm = {"step": 30, "law": "half are cut off", "why": "they are long", "edits": ["rollout.n=2"]}
        >>> print(alarm_text(alarm | {"rule": "cut-off"}))
        after iteration 30: half are cut off (cut-off)
          they are long
          try rollout.n=2
    """
    tries = f"\n  try {', or '.join(alarm['edits'])}" if alarm["edits"] else ""
    return f"after iteration {alarm['step']}: {alarm['law']} ({alarm['rule']})\n  {alarm['why']}{tries}"
