"""``--cluster auto``: GPUs by their listing, CPU slots, and the memory that a process may have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.costs import detect
from rlgraph.costs.detect import (
    GPUS,
    SLOTS,
    among,
    load_cluster,
    local_devices,
    local_gpus,
    memory,
    of_cpu,
    of_gpus,
    rates_of,
)
from rlgraph.costs.hardware import Cluster
from rlgraph.errors import GraphError

EIGHT = "".join(f"{n}, GPU-{n}{n}ab, NVIDIA H100 80GB HBM3, 81559\n" for n in range(8))
HOST = 2e12
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\n"


def kernel(root: Path, groups: str = "", **limits: str) -> Path:
    """Files as a kernel shows them; a limit is named by its path below sys/fs/cgroup, with + for /."""
    texts = {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups}
    texts |= {"sys/fs/cgroup/" + name.replace("+", "/"): text for name, text in limits.items()}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_host_of_eight_is_the_shipped_one_but_for_its_memory() -> None:
    found, shipped = of_gpus(EIGHT, HOST), load_cluster("h100-8")
    other = {"cluster": shipped.cluster, "memory": shipped.memory}
    assert found.model_copy(update=other) == shipped
    assert (found.cluster, found.memory) == ("auto-8xH100-80GB-HBM3", 81559 * 2**20)


@pytest.mark.parametrize(("visible", "devices"), [("0,1", 2), ("7", 1), ("GPU-11ab, GPU-3", 2), (None, 8)])
def test_visible_devices_count(visible: str | None, devices: int) -> None:
    assert of_gpus(among(EIGHT, visible), HOST).total == devices


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIE"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIE"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIE 40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "4090"),
    ],
)
def test_a_name_has_rates(name: str, key: str) -> None:
    assert rates_of(name) is GPUS[key]


@pytest.mark.parametrize(
    "name", ["NVIDIA GH200 480GB", "NVIDIA A10G", "NVIDIA GeForce RTX 4090D", "Tesla V100"]
)
def test_what_only_looks_alike_has_none(name: str) -> None:
    assert rates_of(name) is None


def test_a_shipped_cluster_and_the_table_agree() -> None:
    for name, key in (("h100-8", "H100"), ("h200-8", "H200")):
        shipped = load_cluster(name)
        assert {field: getattr(shipped, field) for field in GPUS[key].fields} == GPUS[key].fields


@pytest.mark.parametrize(
    ("name", "hosts", "devices", "key"),
    [
        ("a100-8", 1, 8, "A100"),
        ("h100-16", 2, 8, "H100"),
        ("a100-40gb-4", 1, 4, "A100 40GB"),
        ("b200-1024", 128, 8, "B200"),
        ("4090-1", 1, 1, "4090"),
    ],
)
def test_so_many_of_any_gpu_that_is_known(name: str, hosts: int, devices: int, key: str) -> None:
    cluster = load_cluster(name)
    assert (cluster.cluster, cluster.hosts, cluster.devices, cluster.device) == (name, hosts, devices, "cuda")
    assert {field: getattr(cluster, field) for field in GPUS[key].fields} == GPUS[key].fields


def test_a_name_says_the_same_as_the_shipped_file() -> None:
    said, shipped = load_cluster("h100-16"), load_cluster("h100-64")
    assert said.model_copy(update={"cluster": shipped.cluster, "hosts": shipped.hosts}) == shipped


def test_names_that_are_no_cluster_say_which_are(golden: Callable[[str, str], None]) -> None:
    said = []
    for name in ("a1000-8", "h100-13", "h100-0"):
        with pytest.raises(GraphError) as caught:
            load_cluster(name)
        said.append(str(caught.value))
    golden("check/names_that_are_no_cluster.txt", "\n\n".join(said) + "\n")


def test_an_unknown_gpu_gives_a_file_to_fill_in(tmp_path: Path) -> None:
    with pytest.raises(GraphError) as caught:
        of_gpus("0, GPU-0, NVIDIA X900, 100000\n1, GPU-1, NVIDIA X900, 100000\n", HOST)
    said = str(caught.value)
    assert "what `NVIDIA X900` can do is not known" in said and "H100" in said
    file = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    asked = {line.removesuffix(": ???") for line in file if line.endswith("???")}
    assert asked == {"bf16_flops", "fp32_flops", "memory_bandwidth", "intra_link", "host_link"}
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(line.replace("???", "1e12") for line in file))
    found = load_cluster(str(path))
    assert (found.cluster, found.total, found.memory) == ("mine", 2, pytest.approx(100000 * 2**20, rel=1e-5))


def test_a_gpu_without_memory_of_its_own_is_not_known_either() -> None:
    with pytest.raises(GraphError, match=r"with memory, bf16_flops(.|\n)*memory: \?\?\?"):
        of_gpus("0, GPU-0, NVIDIA GB10, [N/A]\n", HOST)


def test_gpus_of_two_kinds_are_no_cluster() -> None:
    mixed = EIGHT + "8, GPU-8, NVIDIA L4, 23034\n"
    with pytest.raises(GraphError, match=r"of one kind.*H100.*L4(.|\n)*CUDA_VISIBLE_DEVICES"):
        of_gpus(mixed, HOST)
    assert of_gpus(among(mixed, "8"), HOST).cluster == "auto-1xL4"
    with pytest.raises(GraphError, match="visible are: none"):
        of_gpus(among(EIGHT, "MIG-1"), HOST)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, 4), ("0,2", 2), ("GPU-aa,GPU-bb", 2), ("", 0), ("-1", 0), ("1,-1,2", 1)],
)
def test_a_process_may_use_the_gpus_that_are_visible(
    visible: str | None, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "_gpu_files", lambda: 4)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == devices
    slots = min(len(os.sched_getaffinity(0)), SLOTS)
    assert local_devices() == (devices or slots)


def test_gpus_under_windows_are_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dxg").touch()
    assert detect._gpu_files(tmp_path) == 0
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{EIGHT.splitlines()[0]}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert detect._gpu_files(tmp_path) == 1
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    assert detect._gpu_files(tmp_path) == 2


def test_hosts_that_are_alike_are_a_cluster() -> None:
    found = of_gpus(EIGHT + EIGHT, HOST, (8, 8))
    shipped = load_cluster("h100-64")
    other = {"cluster": shipped.cluster, "memory": shipped.memory, "hosts": shipped.hosts}
    assert (found.cluster, found.hosts, found.total) == ("auto-2x8xH100-80GB-HBM3", 2, 16)
    assert found.model_copy(update=other) == shipped


@pytest.mark.parametrize(
    ("counts", "hosts", "devices"), [((8, 8, 4), 2, 8), ((8, 4, 4, 4), 3, 4), ((8, 4, 4), 1, 8)]
)
def test_of_hosts_that_differ_those_with_most_gpus_count(
    counts: tuple[int, ...], hosts: int, devices: int
) -> None:
    found = of_gpus(EIGHT, HOST, counts)
    assert (found.hosts, found.devices) == (hosts, devices)


def test_cpu_slots_share_the_memory_and_have_assumed_rates() -> None:
    found, assumed = of_cpu(3, 12e9), load_cluster("cpu")
    assert (found.total, found.memory, found.host_memory) == (3, 4e9, None)
    assert found.fp32_flops == assumed.fp32_flops
    assert Cluster.model_validate(found.model_dump()) == found


def test_memory_is_the_machines_without_a_limit(tmp_path: Path) -> None:
    assert memory(kernel(tmp_path)) == 16000000 * 1024
    assert memory(kernel(tmp_path, "0::/\n", **{"memory.max": "max\n"})) == 16000000 * 1024


def test_the_tightest_group_around_a_process_limits_it(tmp_path: Path) -> None:
    limits = {"a+memory.max": "3000000000\n", "a+b+memory.max": "max\n", "c+memory.max": "1\n"}
    assert memory(kernel(tmp_path, "0::/a/b\n", **limits)) == 3e9


def test_groups_of_version_1(tmp_path: Path) -> None:
    groups = "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n"
    limits = {"memory+job+memory.limit_in_bytes": "2000000000\n", "memory+memory.limit_in_bytes": str(2**63)}
    assert memory(kernel(tmp_path, groups, **limits)) == 2e9


def test_auto_plans_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as where there is no GPU, or one of a kind not known
    auto = load_cluster("auto")
    assert auto.total == local_devices() and auto.cluster == f"auto-cpu-{auto.total}"
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    small = [f"models.policy.path={tmp_path}", "rollout.max_new_tokens=32", "prompts.max_prompt_tokens=32"]
    result = CliRunner().invoke(main, ["plan", "grpo", *small, "--cluster", "auto"])
    assert result.exit_code == 0, result.stderr
    assert f"predicted on {auto.cluster}, not calibrated" in result.stdout
