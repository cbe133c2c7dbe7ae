"""Checks of GPUs, their driver, torch's build and NCCL, as pure functions of facts that probes gathered."""

from collections.abc import Mapping, Sequence

from rlgraph.runtime.doctor.probes import GUIDE, ProbeFacts
from rlgraph.runtime.engines.findings import Finding, Findings, ok, warn, wrong
from rlgraph.units import size_text

# CUDA's major version -> the oldest driver's: https://docs.nvidia.com/deploy/cuda-compatibility/
DRIVERS = {11: 450, 12: 525, 13: 580}
AMPERE = (8, 0)  # the first compute capability with bfloat16 and FlashAttention's kernels
USED = 0.05  # fraction of a GPU's memory: more than that belongs to another program
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
    known = [gpu for gpu in gpus["gpus"] if gpu["memory"]]
    busy = [gpu for gpu in known if gpu["used"] > USED * gpu["memory"]]
    processes = "; ".join(gpus["processes"]) or "none that this user or container may see"
    for gpu in busy:
        used, memory = size_text(gpu["used"]), size_text(gpu["memory"])
        remedy = f"end what holds it; processes on GPUs: {processes}"
        yield warn(f"GPU {gpu['index']}: {used} of {memory} are in use", remedy)
    if known and not busy:
        least = min(gpu["memory"] - gpu["used"] for gpu in known)
        yield ok(f"at least {size_text(least)} are free on each GPU")


def driver(gpus: ProbeFacts, torch: ProbeFacts) -> Findings:
    if not gpus["gpus"] or not torch["cuda"]:
        return
    release, cuda = gpus["gpus"][0]["driver"], torch["cuda"]
    oldest = DRIVERS.get(numbers(cuda)[0], 0)
    if numbers(release)[0] < oldest:
        text = f"driver {release} is too old for CUDA {cuda} of torch {torch['version']}"
        yield wrong(text, f"install driver {oldest} or newer on the host: {GUIDE}#driver")
    else:
        yield ok(f"driver {release} runs CUDA {cuda}")


def torch(gpus: ProbeFacts, torch: ProbeFacts) -> Findings:
    if not gpus["gpus"]:
        return
    if torch["cuda"] is None:
        text = f"torch {torch['version']} is built without CUDA"
        yield wrong(text, f"install a CUDA build: {GUIDE}#install")
    elif torch["error"] or not torch["capabilities"]:
        remedy = "is the driver loaded on the host, and does CUDA_VISIBLE_DEVICES leave a GPU?"
        yield wrong(f"torch opens no GPU: {torch['error'] or 'none is visible'}", remedy)
    else:
        for capability in sorted({(major, minor) for major, minor in torch["capabilities"]}):
            yield _capability(torch, *capability)


def _capability(torch: ProbeFacts, major: int, minor: int) -> Finding:
    text, kernels = f"compute capability {major}.{minor}", torch["architectures"]
    if not any(_runs(built, major, minor) for built in kernels):
        text += f": torch {torch['version']} has kernels for {', '.join(kernels)}"
        return wrong(text, "install a build of torch for these GPUs")
    if (major, minor) < AMPERE:
        remedy = "train with dtype float32, serve with it and the engine transformers"
        return warn(f"{text}: no bfloat16 and no FlashAttention", remedy)
    return ok(f"torch opens {len(torch['capabilities'])} GPUs, {text}, NCCL {torch['nccl']}")


def _runs(built: str, major: int, minor: int) -> bool:
    """Return whether kernels for ``sm_80``, or PTX for ``compute_80``, run on a device.

    Example:
        >>> [_runs(built, 8, 9) for built in ("sm_80", "sm_90a", "sm_75", "compute_75")]
        [True, False, False, True]
    """
    kind, _, digits = built.partition("_")
    number = int("".join(filter(str.isdigit, digits)))
    return number <= 10 * major + minor and (kind == "compute" or number // 10 == major)


def peers(torch: ProbeFacts) -> Findings:
    if torch["without_peer_access"]:
        pairs = ", ".join(f"{a}-{b}" for a, b in torch["without_peer_access"])
        remedy = f"NCCL goes through the host's memory there: {GUIDE}#nccl"
        yield warn(f"no peer access between GPUs {pairs}", remedy)
    elif len(torch["capabilities"]) > 1:
        yield ok("every GPU can access the memory of every other")


def nccl(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    variables = {name: value for name, value in host["variables"].items() if name.startswith("NCCL_")}
    lines = [
        *_workarounds(variables),
        *_interface(variables.get("NCCL_SOCKET_IFNAME", ""), host["interfaces"]),
    ]
    if gpus["gpus"] and not lines:
        text = " ".join(f"{name}={value}" for name, value in variables.items())
        lines = [ok(text or "no NCCL variable is set")]
    yield from lines


def _workarounds(variables: Mapping[str, str]) -> Findings:
    for name in WORKAROUNDS:
        if variables.get(name, "0") != "0":
            yield warn(
                f"{name}={variables[name]} can slow NCCL down", "unset it, unless it works around a fault"
            )
    if variables.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield warn(f"NCCL_DEBUG={variables['NCCL_DEBUG']} fills the logs", "set NCCL_DEBUG=WARN")


def _interface(value: str, interfaces: Sequence[str]) -> Findings:
    """Check NCCL_SOCKET_IFNAME: prefixes of names, whole names after ``=``, excluded ones after ``^``."""
    if not value or value.startswith("^"):
        return
    words = value.removeprefix("=").split(",")
    chosen = [name for name in interfaces if name in words]
    if not value.startswith("="):
        chosen += [name for name in interfaces if name.startswith(tuple(words))]
    if not chosen:
        text = f"NCCL_SOCKET_IFNAME={value} names no interface of this host"
        yield wrong(text, f"choose from {', '.join(interfaces)}, or unset it")


def variables(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    values = host["variables"]
    if gpus["gpus"] and values.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
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
    return tuple(int(word) for word in release.split(".") if word.isdigit()) or (0,)
