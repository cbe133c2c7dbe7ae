"""Says whether two builds of rlgraph do the same: metrics and weights of every shipped graph, to the bit.

    python tests/runtime/same_runs.py --write new.json
    OTHER/.venv/bin/python tests/runtime/same_runs.py --write old.json    # another checkout's environment
    python tests/runtime/same_runs.py --compare old.json new.json

Each graph trains for some iterations on tiny models, inline, on one device. Numbers of different machines or
versions of torch differ: write both files on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "runtime")]

MEASURED_TIME = ("time/", "memory/", "perf/")  # metrics of the machine, which differ from run to run
ITERATIONS = 2


def digests_of(run: Path) -> dict[str, str]:
    """Return the digests of a run: each metric's values over its iterations, and each file of weights."""
    digests: dict[str, str] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if not name.startswith(MEASURED_TIME):
                digests[f"step {values['step']} {name}"] = repr(value)
    for file in sorted((run / "models").rglob("*.safetensors")):
        digests[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def run_all(names: list[str]) -> dict[str, dict[str, str]]:
    """Run shipped graphs, and those of the tests, one after the other; of one that fails keep the error."""
    from test_shipped import tiny

    from demo_files import make_demo_files
    from rlgraph.frontend.shipped import shipped_graphs
    from rlgraph.runtime.demo_tools import make as make_tool_files
    from rlgraph.runtime.run import run_graph

    row: dict[str, Any] = {"question": "12+34=", "answer": "it is #### 46", "chosen": "46", "rejected": "64"}
    row |= {"label": True, "golden_answers": ["46", "forty-six"]}
    results: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_demo_files(Path("demo_files"))
        make_tool_files(Path("demo_tool_files"))
        os.environ["RLGRAPH_TEST_FILES"] = str(Path("demo_files").absolute())
        Path("train.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
        own_graphs = sorted(path.stem for path in (ROOT / "tests" / "runtime").glob("*.yaml"))
        for name in names or [*shipped_graphs(), *own_graphs]:
            graph, settings = name, []
            if name in own_graphs:
                graph = str(ROOT / "tests" / "runtime" / f"{name}.yaml")
            else:
                settings = tiny(name)
            try:
                run_graph(graph, settings, 1, steps=ITERATIONS, inline=True, run_dir=Path("runs") / name)
                results[name] = digests_of(Path("runs") / name)
            except Exception:
                results[name] = {"error": traceback.format_exc().splitlines()[-1]}
            print(f"{name}: {len(results[name])} values", file=sys.stderr, flush=True)
        os.chdir("/")
    return results


def compare(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]) -> int:
    """Print what differs; return how many graphs do."""
    different = 0
    for graph in sorted({*old, *new}):
        before, after = old.get(graph, {}), new.get(graph, {})
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        different += bool(names)
        for name in names:
            print(f"{graph}: {name}: {before.get(name)} -> {after.get(name)}")
    values = sum(map(len, new.values()))
    print(f"{len(new) - different} of {len(new)} graphs are the same to the bit ({values} values)")
    return different


def main() -> None:
    """Write or compare files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("graphs", nargs="*", help="shipped graphs; all unless given")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    options = parser.parse_args()
    if options.compare:
        old, new = (json.loads(path.read_text()) for path in options.compare)
        sys.exit(1 if compare(old, new) else 0)
    text = json.dumps(run_all(options.graphs), indent=1)
    options.write.write_text(text)


if __name__ == "__main__":
    main()
