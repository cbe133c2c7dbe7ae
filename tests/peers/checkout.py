"""Functions of a peer that is no package here, from a checkout that the user has, whose files are read.

    git clone https://github.com/OWNER/NAME $PEER_CHECKOUTS/OWNER/NAME && git -C ... checkout COMMIT

Of a file only the definitions that are asked for run, so that what else it imports need not be installed.
"""

from __future__ import annotations
import __future__

import ast
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ANNOTATIONS = __future__.annotations.compiler_flag


def folder_of(repository: str) -> Path:
    """Return where the checkout of ``OWNER/NAME`` is, or would be."""
    return Path(os.environ.get("PEER_CHECKOUTS", ".peers/checkouts"), repository)


def definitions(file: Path, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return functions and classes of a file by their names.

    Args:
        file: of a checkout.
        names: those to define; each that one of them needs has to be among them, or given.
        given: what the file imports, by the names that it uses.
    """
    tree = ast.parse(file.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    chosen = [node for node in tree.body if isinstance(node, kinds) and node.name in names]
    missing = {*names} - {node.name for node in chosen}
    if missing:
        raise LookupError(
            f"{file} has no {', '.join(sorted(missing))}: is it of the commit that was recorded?"
        )
    module = types.ModuleType(f"checkout_of_{file.stem}")
    sys.modules[module.__name__] = module  # where classes look their annotations up
    vars(module).update(given)
    code = compile(ast.Module(chosen, []), str(file), "exec", flags=ANNOTATIONS, dont_inherit=True)
    exec(code, vars(module))  # of a checkout that the user chose
    return {name: vars(module)[name] for name in names}
