"""The log level of all processes of a run, set by a variable of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

LEVEL = "RLGRAPH_LOG_LEVEL"  # debug, info, warning or error


def with_level(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Ray runtime_env in which processes have this one's log level, if its environment has one.

    transformers and torch's native code read variables of their own when they are imported. Variables that
    ``runtime_env`` has itself come first.
    """
    result = dict(runtime_env)
    variables: dict[str, str] = {}
    level = os.environ.get(LEVEL)
    if level:
        variables = {LEVEL: level, "TRANSFORMERS_VERBOSITY": level, "TORCH_CPP_LOG_LEVEL": level.upper()}
    for name, value in (result.get("env_vars") or {}).items():
        variables[name] = str(value)
    if variables:
        result["env_vars"] = variables
    return result
