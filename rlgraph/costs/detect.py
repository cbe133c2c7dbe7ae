"""Finds the cluster that a name stands for; for ``auto`` it is the machine that this runs on.

GPUs are counted and named by ``nvidia-smi``; what each can do is looked up by its name. Without GPUs a device
is a CPU slot with its share of the memory; a slot's rates are assumed as in clusters/cpu.yaml, not measured.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rlgraph.costs.hardware import FOLDER, Cluster, Here, read_cluster, shipped_clusters, shipped_file
from rlgraph.errors import GraphError, fail, nearest
from rlgraph.syntax.source import read

SLOTS = 4  # the most CPU slots of a machine without GPUs
QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
MEBI = 2**20
RESERVE = 3.9e9  # bytes, as in clusters/h100-8.yaml
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

    That is ``here``, or this machine. Of a GPU that is known, a name as ``a100-16`` means so many of it.
    ``margin`` takes the place of the cluster's own.

    Raises:
        GraphError: there is no such cluster, or the file is wrong; the error lists every problem.
    """
    cluster = (here or this_machine)() if name == "auto" else _named(name)
    return cluster if margin is None else cluster.model_copy(update={"margin": margin})


def _named(name: str) -> Cluster:
    path = shipped_file(name)
    path = path if path.exists() else Path(name)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return read_cluster(path)
    law, (kind, gpu, count) = f"there is no cluster `{name}`", _of_name(name)
    if gpu and (hosts := _hosts(count, gpu.host)):
        host = {"hosts": hosts, "devices": count // hosts, "kind": "cuda", "reserve": RESERVE}
        return Cluster.model_validate({"cluster": name, **host, **gpu.fields})
    if gpu:
        less = count // gpu.host * gpu.host
        sizes = (less, less + gpu.host) if count else (gpu.host, 8 * gpu.host)
        remedy = f"say how many GPUs: {' or '.join(f'{kind}-{size}' for size in sizes)}"
        raise fail("unknown-cluster", law, None, remedy=remedy)
    known, kinds = ["auto", *shipped_clusters()], ", ".join(map(_word, GPUS))
    remedy = f"{nearest(name, known)} KIND-N are N GPUs, on as few hosts alike as they need, of {kinds}; "
    remedy += "for others give the path of a YAML file that describes them (docs/cost_model.md)"
    raise fail("unknown-cluster", law, None, known, remedy.lstrip())


def _of_name(name: str) -> tuple[str, Gpu | None, int]:
    """Return the kind of GPU that a name as ``a100-16`` says, and how many; 0 for ``a100``."""
    keys = {_word(key): gpu for key, gpu in GPUS.items()}
    kind, _, number = name.lower().rpartition("-")
    if number.isdecimal() and kind in keys:
        return kind, keys[kind], int(number)
    return name.lower(), keys.get(name.lower()), 0


def _word(key: str) -> str:
    return key.lower().replace(" ", "-")


def _hosts(count: int, most: int) -> int | None:
    """Return on how few hosts, of at ``most`` so many GPUs and equally many, a number of them are.

    Example:
        >>> [_hosts(count, 8) for count in (4, 12, 64, 13)]
        [1, 2, 8, None]
    """
    fewest = max(-(-count // most), 1)
    return next((n for n in range(fewest, count // 2 + 1 + (count == 1)) if count and count % n == 0), None)


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
    gpus, visible = _gpu_files(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus or visible is None:
        return gpus
    words = [word.strip() for word in visible.split(",")]
    return len([*takewhile(lambda word: word and not word.startswith("-"), words)])


def of_cpu(slots: int, host_memory: float) -> Cluster:
    """Return a cluster of CPU slots with equal shares of memory and the rates of the cluster `cpu`."""
    # what is offloaded goes to files, so that memory does not bound it
    known = {"devices": slots, "memory": host_memory / slots, "host_memory": None}
    return read_cluster(shipped_file("cpu")).model_copy(update={"cluster": f"auto-cpu-{slots}", **known})


def visible_listing() -> str:
    """Return the lines of ``nvidia-smi`` for this machine's GPUs that CUDA_VISIBLE_DEVICES leaves.

    An empty variable hides none here: some versions of Ray empty it for a process that asked for no GPU.

    Raises:
        GraphError: they can't be asked.
    """
    return among(_listed(), os.environ.get("CUDA_VISIBLE_DEVICES") or None)


def among(listing: str, visible: str | None) -> str:
    """Return the lines of the GPUs that are visible, by CUDA_VISIBLE_DEVICES: indices or UUIDs; None: all."""
    if visible is None:
        return listing
    asked = [word.strip() for word in visible.split(",") if word.strip()]

    def is_asked(line: str) -> bool:
        index, uuid, *_ = (part.strip() for part in line.split(","))
        return any(index == word or uuid.startswith(word) for word in asked)

    return "".join(filter(is_asked, listing.splitlines(keepends=True)))


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
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
    kinds = sorted({(row[2], row[3]) for row in rows})
    if len(kinds) != 1:
        listed = ", ".join(name for name, _ in kinds) or "none"
        law = f"`--cluster auto` is for GPUs of one kind; visible are: {listed}"
        remedy = "say with CUDA_VISIBLE_DEVICES which to use, on a Ray cluster before `ray start`"
        raise fail("auto-cluster", law, None, remedy=remedy)
    ((name, mebibytes),) = kinds
    alike = Counter(per_host or [len(rows)])
    devices = max(alike, key=lambda count: (count * alike[count], count))
    return _known(name, alike[devices], devices, mebibytes, host_memory)


def _known(name: str, hosts: int, devices: int, mebibytes: str, host_memory: float) -> Cluster:
    gpu, times = rates_of(name), f"{hosts}x" if hosts > 1 else ""
    word = re.sub(r"[^\w.]+", "-", name.removeprefix("NVIDIA ")).strip("-")
    known: dict[str, object] = {"cluster": f"auto-{times}{devices}x{word}", "kind": "cuda", "hosts": hosts}
    known |= {"devices": devices, "inter_link": (gpu.inter_link if gpu else 50e9), "reserve": RESERVE}
    known["host_memory"] = HOST_SHARE * host_memory
    if mebibytes.isdigit():  # not where a GPU shares the host's memory
        known["memory"] = float(mebibytes) * MEBI
    if gpu is None or "memory" not in known:
        raise _unknown(name, known)
    return Cluster.model_validate({**gpu.fields, **known})


def rates_of(name: str) -> Gpu | None:
    """Return the peak rates of a GPU by its name, or None where they are not known.

    Example:
        >>> rates_of("NVIDIA A100-SXM4-40GB") == GPUS["A100 40GB"], rates_of("NVIDIA GH200 480GB")
        (True, None)
    """
    words = set(re.split(r"[\s-]+", name.upper()))
    keys = [key for key in GPUS if set(key.split()) <= words]
    return GPUS[max(keys, key=lambda key: len(key.split()))] if keys else None


def _unknown(name: str, known: dict[str, object]) -> GraphError:
    numbers = {field: f"{known[field]:.6g}" for field in known if field not in ("cluster", "kind")}
    fields = Cluster.model_fields.items()
    texts = {field: "null" for field, info in fields if info.default is None}
    texts |= {**numbers, "cluster": "mine", "kind": "cuda", "margin": "0.05"}
    asked = ", ".join(field for field in Cluster.model_fields if field not in texts)
    remedy = f"write mine.yaml, with {asked} from its data sheet, and give --cluster mine.yaml:\n"
    remedy += "\n".join(f"    {field}: {texts.get(field, '???')}" for field in Cluster.model_fields)
    return fail("auto-cluster", f"what `{name}` can do is not known", None, sorted(GPUS), remedy)


def _gpu_files(folder: Path = Path("/dev")) -> int:
    """Count the GPUs by their device files; under Windows (WSL) ``nvidia-smi`` counts them."""
    names = [path.name.removeprefix("nvidia") for path in folder.glob("nvidia[0-9]*")]
    if not names and (folder / "dxg").exists() and shutil.which("nvidia-smi"):
        return len(_listed().splitlines())
    return sum(name.isdigit() for name in names)


def _listed() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        law = "this machine has GPUs, and no `nvidia-smi` to ask which"
        raise fail("auto-cluster", law, None, remedy="give --cluster the path of a YAML file")
    import subprocess  # as long to import as a graph takes to parse

    done = subprocess.run([command, *QUERY], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise fail("auto-cluster", f"`nvidia-smi` failed: {said}", None, remedy="mend that, or give a file")
    return done.stdout


def memory(root: Path = Path("/")) -> float:
    """Return the bytes of this machine, or of this process's control group, if it may have less.

    ``root`` holds ``proc`` and ``sys``.
    """
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    (total,) = re.findall(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return min([1024.0 * int(total), *_limits(root)])


def _limits(root: Path) -> list[float]:
    """Return the limits of the process's control groups and those around them: version 2, and version 1."""
    files: list[Path] = []
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        if controllers in ("", "memory"):
            folder = top / path.lstrip("/")
            files += [place / name for place in (folder, *folder.parents) if place.is_relative_to(top)]
    texts = [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]
    return [float(text) for text in texts if text.isdigit()]
