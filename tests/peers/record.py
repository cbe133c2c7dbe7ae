"""Ask peers' own functions for right values, and record them.

    make peers                                               # .peers, then this for every file
    .peers/bin/python tests/peers/record.py trl_losses       # one of them anew
    .peers/bin/python tests/peers/record.py --check          # differs from what is recorded? exit 1

Every file ``ask_NAME.py`` beside this one has a function ``numbers() -> dict`` and a list ``PEERS`` of
packages. It imports a peer (TRL, verl, ...), torch and nothing of rlgraph, makes its inputs itself from fixed
seeds, and returns them with what the peer's own function gave for them, as values of JSON. They land in
``recorded/NAME.json`` with the peer's version. The tests by day read that file and hold rlgraph to it; the
one at night asks the peer again.

A peer that is no package is asked in a checkout, which ``CHECKOUTS`` names with its commit (checkout.py).
Where it is not here, its file is passed over, unless it is asked for by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkout import folder_of

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
TOLERANCE = 1e-6


def loaded(name: str) -> Any:
    """Return the module ``ask_NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"ask_{name}", FOLDER / f"ask_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing_checkouts(module: Any) -> list[str]:
    """Return the repositories of whose checkouts a file asks, and that are not here."""
    return [name for name in getattr(module, "CHECKOUTS", ()) if not folder_of(name).is_dir()]


def asked(module: Any) -> dict[str, Any]:
    """Return what a file ``ask_NAME.py`` gives, with the versions of its ``PEERS`` and ``CHECKOUTS``."""
    versions = {peer: version(peer) for peer in module.PEERS} | getattr(module, "CHECKOUTS", {})
    return {"versions": versions, **json.loads(json.dumps(module.numbers()))}


def differences(place: str, recorded: Any, now: Any) -> list[str]:
    """Return where two values of JSON differ, numbers by more than ``TOLERANCE``."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        keys = sorted({*recorded, *now})
        return [
            line for key in keys for line in differences(f"{place}.{key}", recorded.get(key), now.get(key))
        ]
    if isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        pairs = zip(recorded, now, strict=True)
        return [
            line for number, (a, b) in enumerate(pairs) for line in differences(f"{place}[{number}]", a, b)
        ]
    if isinstance(recorded, float) and isinstance(now, float):
        same = math.isclose(recorded, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return [] if same else [f"{place}: {recorded} was recorded, the peer gives {now}"]
    return [] if recorded == now else [f"{place}: {recorded!r} was recorded, the peer gives {now!r}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of files ask_NAME.py; none: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a peer differs")
    options = parser.parse_args()
    known = sorted(path.stem.removeprefix("ask_") for path in FOLDER.glob("ask_*.py"))
    problems: list[str] = []
    for name in options.names or known:
        path, module = RECORDED / f"{name}.json", loaded(name)
        if not options.names and (missing := missing_checkouts(module)):
            print(f"{name} passed over: no checkout of {', '.join(missing)}")
            continue
        now = asked(module)
        if options.check:
            problems += differences(name, json.loads(path.read_text("utf-8")), now)
        else:
            RECORDED.mkdir(exist_ok=True)
            path.write_text(json.dumps(now, indent=1) + "\n", "utf-8")
            print(f"{path.name} written")
    print("\n".join(problems[:50]), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
