"""What runs left behind, for tests to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def metrics(run_dir: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]
