"""What tests of whole runs share: running the command line, and what a run left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def rlgraph(*args: str, expect: int = 0, **env: str) -> str:
    """Run the command line in a process of its own, and return what it printed."""
    command = [sys.executable, "-m", "rlgraph", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=500)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_ones_graph(file: str, demo_files: Path, *edits: str) -> None:
    """Write grpo on the demo's questions into the working folder, where a token "1" is what pays."""
    Path("demo_files").symlink_to(demo_files / "demo_files")
    prompts = "{op: data.prompts, files: [demo_files/train.parquet], batch: 4, template: plain}"
    rewards = f"{{op: '{Path(__file__).parent / 'ones_ops.py'}:ones'}}"
    common = [
        f"replace: {{prompts: {prompts}, rewards: {rewards}}}",
        "set: {models.ref.path: demo_files/model, update_policy.kl_coef: 0.1}",
        "set: {rollout.n: 3, rollout.max_new_tokens: 8, schedule.iterations: 3}",
    ]
    body = "".join(f"  - {edit}\n" for edit in [*common, *edits])
    Path(file).write_text(f"graph: {Path(file).stem}\nextends: grpo\nedits:\n{body}")


def begun(*args: str, **env: str) -> subprocess.Popen[str]:
    """Begin ``rlgraph run`` in a process of its own; what it prints comes line by line."""
    command = [sys.executable, "-u", "-m", "rlgraph", "run", *args]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | env, **pipes)


def metrics(run_dir: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]


def same_weights(a: str, b: str) -> bool:
    """Whether two runs wrote the same model, bit for bit."""
    from safetensors.torch import load_file

    one, other = (load_file(f"{run}/models/policy/model.safetensors") for run in (a, b))
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@contextmanager
def ray_nodes(*nodes: Mapping[str, Any]) -> Iterator[str]:
    """Nodes of Ray on this machine, the head first; yields the address of their cluster."""
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="rg-", dir="/tmp")  # a path of sockets, which must be short
    Path("/tmp/ray").mkdir(exist_ok=True)  # it notes the address there, whatever its own folder is
    cluster = Cluster()
    try:
        for node in nodes:
            cluster.add_node(include_dashboard=False, temp_dir=temporary, **node)
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for(true: Callable[[], Any], seconds: float = 120) -> None:
    """Wait until a function says that it is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


def assert_gone(token: str) -> None:
    """No process is left that inherited the token: Ray's daemons and workers do."""
    wait_for(lambda: not holders(token))


def holders(token: str) -> dict[int, str]:
    """The processes that inherited a token, with their commands."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if token.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_text().strip("\0")
            except OSError:
                continue  # it has ended meanwhile
    return {pid: command for pid, command in found.items() if command}
