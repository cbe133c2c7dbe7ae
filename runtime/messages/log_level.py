"""How much the processes of a run log: a variable of the environment that reaches all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

LEVEL = "RLGRAPH_LOG_LEVEL"  # debug, info, warning or error


def with_level(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return a runtime_env of Ray whose processes log from this one's level on, if its environment says one.

    transformers and torch's native code have variables of their own, which they read as they are imported.
    """
    level, env = os.environ.get(LEVEL), dict(runtime_env)
    own = (
        {LEVEL: level, "TRANSFORMERS_VERBOSITY": level, "TORCH_CPP_LOG_LEVEL": level.upper()} if level else {}
    )
    if given := own | {name: str(value) for name, value in (env.get("env_vars") or {}).items()}:
        env["env_vars"] = given
    return env
