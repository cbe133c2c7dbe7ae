"""The ceilings that other figures are held against: a product, copies on the device and to the host."""

from __future__ import annotations

import torch
from benchmarks.cuda_side.bench import Bench, Record, Records

from rlgraph.costs.detect import rates_of


def ceilings(bench: Bench) -> Records:
    """What the device reaches at best, beside its data sheet where that is known."""
    gpu = rates_of(torch.cuda.get_device_name()) if bench.is_cuda else None
    yield _kept(bench, "product", _product(bench), "FLOP/s", gpu.bf16_flops if gpu else None)
    yield _kept(bench, "copy", _copy(bench), "B/s", gpu.memory_bandwidth if gpu else None)
    for name, rate in zip(("to the host", "from the host"), _host(bench), strict=True):
        yield _kept(bench, name, rate, "B/s", gpu.host_link if gpu else None)


def _kept(bench: Bench, name: str, rate: float, unit: str, sheet: float | None) -> Record:
    bench.found[name] = rate
    return Record(name, rate, unit, "data sheet" if sheet else "", sheet, work={"ceiling": name})


def _product(bench: Bench) -> float:
    """Operations per second of a bfloat16 product of two square matrices of random numbers."""
    side = bench.size(8192, 256)
    a, b = torch.randn(2, side, side, device=bench.device, dtype=torch.bfloat16)
    return 2 * side**3 / bench.seconds(lambda: a @ b, repeats=10, warm=3)


def _copy(bench: Bench) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    count = bench.size(2**32, 2**20)
    source = torch.randint(0, 255, (count,), device=bench.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * count / bench.seconds(lambda: target.copy_(source))


def _host(bench: Bench) -> tuple[float, float]:
    """Bytes per second to pinned memory of the host and back."""
    count = bench.size(2**30, 2**20)
    device = torch.randint(0, 255, (count,), device=bench.device, dtype=torch.uint8)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=bench.is_cuda)
    out = bench.seconds(lambda: host.copy_(device, non_blocking=True))
    return count / out, count / bench.seconds(lambda: device.copy_(host, non_blocking=True))
