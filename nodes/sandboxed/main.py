"""A program as ``__main__``, which it takes itself for."""

import sys
import types
from typing import Any


def run_main(source: str, file: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a source as a new module ``__main__`` that has some names already; return all that it has then."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(names or {})
    sys.argv = [file]
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__
