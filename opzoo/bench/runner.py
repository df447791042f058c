"""Runs cases: gate, then time. In a worker process, so that a case that crashes costs itself only."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, find_cases
from opzoo.bench.gate import GateError, check
from opzoo.bench.machine import Machine, machine_for
from opzoo.bench.models import Context, ModelCase, find_models
from opzoo.bench.models import check as check_model
from opzoo.bench.timer import Clock, HostClock, Quantiles, clock_for, interleaved, quantiles

SECONDS_PER_PASS = 0.3
QUICK_SECONDS_PER_PASS = 0.02
CASE_LIMIT_SECONDS = 300

AnyCase = Case | ModelCase


@dataclass(frozen=True)
class Options:
    """What a worker has to know.

    Attributes:
        device: where to run.
        which: the set of cases, ``full``, ``quick`` or ``tiny``.
        peers: top-level modules to compare with.
        overhead: time the host's part of a call instead of the device's.
    """

    device: str
    which: str = "full"
    peers: tuple[str, ...] = ("torch", "torchvision")
    overhead: bool = False

    @property
    def budget(self) -> float:
        return QUICK_SECONDS_PER_PASS if self.which == "quick" else SECONDS_PER_PASS


@dataclass(frozen=True)
class Timing:
    """One implementation's time in one pass, in seconds; ``ratio`` is the peer's median over opzoo's."""

    impl: str
    what: str
    seconds: Quantiles
    work: Work | None = None
    peak_bytes: int | None = None
    ratio: float | None = None


@dataclass
class Result:
    """What became of a case: ``ok``, ``FAILED`` (wrong) or ``ERROR`` (raised, crashed or hung)."""

    op: str
    case: str
    status: str = "ok"
    gate_error: float | None = None
    message: str = ""
    timings: list[Timing] = field(default_factory=list)
    device_lost: bool = False


@dataclass(frozen=True)
class _Side:
    """One implementation, ready to be timed."""

    impl: str
    function: Callable[..., Tensor]
    tensors: Tensors


def find_all(which: str, device_type: str) -> list[AnyCase]:
    """All cases of one set, operators first."""
    return [*find_cases(which, device_type), *find_models(which, device_type)]


def run_case(case: AnyCase, options: Options) -> Result:
    """Gate and time one case; an exception becomes its status."""
    result = Result(case.op, case.id)
    try:
        if isinstance(case, ModelCase):
            _run_model(case, options, result)
        else:
            _run(case, options, result)
    except GateError as error:
        result.status, result.gate_error, result.message = "FAILED", error.error, str(error)
        result.timings.clear()
    except Exception as error:
        result.status = "ERROR"
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        result.message = f"{type(error).__name__}: {text} ({where.name}, line {where.lineno})"
        result.timings.clear()
    gc.collect()
    if torch.device(options.device).type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            result.device_lost = True  # an error of this kind stays with the process
    return result


def _run(case: Case, options: Options, result: Result) -> None:
    device = torch.device(options.device)
    tensors = case.tensors(device)
    result.gate_error = check(case, tensors)
    sides = [_Side("opzoo", case.ours, tensors)]
    if case.peer_name in options.peers:
        peer = _peer_side(case, tensors)
        if isinstance(peer, str):
            result.message = peer
        else:
            sides.append(peer)
    if options.overhead:
        _time_overhead(case, sides, HostClock(device), options.budget, result)
    else:
        _time_passes(case, sides, clock_for(device, case.waits), device, options.budget, result)


def _run_model(case: ModelCase, options: Options, result: Result) -> None:
    """Wall time: a step of a model is what a user waits for."""
    device = torch.device(options.device)
    model = case.build(device)
    result.gate_error = check_model(case, model)
    sides: list[tuple[str, Context]] = [("opzoo", model.ours)]
    if case.peer_name in options.peers:
        sides.append((case.peer_name, model.theirs))
    names, contexts = [name for name, _ in sides], [context for _, context in sides]
    for what, call in model.passes.items():
        calls = [call] * len(sides)
        samples = interleaved(clock_for(device, waits=True), calls, options.budget, contexts, warm_up=2)
        peaks = []
        for context in contexts:
            with context():
                peaks.append(_peak_bytes(call, device))
        _record(result, what, names, samples, None, peaks)


def _peer_side(case: Case, tensors: Tensors) -> _Side | str:
    """The peer on the same data, or why there is none."""
    name = case.peer_name
    try:
        importlib.import_module(case.peer)
        peer_tensors = case.peer_tensors(*tensors)
        with torch.no_grad():
            dtype = case.theirs(*peer_tensors).dtype
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{name} does not run this case: {lines[0] if lines else type(error).__name__}"
    other = dtype != case.dtype and dtype.is_floating_point
    return _Side(f"{name} {LABELS[dtype]}" if other else name, case.theirs, peer_tensors)


def _forward(side: _Side) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return side.function(*side.tensors)

    return call


def _leaves(case: Case, side: _Side) -> Tensors:
    return tuple(t.detach().requires_grad_(i in case.differentiable) for i, t in enumerate(side.tensors))


def _backward(case: Case, side: _Side) -> Callable[[], Tensors]:
    """The backward call alone: the graph is built here and kept."""
    leaves = _leaves(case, side)
    output = side.function(*leaves)
    grad = torch.randn_like(output)
    wanted = [leaves[i] for i in case.differentiable]
    return lambda: torch.autograd.grad(output, wanted, grad, retain_graph=True)


def _peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Device memory one call adds at its fullest, its results included. Unknown on CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def _record(
    result: Result,
    what: str,
    impls: list[str],
    samples: list[list[float]],
    work: Work | None = None,
    peaks: list[int | None] | None = None,
) -> None:
    spread = [quantiles(of_one) for of_one in samples]
    for i, impl in enumerate(impls):
        ratio = spread[1].p50 / spread[0].p50 if i == 0 and len(impls) > 1 else None
        peak = peaks[i] if peaks else None
        result.timings.append(Timing(impl, what, spread[i], work, peak, ratio))


def _time_passes(
    case: Case, sides: list[_Side], clock: Clock, device: torch.device, budget: float, result: Result
) -> None:
    output = _forward(sides[0])()
    passes = case.work(sides[0].tensors, output)
    del output
    for what, work in passes.items():
        calls: list[Callable[[], object]]
        calls = [_forward(side) if what == "fwd" else _backward(case, side) for side in sides]
        samples = interleaved(clock, calls, budget)
        peaks = [_peak_bytes(call, device) for call in calls]
        _record(result, what, [side.impl for side in sides], samples, work, peaks)


def _time_overhead(case: Case, sides: list[_Side], clock: Clock, budget: float, result: Result) -> None:
    def training(side: _Side, backward: bool) -> Callable[[], object]:
        leaves = _leaves(case, side)
        wanted = [leaves[i] for i in case.differentiable]
        grad = torch.randn_like(side.function(*leaves)) if backward else None

        def call() -> object:
            output = side.function(*leaves)
            return torch.autograd.grad(output, wanted, grad) if backward else output

        return call

    impls = [side.impl for side in sides]
    _record(result, "no grad", impls, interleaved(clock, [_forward(side) for side in sides], budget))
    if case.differentiable:
        for what, backward in (("grad fwd", False), ("fwd+bwd", True)):
            calls = [training(side, backward) for side in sides]
            _record(result, what, impls, interleaved(clock, calls, budget))


def run_here(cases: Sequence[AnyCase], options: Options) -> Iterator[Machine | Result]:
    """The machine, then one result per case, all in this process."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
    yield machine_for(device)
    for case in cases:
        yield run_case(case, options)


def run_isolated(cases: Sequence[AnyCase], options: Options) -> Iterator[Machine | Result]:
    """As :func:`run_here`, in a worker that is replaced when a case takes it down."""
    todo = list(cases)
    machine_known = False
    worker = None
    try:
        while todo:
            case = todo[0]
            worker = worker or _Worker(options)
            if not machine_known:
                reply = worker.ask(None)
                if isinstance(reply, str):
                    raise RuntimeError(f"the worker did not start: {reply}")
                machine_known = True
                yield reply
            reply = worker.ask((case.op, case.id))
            if isinstance(reply, str):
                reply = Result(case.op, case.id, "ERROR", message=reply, device_lost=True)
            if reply.device_lost:
                worker.stop()
                worker = None
            todo.pop(0)
            yield reply
    finally:
        if worker:
            worker.stop()


class _Worker:
    """A process that answers one request at a time. Spawned, since CUDA does not survive a fork."""

    def __init__(self, options: Options) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: tuple[str, str] | None) -> Any:
        """The reply, or a sentence that says why there is none."""
        try:
            self._pipe.send(request)
            if not self._pipe.poll(CASE_LIMIT_SECONDS):
                return f"no result within {CASE_LIMIT_SECONDS} s"
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            return f"the process died, exit code {self._process.exitcode}"

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, options: Options) -> None:
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
    cases = {(case.op, case.id): case for case in find_all(options.which, device.type)}
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(machine_for(device) if request is None else run_case(cases[request], options))
