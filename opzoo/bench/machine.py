"""How quick the device could be: the two constants of the floor, known or measured."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from opzoo.bench.case import LABELS, Work


@dataclass(frozen=True)
class Machine:
    """A device's ceilings.

    Attributes:
        name: of the device.
        bandwidth: bytes per second of a large copy, read plus written.
        rates: flops per second of a large matrix product on random data, by dtype.
        source: where the numbers come from.
    """

    name: str
    bandwidth: float
    rates: dict[torch.dtype, float]
    source: str


KNOWN = {
    "NVIDIA H200": Machine(
        name="NVIDIA H200",
        bandwidth=4.3e12,
        rates={torch.bfloat16: 790e12, torch.float16: 790e12, torch.float32: 52e12, torch.float64: 67e12},
        source="measured with torch 2.11: 4.3 GB device-to-device copy, 8192^3 products; fp64 from the data sheet",
    ),
}


def floor_seconds(machine: Machine, work: Work) -> float:
    """The time below which no implementation gets: the longer of moving the bytes and doing the flops."""
    seconds = work.bytes / machine.bandwidth
    rate = machine.rates.get(work.rate)
    return max(seconds, work.flops / rate) if rate else seconds


def is_arithmetic_bound(machine: Machine, work: Work) -> bool:
    rate = machine.rates.get(work.rate)
    return bool(rate) and work.flops / rate > work.bytes / machine.bandwidth  # type: ignore[operator]


def describe(machine: Machine) -> str:
    rates = ", ".join(f"{LABELS[dtype]} {rate / 1e12:.3g}" for dtype, rate in machine.rates.items())
    return f"{machine.bandwidth / 1e9:.0f} GB/s copy; TFLOP/s: {rates} ({machine.source})"


def machine_for(device: torch.device) -> Machine:
    """The table's entry for this GPU, or a measurement of a few seconds at most."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return KNOWN.get(name) or _measure(name, device, copy_bytes=1 << 30, size=4096)
    name = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    return _measure(name, device, copy_bytes=1 << 27, size=1024)


def _measure(name: str, device: torch.device, copy_bytes: int, size: int) -> Machine:
    dtypes = [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
    source = torch.rand(copy_bytes // 4, device=device)
    target = torch.rand_like(source)
    bandwidth = 2 * copy_bytes / _best_seconds(lambda: target.copy_(source), device)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rates[dtype] = 2 * size**3 / _best_seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    return Machine(name, bandwidth, rates, f"measured now: copy of {copy_bytes >> 20} MiB, {size}^3 products")


def _best_seconds(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The quickest of a few runs: a ceiling, so noise may only be left out, never averaged in."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    for _ in range(repeats):
        wait()
        start = time.perf_counter_ns()
        call()
        wait()
        best = min(best, (time.perf_counter_ns() - start) / 1e9)
    return best
