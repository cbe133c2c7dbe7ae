"""What ``cuda.py`` measured, as files that the planner reads.

    python benchmarks/cuda_rates.py build/cuda.json -o h100.yaml --devices 8 --calibration h100-work.yaml
    rlgraph plan grpo --cluster h100.yaml --calibration h100-work.yaml

The cluster has the operations and bytes per second that this device reached, of a product and of copies. The
calibration says by which factors the measured work took longer than the middle of what the planner predicts
on that cluster. What the measured shares would make of the ranges in ``costs/efficiency.py`` is printed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.costs.calibration import calibration_text
from rlgraph.costs.detect import RESERVE, rates_of
from rlgraph.costs.efficiency import BEST, WORST, Rates
from rlgraph.costs.formulas import (
    Tokens,
    decode_step_seconds,
    host_seconds,
    score_seconds,
    sync_seconds,
    update_seconds,
)
from rlgraph.costs.hardware import Cluster
from rlgraph.costs.model_size import Size
from rlgraph.costs.models.config import Config

DTYPE = "bfloat16"
Work = Mapping[str, Any]


def main() -> None:
    options = parsed()
    measured = json.loads(options.json.read_text(encoding="utf-8"))
    cluster = cluster_of(measured, options.output.stem, options.devices)
    options.output.write_text(cluster_text(cluster, notes(measured)), encoding="utf-8")
    if options.calibration:
        name = f"{measured['device']['name']}, {measured['date']}"
        text = calibration_text(name, notes(measured), ratios(measured, cluster))
        options.calibration.write_text(text, encoding="utf-8")
    print("\n".join(ranges(measured, cluster)))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", type=Path, help="as cuda.py wrote it")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the cluster: a YAML file")
    parser.add_argument("--devices", type=int, default=1, help="such devices in a host")
    parser.add_argument("--calibration", type=Path, help="a second YAML file, for rlgraph plan --calibration")
    return parser.parse_args()


def notes(measured: Mapping[str, Any]) -> list[str]:
    """Where figures come from, for comments."""
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items() if number)
    lines = [f"benchmarks/cuda.py on {measured['device']['name']}, {measured['date']}: {versions}"]
    small = ["sizes were those of --small: these figures say nothing of any device"]
    return lines + small * measured["small"]


def cluster_of(measured: Mapping[str, Any], name: str, devices: int) -> Cluster:
    """A host of such devices. What one device can't show is its data sheet's, or assumed as for H100s."""
    found = {
        record["name"]: record["value"] for record in measured["records"] if record["measure"] == "ceilings"
    }
    gpu = rates_of(measured["device"]["name"])
    return Cluster(
        cluster=name,
        hosts=1,
        devices=devices,
        memory=measured["device"]["memory"],
        bf16_flops=found["product"],
        fp32_flops=gpu.fp32_flops if gpu else found["product"] / 15,
        memory_bandwidth=found["copy"],
        intra_link=gpu.intra_link if gpu else 64e9,  # PCIe 5
        inter_link=50e9,
        host_link=min(found["to the host"], found["from the host"]),
        reserve=RESERVE,
    )


def cluster_text(cluster: Cluster, about: Sequence[str]) -> str:
    """A cluster as YAML; it says which of its figures were not measured."""
    sheet = ("fp32_flops", "intra_link", "inter_link", "reserve")
    lines = [f"# {note}" for note in about]
    for name, value in cluster.model_dump(exclude_none=True).items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{name}: {text}" + ("  # not measured" if name in sheet else ""))
    return "\n".join(lines) + "\n"


def ratios(measured: Mapping[str, Any], cluster: Cluster) -> dict[str, dict[str, list[float]]]:
    """Kind of work -> measure -> measured over the middle of the predicted seconds, of each figure."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in measured["records"]:
        work = record["work"]
        if (kind := work.get("kind")) in SECONDS:
            ends = [SECONDS[kind](work, Rates(cluster, 1, DTYPE, grade)) for grade in (WORST, BEST)]
            ratio = work["seconds"] / math.sqrt(math.prod(ends))
            found.setdefault(kind, {}).setdefault(record["measure"], []).append(ratio)
    return found


def _size(work: Work) -> Size:
    return Size(Config.model_validate(work["config"]))


def _tokens(work: Work) -> Tokens:
    return Tokens(work["tokens"], work["squares"], work["passes"])


SECONDS: dict[str, Callable[[Work, Rates], float]] = {
    "update": lambda work, rates: update_seconds(_size(work), rates, _tokens(work), 1, work["factor"]),
    "score": lambda work, rates: score_seconds(_size(work), rates, _tokens(work)),
    "generate": lambda work, rates: decode_step_seconds(_size(work), rates, work["rows"], work["context"]),
    "sync": lambda work, rates: sync_seconds(_size(work), rates),
    "move": lambda work, rates: host_seconds(work["bytes"], rates),
}


def ranges(measured: Mapping[str, Any], cluster: Cluster) -> Iterator[str]:
    """Lines for ``rlgraph/costs/efficiency.py``: the worst and the best share that was reached."""
    yield f"# measured on {measured['device']['name']}, of the ceilings in {cluster.cluster}.yaml"
    records = measured["records"]
    for field, kind in (("update", "update"), ("score", "score")):
        shares = [_products(r, cluster) for r in records if r["work"].get("kind") == kind]
        yield from _range(field, shares)
    yield from _range("memory", [r["ratio"] for r in records if r["work"].get("kind") == "optimizer"])
    generated = [r["work"] for r in records if r["work"].get("kind") == "generate"]
    steps = [_launching(work) for work in generated if work["seconds"] > 2 * _reading(work, cluster)]
    yield from _range("decode_layer", sorted(steps, reverse=True))


def _products(record: Mapping[str, Any], cluster: Cluster) -> float:
    """Return the share of its peak that a pass's products reach, without what passes through memory."""
    work, size = record["work"], _size(record["work"])
    numbers = (size.activations + 3 * size.vocabulary) * work["tokens"] * work.get("factor", 1)
    passing = 2 * numbers / cluster.memory_bandwidth
    seconds = work["seconds"]
    return record["value"] * seconds / max(seconds - passing, 0.1 * seconds) / cluster.bf16_flops


def _reading(work: Work, cluster: Cluster) -> float:
    """Return the seconds in which a decode step's bytes are read at a copy's rate."""
    size = _size(work)
    read = 2 * size.touched(work["rows"]) + work["rows"] * work["context"] * size.kv_bytes(2)
    return read / cluster.memory_bandwidth


def _launching(work: Work) -> float:
    """Return the seconds per layer of a decode step that takes much longer than reading: kernels are launched
    one by one meanwhile."""
    return work["seconds"] / _size(work).launched_layers


def _range(field: str, shares: Sequence[float]) -> Iterator[str]:
    """Worst and best, in that order: of times the longest comes first."""
    if shares:
        ends = (shares[0], shares[-1]) if field == "decode_layer" else (min(shares), max(shares))
        yield f"    {field}: Range = ({ends[0]:.3g}, {ends[1]:.3g})  # {len(shares)} figures"


if __name__ == "__main__":
    main()
