"""Says in a few words what a run has reached: its scores, how long it took, how fast it was, and when.

The end of a run on the console, its live table and the headline of its page all take it from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any

from rlgraph.ops.metric import OF_ROWS
from rlgraph.reports.measured import MetricsLine, counted
from rlgraph.units import plural, seconds_text

REWARD = "reward/mean"
PARTS_OF_RUN = ("time/step", "time/eval", "time/save")  # seconds that follow one another


def is_score(metric: str) -> bool:
    """Return whether a metric is one of those for which an evaluation is made.

    Example:
        >>> [is_score(name) for name in ("eval/accuracy", "eval/rows", "eval/rollout/length", "loss")]
        [True, False, False, False]
    """
    phase, _, name = metric.partition("/")
    return phase == "eval" and "/" not in name and name not in OF_ROWS


def outcome(lines: Sequence[MetricsLine], environment: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what was measured of a run as label -> text; empty where no line is written yet.

    Args:
        lines: those of ``metrics.jsonl``.
        environment: the content of ``environment.json``, which has the date.

    Example:
        >>> lines = [
        ...     {"step": 0, "eval/accuracy": 0.25, "time/eval": 2.0},
        ...     {"step": 1, "reward/mean": 0.5, "time/step": 4.0, "tokens/generated": 2000.0},
        ...     {"step": 2, "reward/mean": 0.75, "time/step": 4.0, "tokens/generated": 2000.0},
        ...     {"step": 2, "eval/accuracy": 0.75, "time/eval": 2.0},
        ... ]
        >>> outcome(lines, {"started": "2026-11-28T08:40:48+00:00"})
        ... # doctest: +NORMALIZE_WHITESPACE
        {'accuracy': '0.25 -> 0.75', 'took': '12 s, 2 iterations',
         'speed': '4 s per iteration, 500 tokens per second', 'started': '2026-11-28 08:40 UTC'}
    """
    if not lines:
        return {}
    texts = score_changes(lines)
    timed = counted(lines)
    if timed:
        seconds = sum(line.get(part, 0.0) for line in lines for part in PARTS_OF_RUN)
        iterations = max(line["step"] for line in timed)
        texts["took"] = f"{seconds_text(seconds)}, {iterations:,} {plural('iteration', iterations)}"
        texts["speed"] = speed_text(lines)
    started = (environment or {}).get("started")
    if started:
        texts["started"] = datetime.fromisoformat(started).strftime("%Y-%m-%d %H:%M UTC")
    return texts


def score_changes(lines: Sequence[MetricsLine]) -> dict[str, str]:
    """Return the first and the last value of each score; without one, of the reward, else of the loss.

    Example:
        >>> score_changes([{"eval/accuracy": 0.25, "eval/rows": 64.0}, {"reward/mean": 0.5}])
        {'accuracy': '0.25'}
    """
    names = dict.fromkeys(name for line in lines for name in line)
    scores = [name for name in names if is_score(name)]
    if not scores:
        scores = [name for name in names if name == REWARD]
    if not scores:
        scores = [name for name in names if name.endswith("/loss") and not name.startswith("eval/")]
    changes = {}
    for name in scores:
        values = [line[name] for line in lines if name in line]
        text = f"{values[-1]:.3g}"
        if len(values) > 1:
            text = f"{values[0]:.3g} -> {text}"
        changes[name.removeprefix("eval/")] = text
    return changes


def speed_text(lines: Sequence[MetricsLine]) -> str:
    """Return the median seconds of an iteration, and how many tokens were generated per second.

    Args:
        lines: those of ``metrics.jsonl``, one iteration or more among them. The first, which warms up, counts
            only if it is alone.
    """
    timed = counted(lines)
    text = f"{seconds_text(median([line['time/step'] for line in timed]))} per iteration"
    tokens = sum(line.get("tokens/generated", 0.0) for line in timed)
    if tokens:
        seconds = sum(line["time/step"] for line in timed)
        text += f", {tokens / seconds:,.0f} tokens per second"
    return text
