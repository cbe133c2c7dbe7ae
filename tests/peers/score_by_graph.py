"""Run graphs that score the rows of tests/helpers/scorer_cases.py with the peers' scorers.

    PYTHONPATH=SITE .peers/bin/python tests/peers/score_by_graph.py inline scores.json [NAME ...]

SITE is a folder that has this checkout as the package ``rlgraph``; ``ray`` in place of ``inline`` has two
workers of Ray. What is written is, per scorer, what each of its nodes gives each row: a score, or "failed".
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from rlgraph.nodes.support.record_file import read
from rlgraph.runtime.run import run_graph
from sandbox_server import sandbox_server
from scorer_cases import SANDBOX, TRL, VERL, Scorer

OPS = Path(__file__).with_name("scored_ops.py")
COLUMNS = {
    "reward.verl": {"ground_truth": "json", "data_source": "text", "extra_info": "json"},
    "reward.trl": {"solution": "text"},
}


def in_file(name: str) -> str:
    """Return a function's name with the whole path of its file, which is in a package or beside this one."""
    package = find_spec(name.partition("/")[0]) if "/" in name else None
    if package is None or package.origin is None:
        return f"{OPS.parent}/{name}"
    return f"{Path(package.origin).parents[1]}/{name}"


def graph_of(op: str, scorer: Scorer, url: str) -> dict[str, Any]:
    """Return a graph of one iteration, without a model, with a node for each way to name the scorer."""
    nodes: dict[str, Any] = {
        "rows": {"op": f"{OPS}:rows", "file": "rows.jsonl", "columns": COLUMNS[op]},
        "responses": {"op": f"{OPS}:spoken"},
    }
    by_file = [{**scorer.nodes[0], "function": in_file(name)} for name in scorer.files]
    for number, attributes in enumerate([*scorer.nodes, *by_file]):
        outs = {"rewards": f"rewards_{number}", "failed": f"failed_{number}"}
        given = json.loads(json.dumps(attributes).replace(SANDBOX, url))
        if scorer.patience:
            given["arguments"] = {**given.get("arguments", {}), **scorer.patience}
        if op == "reward.verl":
            given["timeout"] = 600.0
        ins = {"in": {"tokens": "ids"}} if op == "reward.trl" else {}
        nodes[f"scored_{number}"] = {"op": op, **ins, "out": outs, "on_error": "zero", **given}
    return {"graph": "scored", "nodes": nodes, "schedule": {"iterations": 1, "record_every": 1}}


def scores(op: str, scorer: Scorer, url: str, folder: Path, inline: bool) -> list[list[Any]]:
    """Return what each node of a scorer gives each row."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scorer.rows), "utf-8")
    (folder / "scored.yaml").write_text(json.dumps(graph_of(op, scorer, url)), "utf-8")  # JSON is YAML
    run = folder / "run"
    run_graph(str(folder / "scored.yaml"), (), 1 if inline else 2, run_dir=run, inline=inline)
    count = len(scorer.nodes) + len(scorer.files)
    names = [f"{kind}_{number}" for number in range(count) for kind in ("rewards", "failed")]
    table = read(run / "recorded/step-000001/samples.parquet", names)
    found = []
    for number in range(count):
        rewards, failed = (table[f"{kind}_{number}"].values for kind in ("rewards", "failed"))
        pairs = zip(rewards.tolist(), failed.tolist(), strict=True)
        found.append(["failed" if is_failed else reward for reward, is_failed in pairs])
    return found


def main(where: str, file: str, *names: str) -> None:
    given: dict[str, list[list[Any]]] = {}
    with sandbox_server() as url:
        for peer, op, scorers in (("verl", "reward.verl", VERL), ("trl", "reward.trl", TRL)):
            for scorer in scorers:
                name = f"{peer} {scorer.name}"
                if names and name not in names:
                    continue
                with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                    given[name] = scores(op, scorer, url, Path(folder), where == "inline")
    Path(file).write_text(json.dumps(given), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
