"""Names that the published harnesses give every program, for sources that were written for them.

LiveCodeBench, TACO and APPS prepend star imports of these modules, as verl 0.9.1 does (prime_code): starter
code such as ``def total(self, nums: List[int])`` has no import of its own. Only names that a source uses and
does not define are looked up, so that a program that needs none pays for none.
"""

from __future__ import annotations

import builtins
import importlib
import symtable
from collections.abc import Iterator
from typing import Any

# a name is that of the first module here that has it, as the last star import wins in the harnesses
MODULES = """typing json sys io operator functools itertools statistics random math copy bisect heapq
    collections datetime re string""".split()  # noqa: SIM905
RECURSION = 50_000  # calls, as LiveCodeBench sets it; verl 0.9.1's prime_code sets 600,000


def harness_names(source: str) -> dict[str, Any]:
    """Return the values of names that a source uses without defining or importing them."""
    try:
        table = symtable.symtable(source, "program.py", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return {}  # it does not run, which running it says
    values = {}
    for name in {*undefined(table)}:
        if hasattr(builtins, name) or name.startswith("_"):
            continue
        if name in MODULES:
            values[name] = importlib.import_module(name)
            continue
        for module_name in MODULES:
            module = importlib.import_module(module_name)
            if hasattr(module, name):
                values[name] = getattr(module, name)
                break
    return values


def undefined(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that a module and what is in it use and do not define."""
    defined = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}
    tables = [table]
    for inner in tables:  # which grows by what is found in each
        tables += inner.get_children()
        for symbol in inner.get_symbols():
            name = symbol.get_name()
            is_global_use = symbol.is_referenced() and symbol.is_global()
            if is_global_use and name not in defined:
                yield name
