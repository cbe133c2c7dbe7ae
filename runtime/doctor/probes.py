"""Probes gather facts of a machine for ``rlgraph doctor``. Each probe runs in its own process.

A probe is a function that returns facts as JSON holds them. In a process of its own it can hang, crash in a
library or keep a CUDA context, and nothing of that reaches the doctor:

    python -m rlgraph.runtime.doctor.probes torch
"""

import json
import logging
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

from rlgraph.costs.detect import memory
from rlgraph.nodes.support.chat_template import TemplateError, rendered
from rlgraph.runtime.engines.findings import folder_findings, weight_files
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.model_inspection import inspect_model
from rlgraph.runtime.rundir.environment import PACKAGES, installed_version
from rlgraph.version import VERSION

ProbeFacts = dict[str, Any]

DISTRIBUTION = "rlgraph-compiler"
GUIDE = "docs/gpu.md"  # remedies point to its sections
# only these are read: what else a shell holds may be secret
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_HOME")
GPU_FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version")
PROCESS_FIELDS = ("pid", "process_name", "used_memory")
MEBI = 2**20
NUMBERS, STEPS = 2**23, 5  # an optimizer steps so many, and so often


def host() -> ProbeFacts:
    """Probe Python, the C library, limits of memory, cores and files, shared memory, and variables."""
    shared_memory = 0
    if Path("/dev/shm").is_dir():
        shared_memory = shutil.disk_usage("/dev/shm").total
    variables = {}
    for name in sorted(os.environ):
        if name in VARIABLES or name.startswith("NCCL_"):
            variables[name] = os.environ[name]
    has_nvcc = shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").is_file()
    return {
        "python": [*sys.version_info[:3]],
        "libc": [*platform.libc_ver()],
        "machine": platform.machine(),
        "memory": memory(),
        "memory_of_host": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cores": cores(),
        "shared_memory": shared_memory,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "nvcc": has_nvcc,
        "variables": variables,
    }


def cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: those of its mask, or fewer under a quota of time."""
    mask = len(os.sched_getaffinity(0))
    limit = root / "sys/fs/cgroup/cpu.max"
    if not limit.is_file():
        return mask
    quota, _, period = limit.read_text(encoding="utf-8").partition(" ")
    if not quota.strip().isdigit():  # it is "max"
        return mask
    return min(mask, max(1, int(quota) // int(period)))


def packages() -> ProbeFacts:
    """Probe installed versions, and the requirements of rlgraph and SGLang that are not met."""
    return {
        "installed": {"rlgraph": VERSION} | {name: installed_version(name) for name in PACKAGES},
        "unmet": [*_unmet(DISTRIBUTION, "run")],
        "sglang": [text for text in _unmet(DISTRIBUTION, "sglang") if text.startswith("sglang")],
        "unmet_by_sglang": [*_unmet("sglang", "")],
    }


def gpus() -> ProbeFacts:
    """Probe GPUs and the programs on them, as ``nvidia-smi`` lists them.

    Raises:
        RuntimeError: ``nvidia-smi`` is there, and fails.
    """
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "processes": [], "files": len([*Path("/dev").glob("nvidia[0-9]*")])}
    devices = []
    for index, name, total, used, driver in _query_rows("--query-gpu", GPU_FIELDS):
        device: ProbeFacts = {"index": int(index), "name": name, "memory": None, "used": 0, "driver": driver}
        # a GPU that shares the host's memory has no numbers here
        if total.isdigit():
            device["memory"] = int(total) * MEBI
        if used.isdigit():
            device["used"] = int(used) * MEBI
        devices.append(device)
    processes = [" ".join(row) for row in _query_rows("--query-compute-apps", PROCESS_FIELDS)]
    return {"gpus": devices, "processes": processes}


def torch() -> ProbeFacts:
    """Probe the build of torch, the devices that it opens, and pairs of them without peer access."""
    import torch as found

    error = ""
    if found.version.cuda:
        try:
            found.cuda.init()
        except (RuntimeError, AssertionError) as refused:
            error = str(refused).splitlines()[0]
    facts: ProbeFacts = {
        "version": found.__version__,
        "cuda": found.version.cuda,
        "error": error,
        "architectures": [],
        "capabilities": [],
        "nccl": None,
        "without_peer_access": [],
    }
    devices = 0
    if found.version.cuda and not error:
        devices = found.cuda.device_count()
    if devices == 0:
        return facts
    facts["architectures"] = found.cuda.get_arch_list()
    facts["capabilities"] = [[*found.cuda.get_device_capability(device)] for device in range(devices)]
    facts["nccl"] = ".".join(map(str, found.cuda.nccl.version()))
    for a, b in combinations(range(devices), 2):
        if not found.cuda.can_device_access_peer(a, b):
            facts["without_peer_access"].append([a, b])
    return facts


def host_optimizer() -> ProbeFacts:
    """Probe how many numbers per second a worker's optimizer steps on the host (``train.optimizer_offload``),
    while the workers of all devices do: in the best of a few steps."""
    import torch as found

    from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW

    def best(_worker: int) -> float:
        found.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
        weight = found.nn.Parameter(found.zeros(NUMBERS, dtype=found.bfloat16))
        weight.grad_dtype = found.float32
        weight.grad = found.ones(NUMBERS)
        optimizer = HostAdamW([weight], lr=1e-3)
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    workers = found.cuda.device_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        return {"workers": workers, "rate": NUMBERS / max(pool.map(best, range(workers)))}


def sglang() -> ProbeFacts:
    """Probe whether SGLang and what rlgraph uses beside it can be imported."""
    if installed_version("sglang") is None:
        return {"version": None}
    import torch_memory_saver  # noqa: F401
    from sglang.srt.utils import MultiprocessingSerializer  # noqa: F401
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: F401

    return {"version": installed_version("sglang")}


def ray(address: str | None = None) -> ProbeFacts:
    """Probe Ray, and where an address is given, the cluster there.

    Raises:
        ConnectionError: no cluster answers at the address.
    """
    import ray as found

    if address is None:
        return {"version": found.__version__}
    found.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    nodes = found.nodes()
    return {
        "version": found.__version__,
        "address": address,
        "resources": found.cluster_resources(),
        "nodes": sum(node["Alive"] for node in nodes),
        "lost": [node["NodeManagerHostname"] for node in nodes if not node["Alive"]],
    }


def disk(path: str) -> ProbeFacts:
    """Probe the room at the nearest folder of a path that exists, and whether a file can be written there."""
    absolute = Path(path).absolute()
    folder = next(place for place in (absolute, *absolute.parents) if place.is_dir())
    usage = shutil.disk_usage(folder)
    return {"path": path, "free": usage.free, "total": usage.total, "writable": os.access(folder, os.W_OK)}


def model(path: str, changed: str = "{}", trusted: str = "false") -> ProbeFacts:
    """Probe which parts of a model can be loaded: configuration, weights, tokenizer, chat template.

    Args:
        path: a folder, or a name of a hub.
        changed, trusted: what a graph says of it, ``config`` and ``trust_remote_code``, as JSON.

    Raises:
        OSError: the configuration can't be loaded, as a folder or from a hub.
        ConfigError: a changed field is without effect, or can't have its value.
    """
    folder = Path(path)
    faults = list[str]()
    if folder.exists():
        faults = [finding.text for finding in folder_findings(path)]
    if folder.is_dir() and not (folder / "config.json").is_file():
        return {"path": path, "faults": faults, "weights": None, "bytes_per_weight": 4}
    inspected = inspect_model(ModelFiles(path, json.loads(changed), json.loads(trusted)))
    facts: ProbeFacts = {
        "path": path,
        "faults": faults,
        "type": inspected.config.model_type,
        "vocabulary": inspected.vocabulary,
        "weights": None,
        "bytes_per_weight": getattr(inspected.config.dtype, "itemsize", 4),
    }
    if folder.is_dir():
        facts["weights"] = sum(file.stat().st_size for file in weight_files(folder))
    if inspected.tokenizer_error:
        return facts | {"tokenizer": None, "reason": str(inspected.tokenizer_error).splitlines()[0]}
    tokenizer = inspected.tokenizer
    facts["tokenizer"] = len(tokenizer)
    facts["end"] = inspected.stop_ids
    facts["template"] = bool(tokenizer.chat_template)
    if tokenizer.chat_template:
        try:
            facts["prompt"] = rendered(tokenizer, [{"role": "user", "content": "2 + 2?"}], None)
        except TemplateError as error:
            facts["reason"] = f"{type(error.__cause__).__name__}: {error.__cause__}".splitlines()[0]
    return facts


PROBES: dict[str, Callable[..., ProbeFacts]] = {
    probe.__name__: probe for probe in (host, packages, gpus, torch, host_optimizer, sglang, ray, disk, model)
}
ProbeCall = tuple[str, *tuple[str, ...]]  # a probe and its arguments


def _unmet(name: str, extra: str) -> Iterator[str]:
    """Yield requirements of an installed distribution that are not met, with what is installed."""
    from packaging.requirements import Requirement

    if installed_version(name) is None:
        return
    for text in metadata(name).get_all("Requires-Dist") or ():
        wanted = Requirement(text)
        is_of_extra = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        if not is_of_extra:
            continue
        installed = installed_version(wanted.name)
        if installed is None:
            yield f"{wanted.name}{wanted.specifier} (installed: no)"
        elif not wanted.specifier.contains(installed, prereleases=True):
            yield f"{wanted.name}{wanted.specifier} (installed: {installed})"


def _query_rows(query: str, fields: Sequence[str]) -> list[list[str]]:
    """Return the rows of a query of ``nvidia-smi``."""
    command = ["nvidia-smi", f"{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"nvidia-smi failed: {(finished.stdout + finished.stderr).strip()}")
    rows = []
    for line in finished.stdout.splitlines():
        if line.strip():
            rows.append([cell.strip() for cell in line.split(",")])
    return rows


def main(words: Sequence[str]) -> None:
    """Print the facts of a probe as the last line, or why it has none."""
    name, *arguments = words
    try:
        facts = PROBES[name](*arguments)
    except Exception as error:  # whatever a library raises is a finding
        facts = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(f"\n{json.dumps(facts)}", flush=True)
    os._exit(0)  # skips what a library would still do at exit


if __name__ == "__main__":
    main(sys.argv[1:])
