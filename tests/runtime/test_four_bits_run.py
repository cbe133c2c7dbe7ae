"""Runs on frozen weights in 4 bits, by bitsandbytes; and without that library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ran import write_ones_graph

from rlgraph.errors import GraphError
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
IS_INSTALLED = find_spec("bitsandbytes") is not None
with_library = pytest.mark.skipif(not IS_INSTALLED, reason="bitsandbytes is not installed")


@with_library
def test_a_run_trains_on_weights_in_4_bits(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = "{rank: 4, alpha: 8, quantize: nf4}"
    policy = f"{{path: demo_files/model, optimizer: {{lr: 3e-2}}, train: {{lora: {lora}}}}}"
    write_ones_graph("four.yaml", demo_files, f"set: {{models.policy: {policy}}}")
    run_graph("four.yaml", (), 1, inline=True, run_dir=Path("run"))
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[-1]["update_policy/kl_ref"] > 0
    assert max(line["update_policy/rollout_gap_max"] for line in lines) < 1e-4
    text = Path("run/plan.txt").read_text()
    assert "frozen linear layers in 4 bits, nf4" in text
    assert "generates with the frozen weights of its train engine, held once" in text
    assert "on the weights of policy, held once" in text


GRAPH = """graph: four
extends: grpo
edits:
  - set: {models.policy.path: demo_files/model, models.ref.path: demo_files/model}
  - set: {models.policy.train.lora: {rank: 4, quantize: nf4}}
  - set: {prompts.files: [demo_files/train.parquet], prompts.batch: 4, prompts.template: plain}
"""


@pytest.mark.skipif(IS_INSTALLED, reason="bitsandbytes is installed")
def test_a_run_without_the_library_says_what_to_install(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo_files").symlink_to(demo_files / "demo_files")
    Path("four.yaml").write_text(GRAPH)
    law = r"(?s)models.policy: train.lora.quantize needs bitsandbytes, which is not installed.*"
    remedy = r"pip install 'rlgraph-compiler\[quantize\]', or leave out models.policy.train.lora.quantize"
    with pytest.raises(GraphError, match=law + remedy):
        run_graph("four.yaml", ("schedule.iterations=1",), 1, inline=True, run_dir=Path("run"))


@pytest.mark.nightly
@pytest.mark.skipif(IS_INSTALLED, reason="these tests run as they are")
def test_with_the_extra_installed_all_of_it_holds(tmp_path: Path) -> None:
    """The newest bitsandbytes is put into a folder of its own, beside this environment."""
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), "bitsandbytes"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("no package registry can be reached")
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        str(HERE / "test_four_bits.py"),
        __file__,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "13 passed" in done.stdout, done.stdout
