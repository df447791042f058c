"""add: the bandwidth of three tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import normal, seeded


def _call(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    return function(a, b)


def _contiguous(log2: int, dtype: torch.dtype) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        return normal((1 << log2,), dtype, generator), normal((1 << log2,), dtype, generator)

    return Case(
        op="add",
        id=f"{LABELS[dtype]} 2^{log2}",
        dtype=dtype,
        tensors=tensors,
        call=_call,
        # The gradients are grad_output itself: a backward pass moves nothing and is not timed.
        work=lambda tensors, output: {"fwd": Work(nbytes(*tensors, output))},
        peer="torch",
        sample=lambda rows, a, b: (a[rows], b[rows]),
        differentiable=(0, 1),
        gate_rows=1 << 16,
    )


def _transposed(log2: int, dtype: torch.dtype) -> Case:
    side = 1 << (log2 // 2)

    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        return normal((side, side), dtype, generator).t(), normal((1, side), dtype, generator)

    def work(tensors: Tensors, output: Tensor) -> dict[str, Work]:
        # Backward: the row's gradient is a sum over grad_output; the matrix's is grad_output itself.
        return {"fwd": Work(nbytes(*tensors, output)), "bwd": Work(nbytes(output, tensors[1]))}

    return Case(
        op="add",
        id=f"{LABELS[dtype]} 2^{log2} transposed + row",
        dtype=dtype,
        tensors=tensors,
        call=_call,
        work=work,
        peer="torch",
        sample=lambda rows, a, b: (a[rows], b),
        differentiable=(0, 1),
    )


def cases(device_type: str) -> list[Case]:
    log2 = 28 if device_type == "cuda" else 24
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return [*(_contiguous(log2, dtype) for dtype in dtypes), _transposed(log2, torch.float32)]


def quick() -> list[Case]:
    return [_transposed(16, torch.float32)]


def tiny() -> list[Case]:
    return [_contiguous(2, torch.float32)]
