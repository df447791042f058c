"""Clocks, and repeats that take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20  # several times the largest L2
MIN_REPEATS, MAX_REPEATS = 5, 300
WARM_UP = 3


@dataclass(frozen=True)
class Quantiles:
    p20: float
    p50: float
    p80: float


def quantile(samples: Sequence[float], q: float) -> float:
    """The ``q`` quantile, linear between the two samples beside it."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def quantiles(samples: Sequence[float]) -> Quantiles:
    return Quantiles(quantile(samples, 0.2), quantile(samples, 0.5), quantile(samples, 0.8))


class Clock(Protocol):
    def seconds(self, call: Call) -> float: ...


class CpuClock:
    """Wall time. Caches stay as the previous call left them."""

    def seconds(self, call: Call) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e9


class CudaClock:
    """Device time between two events, the L2 filled with other data before.

    The flush and an idle spin after it give the host a head start: a call's launches are queued before the
    first event passes, so that the host's time leaves no gaps. What the host needs is measured apart.
    """

    HEAD_START = 1_000_000  # cycles, half a millisecond

    def __init__(self, device: torch.device) -> None:
        self._other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def seconds(self, call: Call) -> float:
        self._other.zero_()
        torch.cuda._sleep(self.HEAD_START)
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


class WallClock:
    """Wall time from the call to its return and the end of its work, the L2 filled with other data before.

    For calls that wait for the device themselves, because the size of their result is data.
    """

    def __init__(self, device: torch.device) -> None:
        self._other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, call: Call) -> float:
        self._other.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1e9


class HostClock:
    """Host time of one call among many: what Python, the dispatcher and the launches cost.

    The device's backlog is waited for outside the time.
    """

    CALLS = 50

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def seconds(self, call: Call) -> float:
        start = time.perf_counter_ns()
        for _ in range(self.CALLS):
            call()
        elapsed = time.perf_counter_ns() - start
        if self._cuda:
            torch.cuda.synchronize()
        return elapsed / self.CALLS / 1e9


def clock_for(device: torch.device, waits: bool = False) -> Clock:
    """The clock of a call; ``waits``: it waits for the device itself."""
    if device.type != "cuda":
        return CpuClock()
    return WallClock(device) if waits else CudaClock(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interleaved(
    clock: Clock,
    calls: Sequence[Call],
    budget: float,
    contexts: Sequence[Callable[[], AbstractContextManager[object]]] | None = None,
    warm_up: int = WARM_UP,
) -> list[list[float]]:
    """Samples of each call, in seconds, one after the other so that a change of clocks or load hits all alike.

    Args:
        clock: what a call is timed with.
        calls: what to time; each is warmed up first.
        budget: seconds for all samples together; at least ``MIN_REPEATS`` are taken.
        contexts: what each call runs in, entered and left outside its time.
        warm_up: calls of each that are not counted.
    """
    pairs = list(zip(calls, contexts or [nullcontext] * len(calls), strict=True))

    def seconds(call: Call, context: Callable[[], AbstractContextManager[object]]) -> float:
        with context():
            return clock.seconds(call)

    with _no_garbage_collection():
        estimate = sum(min(seconds(*pair) for _ in range(warm_up)) for pair in pairs)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(budget / max(estimate, 1e-9))))
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for pair, kept in zip(pairs, samples, strict=True):
                kept.append(seconds(*pair))
    return samples
