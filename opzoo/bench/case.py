"""What a benchmark case is, and where the cases are found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]

LABELS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Work:
    """What one pass cannot do without.

    Attributes:
        bytes: read and written, each value counted once.
        flops: floating-point operations, a multiply-add being two; 0 where bytes alone bound the pass.
        rate: the dtype whose matrix rate bounds the flops.
    """

    bytes: int
    flops: int = 0
    rate: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """One operator on one set of data.

    Attributes:
        op: name of the operator in :mod:`opzoo`, :mod:`opzoo.reference` and the peer.
        id: stable name, unique within the operator.
        dtype: what the result is stored in; it picks the gate's tolerance.
        tensors: ``tensors(device)`` makes the tensor arguments, the same values on every call.
        call: ``call(function, *tensors)`` binds all other arguments. The same for opzoo, reference and peer.
        work: ``work(tensors, output)`` maps each pass to be timed, ``fwd`` and ``bwd``, to its :class:`Work`.
        peer: module that holds the peer's operator; one of this package is made of torch's operators.
        truth: module that holds the operator the gate runs in float64.
        sample: ``sample(rows, *tensors)`` makes the arguments that produce only these rows (axis 0) of the output.
        differentiable: positions in ``tensors`` that get gradients.
        gate_rows: about how many rows of the output the gate compares.
        gate: replaces the comparison of :mod:`opzoo.bench.gate`; returns the error, 0 being right.
        waits: the call waits for the device, because the size of its result is data; timed by the wall clock.
        peer_tensors: the tensors as the peer accepts them; a bfloat16 case may give it float16.
    """

    op: str
    id: str
    dtype: torch.dtype
    tensors: Callable[[torch.device], Tensors]
    call: Callable[..., Tensor]
    work: Callable[[Tensors, Tensor], dict[str, Work]]
    peer: str
    truth: str = "opzoo.reference"
    sample: Callable[..., Tensors] | None = None
    differentiable: tuple[int, ...] = ()
    gate_rows: int = 64
    gate: Callable[[Case, Tensors], float] | None = None
    waits: bool = False
    peer_tensors: Callable[..., Tensors] = lambda *tensors: tensors

    @property
    def peer_name(self) -> str:
        top = self.peer.partition(".")[0]
        return "torch" if top == "opzoo" else top

    def ours(self, *tensors: Tensor) -> Tensor:
        """The public operator. Looked up at the call, so that a missing one fails its own cases only."""
        return self.call(operator("opzoo", self.op), *tensors)

    def reference(self, *tensors: Tensor) -> Tensor:
        return self.call(operator(self.truth, self.op), *tensors)

    def theirs(self, *tensors: Tensor) -> Tensor:
        return self.call(operator(self.peer, self.op), *tensors)


def operator(module: str, name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(importlib.import_module(module), name)
    return function


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def as_half(*tensors: Tensor) -> Tensors:
    """bfloat16 tensors as float16, for a peer that has no bfloat16."""
    return tuple(t.half() if t.dtype == torch.bfloat16 else t for t in tensors)


def find_cases(which: str, device_type: str) -> list[Case]:
    """The operators' cases of one set: ``full`` (sized for the device), ``quick`` or ``tiny``; by operator."""
    package = importlib.import_module("opzoo.bench.cases")
    found: list[Case] = []
    for info in pkgutil.iter_modules(package.__path__):
        module: Any = importlib.import_module(f"opzoo.bench.cases.{info.name}")
        found += module.cases(device_type) if which == "full" else getattr(module, which)()
    return found
