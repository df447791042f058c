"""matmul: the matrix units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import normal, seeded


def _call(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    return function(a, b)


def _case(size: int, dtype: torch.dtype, batch: int | None = None) -> Case:
    shape = (size, size) if batch is None else (batch, size, size)

    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        return normal(shape, dtype, generator), normal(shape, dtype, generator)

    def work(tensors: Tensors, output: Tensor) -> dict[str, Work]:
        flops = 2 * (batch or 1) * size**3
        return {
            "fwd": Work(nbytes(*tensors, output), flops, dtype),
            # Reads grad_output, a and b; writes two gradients with one product each.
            "bwd": Work(nbytes(output, *tensors, *tensors), 2 * flops, dtype),
        }

    return Case(
        op="matmul",
        id=f"{LABELS[dtype]} {size}^3" if batch is None else f"{LABELS[dtype]} {batch}x{size}^3",
        dtype=dtype,
        tensors=tensors,
        call=_call,
        work=work,
        peer="torch",
        truth="torch",  # in float64; the reference's loop over K would take minutes here
        sample=lambda rows, a, b: (a[rows], b if batch is None else b[rows]),
        differentiable=(0, 1),
        gate_rows=128 if batch is None else 8,
    )


def cases(device_type: str) -> list[Case]:
    if device_type == "cpu":
        return [_case(size, torch.float32) for size in (512, 1024, 2048)]
    return [
        _case(size, dtype, batch)
        for size, batch in ((4096, None), (8192, None), (512, 64))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]


def quick() -> list[Case]:
    return [_case(256, torch.float32)]


def tiny() -> list[Case]:
    return [_case(2, torch.float32)]
