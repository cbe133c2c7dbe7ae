"""What does rlgraph reach on one GPU: of its peak, of its memory's rate, of what a plan predicts?

    python benchmarks/cuda.py --json build/cuda.json               # one GPU, some nine minutes
    python benchmarks/cuda.py --small --device cpu --json FILE     # that the code runs, on any machine

Ceilings come first (a large product, copies on the device and to the host), and every figure is held against
one of them, a prediction or a peer of the same run. Models have the shapes of published ones and random
weights; nothing is downloaded, and neither Ray nor SGLang is needed. The file is written anew after every
measure, so that a run which is cut short leaves what it found; a measure that fails is noted with its error
and the rest goes on, as it does where a measure is left out for the time that it would take (``--budget``).

``cuda_rates.py`` turns the file into a cluster, a calibration and the ranges of ``costs/efficiency.py``.
"""

from __future__ import annotations

if __name__ == "cuda":  # torch looks for NVIDIA's package of this name while another benchmark imports it
    raise ModuleNotFoundError("cuda: this is a benchmark, not NVIDIA's package")

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

# this folder holds a cuda.py, which is the name of NVIDIA's package too: it must not be found here
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers
from benchmarks.cuda_side.bench import Bench, Record, Records
from benchmarks.cuda_side.ceilings import ceilings
from benchmarks.cuda_side.generating import embedded
from benchmarks.cuda_side.kernels import attention
from benchmarks.cuda_side.moving import gather, offload, save, sync
from benchmarks.cuda_side.training import compiled, head, kept, optimizer, peaks, updates, whole
from benchmarks.cuda_side.trl_update import trl_update

SCHEMA = 1
# each with the seconds that it may take on an H100; what does not fit into the budget is left out
MEASURES: tuple[tuple[Callable[[Bench], Records], int], ...] = (
    (ceilings, 15),
    (updates, 90),
    (kept, 25),
    (head, 15),
    (peaks, 45),
    (optimizer, 20),
    (attention, 60),
    (offload, 40),
    (sync, 60),
    (gather, 5),
    (save, 30),
    (embedded, 50),
    (trl_update, 70),
    (whole, 35),
    (compiled, 70),
)


def main() -> None:
    options = parsed()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: there is no GPU; --small --device cpu shows that the code runs")
        return
    with tempfile.TemporaryDirectory() as folder:
        start(options.device, folder)
        if options.small:
            torch.set_num_threads(1)
        bench = Bench(torch.device(options.device), options.small, Path(folder))
        found = run(bench, chosen(options.only), options.budget, options.json)
        dist.destroy_process_group()
    print(table(found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where figures are written")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that the code runs, no more")
    parser.add_argument("--budget", type=float, default=560, help="seconds that all measures may take")
    parser.add_argument("--only", default="", help="measures, by name, with commas between")
    options = parser.parse_args()
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu is for --small: the full sizes would take days")
    return options


def chosen(only: str) -> list[tuple[Callable[[Bench], Records], int]]:
    """The measures of these names, all of them where none is given; ceilings come first in any case."""
    names = {"ceilings", *only.split(",")}
    return [each for each in MEASURES if not only or each[0].__name__ in names]


def start(device: str, folder: str) -> None:
    """A process group of one rank, as a run has it."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    where = torch.device("cuda", 0) if device == "cuda" else None
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1, device_id=where
    )


def run(
    bench: Bench, measures: Sequence[tuple[Callable[[Bench], Records], int]], budget: float, file: Path | None
) -> dict[str, Any]:
    """Every measure after another; what was found so far is in the file at any time."""
    began = time.monotonic()
    found: dict[str, Any] = {**about(bench), "records": [], "failures": [], "left_out": [], "seconds": {}}
    for measure, needed in measures:
        name = measure.__name__
        if time.monotonic() - began + needed > budget:
            found["left_out"].append(
                {"measure": name, "why": f"{needed} s are more than is left of {budget:g}"}
            )
        else:
            carry_out(bench, measure, found)
            found["seconds"][name] = round(time.monotonic() - began - sum(found["seconds"].values()), 2)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def carry_out(bench: Bench, measure: Callable[[Bench], Records], found: dict[str, Any]) -> None:
    """One measure; what it found before it failed is kept."""
    name = measure.__name__
    try:
        for record in measure(bench):
            found["records"].append({"measure": name, **fields(record, bench.small)})
            print(line(found["records"][-1]), flush=True)
    except LookupError as missing:
        found["left_out"].append({"measure": name, "why": str(missing)})
    except Exception as error:
        found["failures"].append({"measure": name, "error": f"{type(error).__name__}: {error}"})
        print(f"  {name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    bench.clear()


def fields(record: Record, small: bool) -> dict[str, Any]:
    """A record as JSON has it; of small sizes nothing is wanted."""
    record = replace(record, want="") if small else record
    return {**asdict(record), "ratio": record.ratio, "met": record.is_met}


def about(bench: Bench) -> dict[str, Any]:
    """What it ran on and with."""
    if bench.is_cuda:
        gpu = torch.cuda.get_device_properties(0)
        device: dict[str, Any] = {"name": gpu.name, "memory": gpu.total_memory}
    else:
        device = {"name": "cpu", "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    names = ("torch", "transformers", "rlgraph-compiler")
    versions = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{n: known(n) for n in names},
    }
    at = time.strftime("%Y-%m-%d", time.gmtime())
    return {"schema": SCHEMA, "date": at, "small": bench.small, "device": device, "versions": versions}


def known(name: str) -> str | None:
    """An installed version; none of what is used from a checkout."""
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def line(record: dict[str, Any]) -> str:
    """A figure, and what it is held against."""
    text = f"  {record['name']:<70} {record['value']:>10.4g} {record['unit']:<9}"
    if record["ratio"] is not None:
        text += f" {record['ratio']:>7.3f} of {record['against']}"
    if record["want"]:
        text += f"  (want {record['want']}{'' if record['met'] else ', MISSED'})"
    return text.rstrip()


def table(found: dict[str, Any]) -> str:
    """All figures, and what is missing."""
    on = f"{found['device']['name']}, torch {found['versions']['torch']}"
    lines = [f"\n{on}, {sum(found['seconds'].values()):.0f} s", *map(line, found["records"])]
    lines += [f"  {each['measure']}: left out, {each['why']}" for each in found["left_out"]]
    lines += [f"  {each['measure']}: FAILED, {each['error']}" for each in found["failures"]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
