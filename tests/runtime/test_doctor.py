"""``rlgraph doctor``: facts of machines that are not here are judged, and this machine's are gathered."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlgraph.cli.main import main
from rlgraph.cli.run import _models
from rlgraph.runtime.doctor.checks import CHECKS
from rlgraph.runtime.doctor.doctor import ABOUT, answer, gather, judge
from rlgraph.runtime.doctor.probes import PROBES, cores

GB = 10**9
GPU = {"name": "NVIDIA H100 80GB HBM3", "memory": 81559 * 2**20, "used": 2**20, "driver": "580.95.05"}
# a host of eight H100 where nothing is missing
GOOD: dict[str, list[dict[str, Any]]] = {
    "host": [
        {
            "python": [3, 12, 3],
            "libc": ["glibc", "2.39"],
            "memory": 2000 * GB,
            "memory_of_host": 2000 * GB,
            "cores": 192,
            "shared_memory": 1000 * GB,
            "open_files": 1048576,
            "locked_memory": -1,
            "interfaces": ["lo", "ens1f0", "ib0"],
            "nvcc": True,
            "variables": {"NCCL_SOCKET_IFNAME": "ens"},
        }
    ],
    "packages": [
        {
            "installed": {"rlgraph": "0.1.0", "torch": "2.14.1", "triton": None, "ray": "2.60.0"},
            "unmet": [],
            "sglang": [],
            "unmet_by_sglang": [],
        }
    ],
    "gpus": [{"gpus": [{"index": index, **GPU} for index in range(8)], "processes": []}],
    "torch": [
        {
            "version": "2.14.1",
            "cuda": "13.0",
            "error": "",
            "architectures": ["sm_80", "sm_90", "sm_100"],
            "capabilities": [[9, 0]] * 8,
            "nccl": "2.30.7",
            "without_peer_access": [],
        }
    ],
    "host_optimizer": [{"workers": 8, "rate": 2.4e8}],
    "sglang": [{"version": "0.5.23"}],
    "ray": [
        {
            "version": "2.60.0",
            "address": "auto",
            "resources": {"CPU": 384.0, "GPU": 16.0},
            "nodes": 2,
            "lost": [],
        }
    ],
    "disk": [{"path": "runs", "free": 900 * GB, "total": 1000 * GB, "writable": True}],
    "model": [
        {
            "path": "models/qwen",
            "faults": [],
            "type": "qwen3",
            "vocabulary": 151936,
            "weights": 16 * GB,
            "bytes_per_weight": 2,
            "tokenizer": 151669,
            "end": [151645],
            "template": True,
            "prompt": "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
        }
    ],
}
NO_GPU: dict[str, Any] = {"gpus": {"gpus": [], "processes": []}}
BUSY = [{"index": 0, **GPU}, {"index": 1, **GPU, "used": 40 * GB}]
CAPABLE = {"capabilities": [[7, 0]] * 8}


def changed(changes: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    facts = deepcopy(GOOD)
    for probe, values in changes.items():
        facts[probe][0] |= values
    return facts


def variables(**values: str) -> dict[str, Any]:
    return {"host": {"variables": values}}


# what differs from the good host; the check that says so; its level; words of its text or remedy
FAULTS: list[tuple[dict[str, dict[str, Any]], str, str, str]] = [
    ({"host": {"python": [3, 13, 1]}}, "python", "warn", "3.11 or 3.12"),
    ({"host": {"libc": ["glibc", "2.31"]}}, "libc", "wrong", "glibc 2.34 or newer"),
    ({"host": {"libc": ["", ""]}}, "libc", "wrong", "no glibc"),
    ({"packages": {"unmet": ["torch>=2.11 (installed: 2.9.0)"]}}, "packages", "wrong", "installed: 2.9.0"),
    (NO_GPU, "gpus", "warn", "docs/gpu.md#driver"),
    ({"gpus": {"gpus": [], "files": 8}}, "gpus", "wrong", "--gpus all"),
    ({"gpus": {"gpus": [GPU, {**GPU, "name": "NVIDIA L4"}]}}, "gpus", "warn", "NVIDIA L4"),
    ({"gpus": {"gpus": BUSY, "processes": ["41 python 38000"]}}, "gpu memory", "warn", "41 python 38000"),
    ({"gpus": {"gpus": [{**GPU, "driver": "570.86.15"}]}}, "driver", "wrong", "driver 580 or newer"),
    ({"torch": {"cuda": "12.9"}, "gpus": {"gpus": [{**GPU, "driver": "515.1"}]}}, "driver", "wrong", "525"),
    ({"torch": {"cuda": None, "version": "2.14.1+cpu"}}, "torch", "wrong", "built without CUDA"),
    ({"torch": {"error": "no driver", "capabilities": []}}, "torch", "wrong", "no driver"),
    ({"torch": {"capabilities": []}}, "torch", "wrong", "none is visible"),
    ({"torch": CAPABLE}, "torch", "wrong", "sm_80, sm_90, sm_100"),
    ({"torch": {**CAPABLE, "architectures": ["compute_70"]}}, "torch", "warn", "no bfloat16"),
    ({"torch": {"without_peer_access": [[0, 4]]}}, "peers", "warn", "GPUs 0-4"),
    (variables(NCCL_P2P_DISABLE="1"), "nccl", "warn", "NCCL_P2P_DISABLE=1"),
    (variables(NCCL_DEBUG="info"), "nccl", "warn", "NCCL_DEBUG=WARN"),
    (variables(NCCL_SOCKET_IFNAME="eth,bond"), "nccl", "wrong", "lo, ens1f0, ib0"),
    (variables(NCCL_SOCKET_IFNAME="=ens"), "nccl", "wrong", "no interface"),
    (variables(CUDA_VISIBLE_DEVICES=""), "variables", "wrong", "unset it"),
    (variables(CUDA_LAUNCH_BLOCKING="1"), "variables", "warn", "every kernel"),
    ({"host": {"shared_memory": 64 * 2**20}}, "shared memory", "wrong", "--shm-size"),
    ({"host": {"shared_memory": 64 * 2**20}} | NO_GPU, "shared memory", "warn", "--shm-size"),
    ({"host": {"shared_memory": 64 * GB}}, "shared memory", "warn", "30 %"),
    ({"host": {"open_files": 1024}}, "limits", "warn", "ulimit -n 65535"),
    ({"host": {"locked_memory": 2**23}}, "limits", "warn", "ulimit -l unlimited"),
    ({"host": {"cores": 4}}, "machine", "warn", "for 8 GPUs"),
    ({"disk": {"writable": False}}, "disk", "wrong", "can't be written"),
    ({"disk": {"free": 10 * GB}}, "disk", "warn", "--run-dir"),
    ({"disk": {"free": 150 * GB}}, "checkpoint", "warn", "takes 96 GB"),
    ({"ray": {"resources": {"CPU": 8.0}}}, "ray", "wrong", "--num-gpus"),
    ({"ray": {"resources": {"CPU": 8.0, "GPU": 16.0}}}, "ray", "wrong", "--num-cpus"),
    ({"ray": {"lost": ["two"]}}, "ray", "warn", "lost host two"),
    ({"sglang": {"version": None}}, "sglang", "warn", "docs/gpu.md#install"),
    ({"packages": {"sglang": ["sglang<0.6 (installed: 0.6)"]}}, "sglang", "wrong", "installed: 0.6"),
    ({"packages": {"unmet_by_sglang": ["torch==2.14.1 (no)"]}}, "sglang", "warn", "torch==2.14.1"),
    ({"host": {"nvcc": False}}, "sglang", "warn", "CUDA_HOME"),
    ({"host_optimizer": {"rate": 5e7}}, "host step", "warn", "5e+07 numbers per second, fewer than"),
    ({"model": {"faults": ["has no weights (*.safetensors)"]}}, "model", "wrong", "no weights"),
    ({"model": {"tokenizer": None, "reason": "no vocabulary"}}, "model", "wrong", "no vocabulary"),
    ({"model": {"vocabulary": 32000}}, "model", "wrong", "different models"),
    ({"model": {"end": []}}, "model", "warn", "eos_token"),
    ({"model": {"template": False}}, "model", "warn", "no chat template"),
    ({"model": {"reason": "unknown tag"}}, "model", "wrong", "unknown tag"),
]


def test_a_host_where_nothing_is_missing(golden: Callable[[str, str], None]) -> None:
    report = judge(GOOD)
    assert report.fit and {line.level for _, line in report.lines} == {"ok"}
    golden("doctor/h100-8.txt", report.text())


@pytest.mark.parametrize(("changes", "check", "level", "words"), FAULTS)
def test_a_fault_is_said_with_its_remedy(
    changes: dict[str, dict[str, Any]], check: str, level: str, words: str
) -> None:
    report = judge(changed(changes))
    (line,) = [line for name, line in report.lines if name == check and line.level != "ok"]
    assert line.level == level and line.remedy
    assert words in f"{line.text} {line.remedy}"
    assert report.fit == all(line.level != "wrong" for _, line in report.lines)


def test_every_check_that_can_fail_is_seen_to() -> None:
    assert {check for _, check, _, _ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize(
    "value", ["ens", "=ib0", "^docker0", "eth,ib"], ids=["prefix", "exact", "left out", "one of two"]
)
def test_interfaces_that_are_there(value: str) -> None:
    lines = judge(changed(variables(NCCL_SOCKET_IFNAME=value))).lines
    assert [line.level for name, line in lines if name == "nccl"] == ["ok"]


def test_a_host_with_much_wrong(golden: Callable[[str, str], None]) -> None:
    facts = changed(
        {
            "host": {
                "memory": 64 * GB,
                "shared_memory": 64 * 2**20,
                "variables": {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"},
            },
            "gpus": {"gpus": BUSY, "processes": ["41 python 38000"]},
            "disk": {"free": 5 * GB},
        }
    )
    facts["torch"] = [{"failed": "no answer within 120 s", "argument": None}]
    facts["model"] += [{"failed": "OSError: not found", "argument": "models/qwem"}]
    report = judge(facts)
    assert not report.fit
    golden("doctor/faults.txt", report.text())


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8")
    (screen,) = re.findall(r"\$ rlgraph doctor[^\n]*\n(.*?)\n\.\.\.\n", page, re.DOTALL)
    gpus = {"gpus": [{"index": index, **GPU, "driver": "570.86.15"} for index in range(8)]}
    printed = judge(changed({"gpus": gpus, "host": {"open_files": 1024}})).text()
    assert set(screen.splitlines()) <= set(printed.splitlines())


def test_checks_take_probes_that_there_are() -> None:
    needs = {probe for check in CHECKS.values() for probe in inspect.signature(check).parameters}
    assert needs == set(PROBES) == set(ABOUT)


@pytest.fixture
def process() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a program as probes are started; it is gone at the end."""
    started = []

    def start(program: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-c", program]
        started.append(subprocess.Popen(command, text=True, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for running in started:
        running.kill()
        running.communicate()


def test_a_probe_that_hangs_is_ended(process: Callable[[str], subprocess.Popen[str]]) -> None:
    hanging = process("import time; time.sleep(600)")
    assert answer(hanging, 0.2, 120) == {"failed": "no answer within 120 s"}
    assert hanging.wait(60) < 0


def test_a_probe_that_crashes_says_its_last_line(process: Callable[[str], subprocess.Popen[str]]) -> None:
    crashing = process("import os, sys; sys.stderr.write('one\\nout of memory\\n'); os.abort()")
    assert answer(crashing, 60, 60) == {"failed": "out of memory"}
    assert answer(process("raise SystemExit(3)"), 60, 60) == {"failed": "ended with exit code 3"}


def test_what_libraries_print_is_passed_over(process: Callable[[str], subprocess.Popen[str]]) -> None:
    assert answer(process("print('loading'); print('{\"a\": 1}')"), 60, 60) == {"a": 1}


def smi(folder: Path, program: str) -> str:
    """A PATH on which ``nvidia-smi`` is a shell script."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


LISTING = """case $1 in
  --query-gpu=*) echo "0, NVIDIA H100 80GB HBM3, 81559, 600, 580.95.05"
                 echo "1, NVIDIA GB10, [N/A], [N/A], 580.95.05";;
  *) echo "41, python, 590";;
esac"""


@pytest.mark.parametrize(
    ("limit", "expected"), [("150000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", 0)]
)
def test_a_quota_of_a_control_group_limits_cores(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(limit)
    assert cores(tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_gpus_as_nvidia_smi_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", smi(tmp_path, LISTING))
    (facts,) = gather([("gpus",)], 60)["gpus"]
    assert [(gpu["index"], gpu["memory"], gpu["used"]) for gpu in facts["gpus"]] == [
        (0, 81559 * 2**20, 600 * 2**20),
        (1, None, 0),
    ]
    assert facts["processes"] == ["41 python 590"]
    assert [(name, line.level) for name, line in judge({"gpus": [facts]}).lines] == [
        ("gpus", "warn"),  # two kinds
        ("gpu memory", "ok"),
    ]


def test_an_nvidia_smi_that_fails_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", smi(tmp_path, "echo 'Driver/library version mismatch'; exit 18"))
    ((name, line),) = judge(gather([("gpus",)], 60)).lines
    assert (name, line.level) == ("gpus", "wrong") and "version mismatch" in line.text


def ask(*args: str) -> tuple[Result, dict[str, Any]]:
    result = CliRunner().invoke(main, ["doctor", *args, "--timeout", "300", "--json"])
    return result, json.loads(result.stdout)


@pytest.mark.slow
def test_this_machine(tool_files: Path, tmp_path: Path) -> None:
    folder = str(tool_files / "demo_tool_files" / "model")
    result, data = ask(folder, "--run-dir", str(tmp_path / "runs"))
    facts = {probe: answers[0] for probe, answers in data["facts"].items()}
    assert set(facts) == set(PROBES) and not [probe for probe in facts if "failed" in facts[probe]]
    assert facts["host"]["python"] == [*sys.version_info[:3]]
    assert facts["torch"]["version"] == version("torch") or version("torch") in facts["torch"]["version"]
    assert facts["packages"]["installed"]["ray"] == facts["ray"]["version"] == version("ray")
    assert facts["packages"]["unmet"] == []
    rate = f"{facts['host_optimizer']['rate']:.2e}"
    (said,) = [str(line) for line in data["lines"] if line["check"] == "host step"]
    assert f"host_step: {rate} in" in said and 1e5 < float(rate) < 1e12
    assert facts["model"]["weights"] > 0 and facts["model"]["prompt"]
    assert data["fit"] == all(line["level"] != "wrong" for line in data["lines"])
    assert result.exit_code == (0 if data["fit"] else 1)
    assert [line["level"] for line in data["lines"] if line["check"] == "model"] == ["ok"]


@pytest.mark.slow
def test_the_models_of_a_graph_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result, data = ask("grpo", f"models.policy.path={tmp_path}/empty", f"models.ref.path={tmp_path}/empty")
    assert result.exit_code == 1
    (line,) = [line for line in data["lines"] if line["check"] == "model"]
    assert line["level"] == "wrong" and line["remedy"]
    assert line["text"] == f"{tmp_path}/empty is not a model folder: it has no config.json"


@pytest.mark.slow
def test_models_are_looked_at_as_the_graph_says(tool_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(tool_files / "demo_tool_files" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    code = "from transformers import Qwen2Config\nclass OwnConfig(Qwen2Config): model_type = 'own'\n"
    (folder / "own.py").write_text(code)
    names = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config | names))
    paths = [f"models.{name}.path={folder}" for name in ("policy", "ref")]
    trusted = [f"models.{name}.trust_remote_code=true" for name in ("policy", "ref")]
    rope = [f"models.{name}.config={{rope_scaling: {{rope_type: no_such}}}}" for name in ("policy", "ref")]
    facts = []
    for more in ([], trusted, [*trusted, *rope]):
        models = _models("grpo", [*paths, *more])
        assert len(models) == 1
        facts += gather([("model", *models[0])], 120)["model"]
    assert [facts[n]["argument"] for n in (0, 2)] == [str(folder)] * 2
    assert facts[1]["type"] == "own" and "failed" not in facts[1]
    assert "there is no rope_type no_such" in facts[2]["failed"]


def test_a_models_end_tokens_and_template_are_those_of_a_run(tool_files: Path, tmp_path: Path) -> None:
    """The end token may be in the generation config alone, and a template may fail as it does on data."""
    folder = tmp_path / "model"
    shutil.copytree(tool_files / "demo_tool_files" / "model", folder)
    for name in ("config", "tokenizer_config"):
        fields = json.loads((folder / f"{name}.json").read_text())
        kept = {key: value for key, value in fields.items() if not key.startswith("eos_token")}
        (folder / f"{name}.json").write_text(json.dumps(kept))
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 3}))
    facts = PROBES["model"](str(folder))
    assert facts["end"] == [3] and facts["prompt"]
    generation.unlink()
    (folder / "chat_template.jinja").write_text("{{ messages[0].no_such.thing }}")
    facts = PROBES["model"](str(folder))
    assert facts["end"] == [] and "UndefinedError" in facts["reason"]


@pytest.mark.slow
def test_a_ray_cluster_that_is_not_there_is_bounded() -> None:
    (facts,) = gather([("ray", "127.0.0.1:1")], 3)["ray"]
    assert facts == {"failed": "no answer within 3 s", "argument": "127.0.0.1:1"}


def test_settings_are_for_graphs() -> None:
    result = CliRunner().invoke(main, ["doctor", "no/model", "rollout.n=2"])
    assert result.exit_code == 2 and "is not a graph" in result.stderr
