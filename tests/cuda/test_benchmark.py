"""``benchmarks/cuda.py`` from the first measure to the file, with sizes that a CPU goes through quickly."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlgraph.costs.calibration import RATES, load_calibration
from rlgraph.costs.detect import load_cluster

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
MEASURES = {
    "ceilings", "updates", "kept", "compiled", "whole", "head", "optimizer", "peaks", "attention",
    "offload", "sync", "gather", "save", "embedded", "trl_update",
}  # fmt: skip
FIELDS = {
    "measure", "name", "value", "unit", "against", "bound", "want", "work", "ratio", "met",
}  # fmt: skip
NEEDED = {"trl_update": "trl", "sync": "aiohttp"}  # what is not installed everywhere


def called(script: str, *arguments: str, **environment: str) -> str:
    """What a script of the benchmarks prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small run; layers are not compiled, which takes a CPU minutes."""
    file = tmp_path_factory.mktemp("measured") / "cuda.json"
    small = ("--small", "--device", "cpu", "--budget", "100000", "--json", str(file))
    called("cuda.py", *small, TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
    return file


def test_every_measure_finds_finite_figures(measured: Path) -> None:
    found = json.loads(measured.read_text())
    assert found["failures"] == []
    missing = {name for name, package in NEEDED.items() if find_spec(package) is None}
    assert {record["measure"] for record in found["records"]} >= MEASURES - missing
    assert {each["measure"] for each in found["left_out"]} <= missing
    for record in found["records"]:
        assert record.keys() == FIELDS
        assert math.isfinite(record["value"]) and record["value"] > 0, record["name"]
        assert (record["bound"] is None) == (record["ratio"] is None) == (not record["against"])
    assert len(found["records"]) == len({record["name"] for record in found["records"]})


def test_figures_become_a_cluster_and_a_calibration(measured: Path, tmp_path: Path) -> None:
    cluster, factors = tmp_path / "measured.yaml", tmp_path / "work.yaml"
    said = called("cuda_rates.py", str(measured), "-o", str(cluster), "--calibration", str(factors))
    ceilings = {r["name"]: r["value"] for r in json.loads(measured.read_text())["records"]}
    rates = load_cluster(str(cluster))
    assert rates.bf16_flops == pytest.approx(ceilings["product"], rel=1e-3)
    assert rates.memory_bandwidth == pytest.approx(ceilings["copy"], rel=1e-3)
    calibration = load_calibration(str(factors))
    kinds = {kind for kind in RATES if getattr(calibration, kind)}
    assert kinds >= {"generate", "score", "update", "move"}
    assert {line.split(":")[0].strip() for line in said.splitlines()[1:]} == {
        "update", "score", "memory", "decode_layer",
    }  # fmt: skip


def test_what_fails_is_noted_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "cuda.json"
    small = ("--small", "--device", "cpu", "--json", str(file))
    called("cuda.py", *small, "--only", "head,gather", OMP_NUM_THREADS="1")  # the head asks for an update
    found = json.loads(file.read_text())
    assert [(each["measure"], each["error"]) for each in found["failures"]] == [
        ("head", "RuntimeError: head is held against what updates found: measure them too")
    ]
    assert [r["name"] for r in found["records"] if r["measure"] == "gather"] == ["gather: into one tensor"]


def test_what_has_no_time_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "cuda.json"
    called(
        "cuda.py", "--small", "--device", "cpu", "--budget", "16", "--json", str(file), "--only", "updates"
    )
    (left,) = json.loads(file.read_text())["left_out"]
    assert left["measure"] == "updates" and "90 s" in left["why"]


def test_without_a_gpu_it_says_so() -> None:
    said: Any = called("cuda.py", CUDA_VISIBLE_DEVICES="")
    assert said.startswith("skipped: there is no GPU")
