"""Checks of ``rlgraph doctor``: each is a pure function of facts that probes gathered.

A check yields a line for each thing that it has looked at, and none where it does not apply. Facts and their
units are those of runtime/doctor/probes.py.
"""

from collections.abc import Callable

from rlgraph.costs.efficiency import ASSUMED, WORST
from rlgraph.runtime.doctor import gpu_checks
from rlgraph.runtime.doctor.probes import GUIDE, ProbeFacts
from rlgraph.runtime.engines.findings import Finding, Findings, ok, warn, wrong
from rlgraph.units import size_text

PYTHONS = ((3, 11), (3, 12))  # requirements/ has a resolved set for each
GLIBC = (2, 34)  # the oldest that SGLang 0.5.23 has wheels for
SHARED = 1e9  # bytes of /dev/shm that NVIDIA's guide to NCCL gives a container
STORE = 0.3  # the fraction of host memory for Ray's object store, which lies in /dev/shm
OPEN_FILES = 65535  # the limit that Ray's guide to large clusters asks for
ROOM = 20e9  # bytes for what Ray spills, logs and samples, beside checkpoints
CHECKPOINT = 12  # bytes per parameter: float32 weights and two moments


def python(host: ProbeFacts) -> Findings:
    release = f"Python {'.'.join(map(str, host['python']))}"
    if tuple(host["python"][:2]) in PYTHONS:
        yield ok(release)
    else:
        remedy = "make the environment with Python 3.11 or 3.12, for which SGLang's packages are resolved"
        yield warn(f"{release} is not tried with SGLang", remedy)


def libc(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    if not gpus["gpus"]:
        return
    name, release = host["libc"]
    if name != "glibc" or gpu_checks.numbers(release) < GLIBC:
        remedy = f"use a newer system (Ubuntu 22.04, Debian 12), or the container: {GUIDE}#container"
        yield wrong(f"{name or 'no glibc'} {release}: SGLang has wheels for glibc 2.34 or newer", remedy)


def packages(packages: ProbeFacts) -> Findings:
    for requirement in packages["unmet"]:
        yield wrong(f"rlgraph needs {requirement}", "pip install 'rlgraph-compiler[run]'")
    if packages["unmet"]:
        return
    installed = [f"{name} {release}" for name, release in packages["installed"].items() if release]
    yield ok(", ".join(installed))


def shared_memory(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    text = f"/dev/shm has {size_text(host['shared_memory'])}"
    remedy = f"start the container with --shm-size=64g or --ipc=host: {GUIDE}#shared-memory"
    if host["shared_memory"] < SHARED:
        line = wrong if gpus["gpus"] else warn
        yield line(f"{text}: NCCL needs 1 GB, and Ray keeps columns there", remedy)
    elif host["shared_memory"] < STORE * host["memory"]:
        yield warn(f"{text}: Ray's object store takes 30 % of the memory, and goes to disk", remedy)
    else:
        yield ok(text)


def limits(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    files, locked = host["open_files"], host["locked_memory"]  # -1 is no limit
    if 0 <= files < OPEN_FILES:
        remedy = f"ulimit -n {OPEN_FILES} before Ray starts, or docker run --ulimit nofile={OPEN_FILES}"
        yield warn(f"{files} open files at most: many hosts need more", remedy)
    if gpus["gpus"] and locked >= 0:
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield warn(f"{size_text(locked)} of locked memory at most: InfiniBand needs more", remedy)


def machine(host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    text = f"{host['cores']} cores, {size_text(host['memory'])} of memory"
    if host["memory"] < 0.95 * host["memory_of_host"]:
        text += f" (a control group's limit; the host has {size_text(host['memory_of_host'])})"
    if host["cores"] < len(gpus["gpus"]):
        yield warn(f"{text}, for {len(gpus['gpus'])} GPUs", "allow a core or more per GPU: each has a worker")
    else:
        yield ok(text)


def disk(disk: ProbeFacts) -> Findings:
    text = f"{disk['path']}: {size_text(disk['free'])} of {size_text(disk['total'])} are free"
    if not disk["writable"]:
        yield wrong(f"{disk['path']} can't be written", "choose another place by --run-dir")
    elif disk["free"] < ROOM:
        yield warn(text, "free some, or choose another place by --run-dir")
    else:
        yield ok(text)


def checkpoint(disk: ProbeFacts, model: ProbeFacts) -> Findings:
    size = CHECKPOINT * (model["weights"] or 0) / model["bytes_per_weight"]
    if disk["free"] < 2 * size:
        text = f"{disk['path']}: {size_text(disk['free'])} are free, and a checkpoint of {model['path']}"
        remedy = "free room for two, the old one and the new, or choose another place by --run-dir"
        yield warn(f"{text} takes {size_text(size)}, where all of it is trained", remedy)


def ray(ray: ProbeFacts, gpus: ProbeFacts) -> Findings:
    if "address" not in ray:
        yield ok(f"Ray {ray['version']}; without --address, a run starts it on this machine")
        return
    cpus = int(ray["resources"].get("CPU", 0))
    devices = int(ray["resources"].get("GPU", 0))
    text = f"Ray {ray['version']} at {ray['address']}: {ray['nodes']} hosts, {cpus} CPUs, {devices} GPUs"
    for name in ray["lost"]:
        yield warn(f"the cluster has lost host {name}", "start Ray there again")
    if gpus["gpus"] and not devices:
        yield wrong(text, "start Ray with --num-gpus N where the GPUs are")
    elif cpus < devices:
        yield wrong(text, "start Ray with --num-cpus N: each worker takes a CPU beside its GPU")
    else:
        yield ok(text)


def sglang(packages: ProbeFacts, sglang: ProbeFacts, host: ProbeFacts, gpus: ProbeFacts) -> Findings:
    remedy = f"install it from requirements/: {GUIDE}#install"
    if sglang["version"] is None:
        if gpus["gpus"]:
            yield warn("SGLang is not installed: the embedded engine generates, much slower", remedy)
        return
    if packages["sglang"]:
        yield wrong(f"rlgraph needs {', '.join(packages['sglang'])}", remedy)
    elif gpus["gpus"] and packages["unmet_by_sglang"]:
        yield warn(f"SGLang needs {', '.join(packages['unmet_by_sglang'])}", remedy)
    else:
        yield ok(f"SGLang {sglang['version']} and torch_memory_saver can be imported")
    has_toolkit = host["nvcc"] or "CUDA_HOME" in host["variables"]
    if gpus["gpus"] and not has_toolkit:
        text = "there is no nvcc, and SGLang compiles kernels when a server starts"
        yield warn(text, f"install the CUDA toolkit and set CUDA_HOME: {GUIDE}#install")


def host_step(host_optimizer: ProbeFacts) -> Findings:
    workers = host_optimizer["workers"]
    rate = host_optimizer["rate"]
    each = f"each of {workers} workers steps" if workers > 1 else "a worker steps"
    text = f"with train.optimizer_offload {each} {rate:.2g} numbers per second"
    if rate < ASSUMED.host_step[WORST]:
        remedy = f"write host_step: {rate:.2e} in the cluster's file, for plans to count with it"
        yield warn(f"{text}, fewer than plans assume", remedy)
    else:
        yield ok(f"{text} (host_step: {rate:.2e} in a cluster's file)")


def model(model: ProbeFacts) -> Findings:
    name = model["path"]
    for fault in model["faults"]:
        yield wrong(f"{name} {fault}", "fetch the whole model")
    if "tokenizer" not in model:  # nothing of it could be read
        return
    tokens = model["tokenizer"]
    if tokens is None:
        yield wrong(f"{name} has no tokenizer: {model['reason']}", "fetch the tokenizer's files too")
        return
    if model["vocabulary"] and tokens > model["vocabulary"]:
        text = f"{name}: the tokenizer has {tokens} tokens, the model {model['vocabulary']}"
        yield wrong(text, "fetch both from one place: these belong to different models")
    if not model["end"]:
        remedy = "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        yield warn(f"{name}: no file names an end token", remedy)
    yield _template(model)


def _template(model: ProbeFacts) -> Finding:
    text = f"{model['path']}: {model['type']}, {model['tokenizer']} tokens"
    if not model["template"]:
        remedy = "give prompts as text, or add chat_template.jinja to the model"
        return warn(f"{text}, no chat template", remedy)
    if "reason" in model:
        return wrong(f"{model['path']}: its chat template fails: {model['reason']}", "mend the template")
    return ok(f"{text}, prompts as {model['prompt']!r}")


BESIDE_GPUS = (shared_memory, limits, machine, host_step, disk, checkpoint, ray, sglang, model)
# in the order of their lines; each takes the facts of the probes that its parameters name
CHECKS: dict[str, Callable[..., Findings]] = {
    check.__name__.replace("_", " "): check
    for check in (python, libc, packages, *gpu_checks.CHECKS, *BESIDE_GPUS)
}
