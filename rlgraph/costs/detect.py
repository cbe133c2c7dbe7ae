"""Finds the cluster that a name stands for; ``auto`` is the machine that this runs on.

GPUs are counted and named by ``nvidia-smi``; their rates are looked up by name. Without GPUs a device is a
CPU slot with its share of the memory, whose rates are those of clusters/cpu.yaml: assumed, not measured.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlgraph.costs.hardware import FOLDER, Cluster, Here, read_cluster, shipped_clusters, shipped_file
from rlgraph.errors import GraphError, fail, nearest
from rlgraph.syntax.source import read

SLOTS = 4  # the most CPU slots of a machine without GPUs
QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
MEBI = 2**20
RESERVE = 3.9e9  # bytes, as in clusters/h100-8.yaml
# controllers of a line of /proc/self/cgroup -> the folder of its groups, and the file of a group's limit
GROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max"),  # version 2 has all controllers in one
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}
HOST_SHARE = 0.75  # the fraction of host memory that may hold offloaded states (assumed)


@dataclass(frozen=True)
class Gpu:
    """Bytes of a GPU, and its peak rates: dense operations per second, and bytes per second, one way."""

    memory: float
    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    intra_link: float
    host_link: float
    inter_link: float = 50e9  # a 400 Gb/s adapter per GPU
    host: int = 8  # GPUs of a host
    host_memory: float = 1.5e12  # bytes of one for offloaded states: of 2 TB, what is left beside processes
    linked: int | None = None  # GPUs that NVLink joins, of several hosts

    @property
    def fields(self) -> dict[str, object]:
        """Return what it says of a cluster, by the cluster's fields."""
        return {name: value for name, value in vars(self).items() if name != "host"}


# words of a name -> rates; of those whose words all occur, the one with most words
GPUS = {key: Gpu(**rates) for key, rates in read(FOLDER.parent / "gpus.yaml").plain().items()}


def load_cluster(name: str, here: Here | None = None, margin: float | None = None) -> Cluster:
    """Return a shipped cluster by name, the one that a YAML file describes, or what ``auto`` stands for.

    ``auto`` is ``here``, or this machine. For a known GPU a name such as ``a100-16`` means so many of it.
    ``margin`` replaces the cluster's own.

    Raises:
        GraphError: there is no such cluster, or the file is wrong; the error lists every problem.
    """
    if name == "auto":
        detect = here or this_machine
        cluster = detect()
    else:
        cluster = _named_cluster(name)
    if margin is None:
        return cluster
    return cluster.model_copy(update={"margin": margin})


def _named_cluster(name: str) -> Cluster:
    path = shipped_file(name)
    if not path.exists():
        path = Path(name)
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return read_cluster(path)
    kind, gpu, count = _gpu_and_count(name)
    if gpu is None:
        raise _unknown_cluster(name)
    hosts = _hosts(count, gpu.host)
    if hosts is None:
        raise _uneven_count(name, kind, gpu, count)
    fields = {
        "cluster": name,
        "hosts": hosts,
        "devices": count // hosts,
        "kind": "cuda",
        "reserve": RESERVE,
        **gpu.fields,
    }
    return Cluster.model_validate(fields)


def _uneven_count(name: str, kind: str, gpu: Gpu, count: int) -> GraphError:
    """Return the error about a number of GPUs that no number of equal hosts has; the remedy is the next."""
    fewer, more = gpu.host, 8 * gpu.host
    if count:
        fewer = count // gpu.host * gpu.host
        more = fewer + gpu.host
    remedy = f"say how many GPUs: {kind}-{fewer} or {kind}-{more}"
    return fail("unknown-cluster", f"there is no cluster `{name}`", None, remedy=remedy)


def _unknown_cluster(name: str) -> GraphError:
    known = ["auto", *shipped_clusters()]
    kinds = ", ".join(_cluster_word(key) for key in GPUS)
    remedy = (
        f"{nearest(name, known)} KIND-N are N GPUs, on as few hosts alike as they need, of {kinds}; "
        "for others give the path of a YAML file that describes them (docs/cost_model.md)"
    )
    return fail("unknown-cluster", f"there is no cluster `{name}`", None, known, remedy.lstrip())


def _gpu_and_count(name: str) -> tuple[str, Gpu | None, int]:
    """Return the kind of GPU in a name such as ``a100-16``, and how many; 0 for ``a100``."""
    gpus = {_cluster_word(key): gpu for key, gpu in GPUS.items()}
    kind, _, number = name.lower().rpartition("-")
    if number.isdecimal() and kind in gpus:
        return kind, gpus[kind], int(number)
    return name.lower(), gpus.get(name.lower()), 0


def _cluster_word(key: str) -> str:
    return key.lower().replace(" ", "-")


def _hosts(count: int, largest: int) -> int | None:
    """Return the fewest hosts, with an equal number of at most ``largest`` GPUs each, that have ``count``.

    None if there are none, or if each host would have a single GPU.

    Example:
        >>> [_hosts(count, 8) for count in (4, 12, 64, 13)]
        [1, 2, 8, None]
    """
    if count == 1:
        return 1
    fewest = max(-(-count // largest), 1)
    most = count // 2
    for hosts in range(fewest, most + 1):
        if count % hosts == 0:
            return hosts
    return None


def this_machine() -> Cluster:
    """Describe this machine as a cluster of one host.

    Raises:
        GraphError: its GPUs can't be asked, differ, or are of a kind whose rates are not known.
    """
    if not local_gpus():
        return of_cpu(local_devices(), memory())
    return of_gpus(visible_listing(), memory())


def local_device() -> str:
    """Return the kind of this machine's devices: ``cuda`` where it has usable GPUs, else ``cpu``."""
    return "cuda" if local_gpus() else "cpu"


def local_devices() -> int:
    """Return how many GPUs this machine has, or, without any, one CPU slot per core, at most 4."""
    return local_gpus() or min(len(os.sched_getaffinity(0)), SLOTS)


def local_gpus() -> int:
    """Return how many GPUs of this machine a process may use: those that CUDA_VISIBLE_DEVICES leaves.

    It hides all of them where it is empty, and those behind the first negative number, as CUDA reads it.
    """
    gpus = _gpu_files()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus or visible is None:
        return gpus
    count = 0
    for word in visible.split(","):
        name = word.strip()
        if not name or name.startswith("-"):
            break
        count += 1
    return count


def of_cpu(slots: int, host_memory: float) -> Cluster:
    """Return a cluster of CPU slots with equal shares of memory and the rates of the cluster `cpu`."""
    fields = {
        "cluster": f"auto-cpu-{slots}",
        "devices": slots,
        "memory": host_memory / slots,
        "host_memory": None,  # offloaded states go to files, so that memory does not bound them
    }
    return read_cluster(shipped_file("cpu")).model_copy(update=fields)


def visible_listing() -> str:
    """Return the lines of ``nvidia-smi`` for this machine's GPUs that CUDA_VISIBLE_DEVICES leaves.

    An empty variable hides none here: some versions of Ray empty it for a process that asked for no GPU.

    Raises:
        GraphError: they can't be asked.
    """
    return among(_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES") or None)


def among(listing: str, visible: str | None) -> str:
    """Return the lines of the GPUs that are visible, by CUDA_VISIBLE_DEVICES: indices or UUIDs; None: all."""
    if visible is None:
        return listing
    words = [word.strip() for word in visible.split(",")]
    lines = []
    for line in listing.splitlines(keepends=True):
        index, uuid, *_ = (column.strip() for column in line.split(","))
        for word in words:
            is_named = index == word or uuid.startswith(word)
            if word and is_named:
                lines.append(line)
                break
    return "".join(lines)


def of_gpus(listing: str, host_memory: float, per_host: Sequence[int] = ()) -> Cluster:
    """Return a cluster of the GPUs that ``nvidia-smi`` lists.

    Args:
        listing: one line per GPU: index, UUID, name, MiB of memory; of one host or of several in turn.
        host_memory: bytes of a host, the smallest of several.
        per_host: how many GPUs each host has; one host has them all unless given. Where hosts differ, the
            cluster has those that are alike and together have the most GPUs.

    Raises:
        GraphError: the GPUs differ, or are of a kind whose rates are not known.
    """
    rows = [[column.strip() for column in line.split(",")] for line in listing.splitlines()]
    kinds = sorted({(row[2], row[3]) for row in rows})
    if len(kinds) != 1:
        names = "none"
        if kinds:
            names = ", ".join(name for name, _ in kinds)
        law = f"`--cluster auto` is for GPUs of one kind; visible are: {names}"
        remedy = "say with CUDA_VISIBLE_DEVICES which to use, on a Ray cluster before `ray start`"
        raise fail("auto-cluster", law, None, remedy=remedy)
    ((name, mebibytes),) = kinds
    hosts_by_size = Counter(per_host or [len(rows)])
    devices = max(hosts_by_size, key=lambda count: (count * hosts_by_size[count], count))
    return _of_equal_hosts(name, hosts_by_size[devices], devices, mebibytes, host_memory)


def _of_equal_hosts(name: str, hosts: int, devices: int, mebibytes: str, host_memory: float) -> Cluster:
    gpu = rates_of(name)
    word = re.sub(r"[^\w.]+", "-", name.removeprefix("NVIDIA ")).strip("-")
    count = f"{hosts}x{devices}" if hosts > 1 else f"{devices}"
    fields: dict[str, object] = {
        "cluster": f"auto-{count}x{word}",
        "kind": "cuda",
        "hosts": hosts,
        "devices": devices,
        "inter_link": gpu.inter_link if gpu else 50e9,
        "reserve": RESERVE,
        "host_memory": HOST_SHARE * host_memory,
    }
    if mebibytes.isdigit():  # a GPU that shares the host's memory has no number
        fields["memory"] = float(mebibytes) * MEBI
    if gpu is None or "memory" not in fields:
        raise _unknown_gpu(name, fields)
    return Cluster.model_validate({**gpu.fields, **fields})


def rates_of(name: str) -> Gpu | None:
    """Return the peak rates of a GPU by its name, or None where they are not known.

    Example:
        >>> rates_of("NVIDIA A100-SXM4-40GB") == GPUS["A100 40GB"], rates_of("NVIDIA GH200 480GB")
        (True, None)
    """
    words = set(re.split(r"[\s-]+", name.upper()))
    keys = [key for key in GPUS if set(key.split()) <= words]
    if not keys:
        return None
    most_specific = max(keys, key=lambda key: len(key.split()))
    return GPUS[most_specific]


def _unknown_gpu(name: str, known: dict[str, object]) -> GraphError:
    """Return the error about a GPU without rates; its remedy is a file with the fields that are known."""
    texts = {"cluster": "mine", "kind": "cuda", "margin": "0.05"}
    for field, info in Cluster.model_fields.items():
        if field in texts:
            continue
        if field in known:
            texts[field] = f"{known[field]:.6g}"
        elif info.default is None:
            texts[field] = "null"
    missing = ", ".join(field for field in Cluster.model_fields if field not in texts)
    remedy = f"write mine.yaml, with {missing} from its data sheet, and give --cluster mine.yaml:\n"
    remedy += "\n".join(f"    {field}: {texts.get(field, '???')}" for field in Cluster.model_fields)
    return fail("auto-cluster", f"what `{name}` can do is not known", None, sorted(GPUS), remedy)


def _gpu_files(folder: Path = Path("/dev")) -> int:
    """Count the GPUs by their device files; under Windows (WSL) ``nvidia-smi`` counts them."""
    names = [path.name.removeprefix("nvidia") for path in folder.glob("nvidia[0-9]*")]
    if not names and (folder / "dxg").exists() and shutil.which("nvidia-smi"):
        return len(_nvidia_smi().splitlines())
    return sum(name.isdigit() for name in names)


def _nvidia_smi() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        law = "this machine has GPUs, and no `nvidia-smi` to ask which"
        raise fail("auto-cluster", law, None, remedy="give --cluster the path of a YAML file")
    import subprocess  # it takes as long to import as a graph to parse

    result = subprocess.run([command, *QUERY], capture_output=True, text=True, check=False)
    if result.returncode:
        output = (result.stdout + result.stderr).strip()
        raise fail("auto-cluster", f"`nvidia-smi` failed: {output}", None, remedy="mend that, or give a file")
    return result.stdout


def memory(root: Path = Path("/")) -> float:
    """Return the bytes of this machine, or of this process's control group, if it may have less.

    ``root`` holds ``proc`` and ``sys``.
    """
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    (total,) = re.findall(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return min([1024.0 * int(total), *_group_limits(root)])


def _group_limits(root: Path) -> list[float]:
    """Return the limits of the process's control groups and those around them: version 2, and version 1."""
    groups = root / "proc/self/cgroup"
    if not groups.is_file():
        return []
    limits: list[float] = []
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in GROUP_FILES:
            continue
        folder, name = GROUP_FILES[controllers]
        top = root / folder
        group = top / path.lstrip("/")
        for ancestor in (group, *group.parents):
            file = ancestor / name
            if not ancestor.is_relative_to(top) or not file.is_file():
                continue
            text = file.read_text(encoding="utf-8").strip()
            if text.isdigit():  # else it says that there is no limit
                limits.append(float(text))
    return limits
