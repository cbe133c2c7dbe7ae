"""``--cluster auto``: the machine that this runs on, as a cluster.

GPUs are counted and named by ``nvidia-smi``; what each can do is looked up by its name. Without GPUs a device
is a CPU slot with its share of the memory; a slot's rates are assumed as in clusters/cpu.yaml, not measured.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlgraph.cluster import Cluster, load_cluster
from rlgraph.errors import GraphError, fail

SLOTS = 4  # of a machine without GPUs, at most
QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
MEBI = 2**20
RESERVE = 3.9e9  # as in clusters/h100-8.yaml
HOST_SHARE = 0.75  # of a host's memory may hold offloaded states, beside the processes (assumed)
ADAPTER = 50e9  # a 400 Gb/s adapter a device, as in clusters/h100-8.yaml: one host does not use it


@dataclass(frozen=True)
class Gpu:
    """What a GPU can do: operations a second, dense, and bytes a second, one way."""

    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    intra_link: float
    host_link: float


PCIE4, PCIE5 = 32e9, 64e9  # 16 lanes, one way

# Words of a name -> rates; of those whose words all occur, the one with most words. NVIDIA's data sheets,
# without sparsity; of GeForce cards the architectures' white papers, bfloat16 with float32 accumulation.
GPUS = {
    "B200": Gpu(2250e12, 75e12, 8.0e12, 900e9, PCIE5),
    "H200": Gpu(989e12, 67e12, 4.8e12, 450e9, PCIE5),
    "H200 NVL": Gpu(835e12, 60e12, 4.8e12, PCIE5, PCIE5),  # bridges join 2 or 4 of them: not counted
    "H100": Gpu(989e12, 67e12, 3.35e12, 450e9, PCIE5),
    "H100 NVL": Gpu(835e12, 60e12, 3.9e12, PCIE5, PCIE5),
    "H100 PCIE": Gpu(756e12, 51e12, 2.0e12, PCIE5, PCIE5),
    "H20": Gpu(148e12, 44e12, 4.0e12, 450e9, PCIE5),
    "A100": Gpu(312e12, 19.5e12, 2.039e12, 300e9, PCIE4),
    "A100 40GB": Gpu(312e12, 19.5e12, 1.555e12, 300e9, PCIE4),
    "A100 PCIE": Gpu(312e12, 19.5e12, 1.935e12, PCIE4, PCIE4),
    "A100 PCIE 40GB": Gpu(312e12, 19.5e12, 1.555e12, PCIE4, PCIE4),
    "L40S": Gpu(362e12, 91.6e12, 0.864e12, PCIE4, PCIE4),
    "L4": Gpu(121e12, 30.3e12, 0.3e12, PCIE4 / 2, PCIE4 / 2),  # 8 lanes
    "A10": Gpu(125e12, 31.2e12, 0.6e12, PCIE4, PCIE4),
    "4090": Gpu(165e12, 82.6e12, 1.008e12, PCIE4, PCIE4),
    "3090": Gpu(71e12, 35.6e12, 0.936e12, PCIE4, PCIE4),
}


def this_machine() -> Cluster:
    """This machine as a cluster of one host.

    Raises:
        GraphError: its GPUs can't be asked, differ, or are of a kind whose rates are not known.
    """
    if not _gpu_files() or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return of_cpu(local_devices(), memory())
    listing = _listed()
    return of_gpus(listing, os.environ.get("CUDA_VISIBLE_DEVICES"), memory())


def local_devices() -> int:
    """GPUs of this machine, or, where there is none, one CPU slot a core, at most 4."""
    gpus, visible = _gpu_files(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        return len([device for device in visible.split(",") if device.strip()]) or 1
    return gpus or min(len(os.sched_getaffinity(0)), SLOTS)


def of_cpu(slots: int, host_memory: float) -> Cluster:
    """CPU slots with equal shares of a machine's bytes, and the rates of the shipped cluster `cpu`."""
    assumed = load_cluster("cpu")
    found = {"cluster": f"auto-cpu-{slots}", "devices": slots, "memory": host_memory / slots}
    # what is offloaded goes to files, so that memory does not bound it
    return assumed.model_copy(update={**found, "host_memory": None})


def of_gpus(listing: str, visible: str | None, host_memory: float) -> Cluster:
    """The GPUs that ``nvidia-smi`` lists.

    Args:
        listing: a line a GPU: index, UUID, name, MiB of memory.
        visible: CUDA_VISIBLE_DEVICES: indices or UUIDs; None for all.
        host_memory: bytes of the host.

    Raises:
        GraphError: they differ, or are of a kind whose rates are not known.
    """
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line.strip()]
    if visible is not None:
        asked = [word.strip() for word in visible.split(",") if word.strip()]
        rows = [row for row in rows if any(row[0] == word or row[1].startswith(word) for word in asked)]
    kinds = sorted({(row[2], row[3]) for row in rows})
    if len(kinds) != 1:
        listed = ", ".join(name for name, _ in kinds) or "none"
        law = f"`--cluster auto` is for GPUs of one kind; visible are: {listed}"
        raise fail("auto-cluster", law, None, remedy="say with CUDA_VISIBLE_DEVICES which to use")
    ((name, mebibytes),) = kinds
    return _known(name, len(rows), mebibytes, host_memory)


def _known(name: str, devices: int, mebibytes: str, host_memory: float) -> Cluster:
    gpu = rates_of(name)
    known: dict[str, object] = {
        "cluster": f"auto-{devices}x{_one_word(name)}",
        "hosts": 1,
        "devices": devices,
    }
    known |= {"inter_link": ADAPTER, "reserve": RESERVE, "host_memory": HOST_SHARE * host_memory}
    if mebibytes.isdigit():  # not where a GPU shares the host's memory
        known["memory"] = float(mebibytes) * MEBI
    if gpu is None or "memory" not in known:
        raise _unknown(name, known)
    return Cluster.model_validate({**known, **vars(gpu)})


def rates_of(name: str) -> Gpu | None:
    """What a GPU of this name can do; None where that is not known.

    Example:
        >>> rates_of("NVIDIA A100-SXM4-40GB") == GPUS["A100 40GB"], rates_of("NVIDIA GH200 480GB")
        (True, None)
    """
    words = set(re.split(r"[\s-]+", name.upper()))
    found = [key for key in GPUS if set(key.split()) <= words]
    return GPUS[max(found, key=lambda key: len(key.split()))] if found else None


def _unknown(name: str, known: dict[str, object]) -> GraphError:
    fields = Cluster.model_fields
    texts = {field: f"{known[field]:.6g}" for field in known if field != "cluster"} | {"cluster": "mine"}
    lines = [f"{field}: {texts.get(field, '???')}" for field in fields]
    asked = ", ".join(field for field in fields if field not in known)
    remedy = f"write mine.yaml, with {asked} from its data sheet, and give --cluster mine.yaml:\n"
    remedy += "\n".join(f"    {line}" for line in lines)
    law = f"what `{name}` can do is not known"
    return fail("auto-cluster", law, None, sorted(GPUS), remedy)


def _one_word(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name.removeprefix("NVIDIA ")).strip("-")


def _gpu_files() -> int:
    names = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sum(name.isdigit() for name in names)


def _listed() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        law = "this machine has GPUs, and no `nvidia-smi` to ask which"
        raise fail("auto-cluster", law, None, remedy="give --cluster the path of a YAML file")
    done = subprocess.run([command, *QUERY], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise fail("auto-cluster", f"`nvidia-smi` failed: {said}", None, remedy="mend that, or give a file")
    return done.stdout


def memory(root: Path = Path("/")) -> float:
    """Bytes of this machine, or of the control group that this process is in, if it may have less.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    (total,) = re.findall(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return min([1024.0 * int(total), *_limits(root)])


def _limits(root: Path) -> list[float]:
    """Those of the process's control groups, and of the groups around them: version 2, and version 1."""
    found = []
    groups = root / "proc/self/cgroup"
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        if controllers in ("", "memory"):
            folder = top / path.lstrip("/")
            found += [place / name for place in (folder, *folder.parents) if place.is_relative_to(top)]
    texts = [path.read_text(encoding="utf-8").strip() for path in found if path.is_file()]
    return [float(text) for text in texts if text.isdigit()]
