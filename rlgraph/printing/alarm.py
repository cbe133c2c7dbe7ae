"""An alarm of a run's watchdog as text."""

from collections.abc import Mapping
from typing import Any


def alarm_text(alarm: Mapping[str, Any]) -> str:
    """Return an alarm as text: what is wrong, why that is, and settings that may mend it.

    Example:
        >>> alarm = {"step": 30, "law": "half are cut off", "why": "they are long", "edits": ["rollout.n=2"]}
        >>> print(alarm_text(alarm | {"rule": "cut-off"}))
        after iteration 30: half are cut off (cut-off)
          they are long
          try rollout.n=2
    """
    lines = [f"after iteration {alarm['step']}: {alarm['law']} ({alarm['rule']})", f"  {alarm['why']}"]
    if alarm["edits"]:
        lines.append(f"  try {', or '.join(alarm['edits'])}")
    return "\n".join(lines)
