"""Checks of GPUs, their driver, torch's build and NCCL, as pure functions of facts that probes gathered."""

from collections.abc import Mapping, Sequence

from rlgraph.runtime.doctor.probes import GUIDE, ProbeFacts
from rlgraph.runtime.engines.findings import Finding, Findings, ok, warn, wrong
from rlgraph.units import size_text

# CUDA's major version -> the oldest driver's: https://docs.nvidia.com/deploy/cuda-compatibility/
DRIVERS = {11: 450, 12: 525, 13: 580}
AMPERE = (8, 0)  # the first compute capability with bfloat16 and FlashAttention's kernels
BUSY = 0.05  # fraction of a GPU's memory in use above which another program runs there
# NVIDIA's guide calls these workarounds, to be removed again
WORKAROUNDS = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_PROTO")


def gpus(gpus: ProbeFacts) -> Findings:
    names = [gpu["name"] for gpu in gpus["gpus"]]
    if gpus.get("files"):
        remedy = "install the driver's tools, or start the container with --gpus all"
        yield wrong(f"{gpus['files']} device files of GPUs, and no nvidia-smi", remedy)
    elif not names:
        remedy = f"if there is one, install its driver: {GUIDE}#driver"
        yield warn("no NVIDIA GPU: runs compute on CPUs", remedy)
    elif len(set(names)) > 1:
        remedy = "choose GPUs of one kind by CUDA_VISIBLE_DEVICES: the slowest sets the pace"
        yield warn(f"GPUs of several kinds: {', '.join(names)}", remedy)
    else:
        yield ok(f"{len(names)} x {names[0]}")


def gpu_memory(gpus: ProbeFacts) -> Findings:
    measured = [gpu for gpu in gpus["gpus"] if gpu["memory"]]
    if not measured:
        return
    busy = [gpu for gpu in measured if gpu["used"] > BUSY * gpu["memory"]]
    if not busy:
        least_free = min(gpu["memory"] - gpu["used"] for gpu in measured)
        yield ok(f"at least {size_text(least_free)} are free on each GPU")
        return
    processes = "; ".join(gpus["processes"]) or "none that this user or container may see"
    for gpu in busy:
        law = f"GPU {gpu['index']}: {size_text(gpu['used'])} of {size_text(gpu['memory'])} are in use"
        yield warn(law, f"end what holds it; processes on GPUs: {processes}")


def driver(gpus: ProbeFacts, torch: ProbeFacts) -> Findings:
    if not gpus["gpus"]:
        return
    if not torch["cuda"]:  # a build for CPUs, which the check of torch says
        return
    installed = gpus["gpus"][0]["driver"]
    cuda = torch["cuda"]
    required = DRIVERS.get(numbers(cuda)[0], 0)
    if numbers(installed)[0] < required:
        law = f"driver {installed} is too old for CUDA {cuda} of torch {torch['version']}"
        yield wrong(law, f"install driver {required} or newer on the host: {GUIDE}#driver")
    else:
        yield ok(f"driver {installed} runs CUDA {cuda}")


def torch(gpus: ProbeFacts, torch: ProbeFacts) -> Findings:
    if not gpus["gpus"]:
        return
    if torch["cuda"] is None:
        law = f"torch {torch['version']} is built without CUDA"
        yield wrong(law, f"install a CUDA build: {GUIDE}#install")
        return
    if torch["error"] or not torch["capabilities"]:
        reason = torch["error"] or "none is visible"
        remedy = "is the driver loaded on the host, and does CUDA_VISIBLE_DEVICES leave a GPU?"
        yield wrong(f"torch opens no GPU: {reason}", remedy)
        return
    capabilities = {(major, minor) for major, minor in torch["capabilities"]}
    for major, minor in sorted(capabilities):
        yield _capability(torch, major, minor)


def _capability(torch: ProbeFacts, major: int, minor: int) -> Finding:
    """Check that torch's build has kernels for a compute capability, and engines a data type."""
    name = f"compute capability {major}.{minor}"
    architectures = torch["architectures"]
    if not any(_runs(built, major, minor) for built in architectures):
        law = f"{name}: torch {torch['version']} has kernels for {', '.join(architectures)}"
        return wrong(law, "install a build of torch for these GPUs")
    if (major, minor) < AMPERE:
        remedy = "train with dtype float32, serve with it and the engine transformers"
        return warn(f"{name}: no bfloat16 and no FlashAttention", remedy)
    return ok(f"torch opens {len(torch['capabilities'])} GPUs, {name}, NCCL {torch['nccl']}")


def _runs(built: str, major: int, minor: int) -> bool:
    """Return whether kernels for ``sm_80``, or PTX for ``compute_80``, run on a device.

    Example:
        >>> [_runs(built, 8, 9) for built in ("sm_80", "sm_90a", "sm_75", "compute_75")]
        [True, False, False, True]
    """
    kind, _, digits = built.partition("_")
    built_for = int("".join(filter(str.isdigit, digits)))
    if built_for > 10 * major + minor:
        return False
    is_ptx = kind == "compute"  # which the driver compiles for any newer device
    return is_ptx or built_for // 10 == major


def peers(torch: ProbeFacts) -> Findings:
    if torch["without_peer_access"]:
        pairs = ", ".join(f"{a}-{b}" for a, b in torch["without_peer_access"])
        remedy = f"NCCL goes through the host's memory there: {GUIDE}#nccl"
        yield warn(f"no peer access between GPUs {pairs}", remedy)
    elif len(torch["capabilities"]) > 1:
        yield ok("every GPU can access the memory of every other")


def nccl(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    variables = {}
    for name, value in host["variables"].items():
        if name.startswith("NCCL_"):
            variables[name] = value
    findings = list(_workarounds(variables))
    findings += _interface(variables.get("NCCL_SOCKET_IFNAME", ""), host["interfaces"])
    if gpus["gpus"] and not findings:
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        findings = [ok(settings or "no NCCL variable is set")]
    yield from findings


def _workarounds(variables: Mapping[str, str]) -> Findings:
    for name in WORKAROUNDS:
        if variables.get(name, "0") != "0":
            law = f"{name}={variables[name]} can slow NCCL down"
            yield warn(law, "unset it, unless it works around a fault")
    if variables.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield warn(f"NCCL_DEBUG={variables['NCCL_DEBUG']} fills the logs", "set NCCL_DEBUG=WARN")


def _interface(value: str, interfaces: Sequence[str]) -> Findings:
    """Check NCCL_SOCKET_IFNAME: prefixes of names, whole names after ``=``, excluded ones after ``^``."""
    if not value or value.startswith("^"):
        return
    if value.startswith("="):
        names = value.removeprefix("=").split(",")
        chosen = [interface for interface in interfaces if interface in names]
    else:
        prefixes = tuple(value.split(","))
        chosen = [interface for interface in interfaces if interface.startswith(prefixes)]
    if not chosen:
        law = f"NCCL_SOCKET_IFNAME={value} names no interface of this host"
        yield wrong(law, f"choose from {', '.join(interfaces)}, or unset it")


def variables(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    values = host["variables"]
    hides_gpus = values.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if gpus["gpus"] and hides_gpus:
        yield wrong("CUDA_VISIBLE_DEVICES hides every GPU", "unset it: Ray gives each worker its own GPU")
    if values.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield warn("CUDA_LAUNCH_BLOCKING makes every kernel wait", "unset it after debugging")


CHECKS = (gpus, gpu_memory, driver, torch, peers, nccl, variables)


def numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparisons.

    Example:
        >>> numbers("580.65.06"), numbers("")
        ((580, 65, 6), (0,))
    """
    version_numbers = [int(word) for word in release.split(".") if word.isdigit()]
    return tuple(version_numbers) or (0,)
