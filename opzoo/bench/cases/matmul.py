"""matmul: the matrix units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import opzoo
from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import normal, seeded


def _call(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    return function(a, b)


def _call_tf32x3(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    # torch has no such mode: its side of the comparison is plain float32.
    return function(a, b, precision="tf32x3") if function is opzoo.matmul else function(a, b)


def _label(M: int, N: int, K: int) -> str:
    return f"{M}^3" if M == N == K else f"{M}x{N}x{K}"


def _case(
    M: int,
    dtype: torch.dtype,
    *,
    N: int | None = None,
    K: int | None = None,
    batch: int | None = None,
    layout: str = "nn",
    precision: str | None = None,
) -> Case:
    """``[M, K] @ [K, N]``, N and K like M by default; "t" in the layout is a transposed view."""
    N, K = N or M, K or M
    items = () if batch is None else (batch,)

    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)

        def operand(rows: int, columns: int, order: str) -> Tensor:
            if order == "t":
                return normal((*items, columns, rows), dtype, generator).mT
            return normal((*items, rows, columns), dtype, generator)

        return operand(M, K, layout[0]), operand(K, N, layout[1])

    def work(tensors: Tensors, output: Tensor) -> dict[str, Work]:
        flops = 2 * (batch or 1) * M * N * K
        return {
            "fwd": Work(nbytes(*tensors, output), flops, dtype),
            # Reads grad_output, a and b; writes two gradients with one product each.
            "bwd": Work(nbytes(output, *tensors, *tensors), 2 * flops, dtype),
        }

    words = [LABELS[dtype], _label(M, N, K) if batch is None else f"{batch}x{_label(M, N, K)}"]
    if layout != "nn":
        words.append(layout)
    if precision is not None:
        words.append(precision)
    return Case(
        op="matmul",
        id=" ".join(words),
        dtype=dtype,
        tensors=tensors,
        call=_call if precision is None else _call_tf32x3,
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
    bfloat16 = torch.bfloat16
    return [
        *(
            _case(size, dtype, batch=batch)
            for size, batch in ((4096, None), (8192, None), (512, 64))
            for dtype in (torch.float32, torch.float16, bfloat16)
        ),
        *(_case(8192, bfloat16, layout=layout) for layout in ("nt", "tn", "tt")),
        *(_case(size, bfloat16) for size in (1000, 1021, 1049, 1098)),
        _case(8192, bfloat16, K=128),
        _case(128, bfloat16, N=8192, K=8192),
        *(_case(size, torch.float32, precision="tf32x3") for size in (4096, 8192)),
    ]


def quick() -> list[Case]:
    return [_case(256, torch.float32)]


def tiny() -> list[Case]:
    return [_case(2, torch.float32)]
