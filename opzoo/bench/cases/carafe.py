"""carafe at the size of a pyramid's level: the bytes of features, kernels and result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opzoo.bench.case import LABELS, Case, Tensors, Work, nbytes
from opzoo.bench.data import normal, seeded


def _case(N: int, C: int, H: int, W: int, dtype: torch.dtype) -> Case:
    def tensors(device: torch.device) -> Tensors:
        generator = seeded(device)
        return normal((N, C, H, W), dtype, generator), normal((N, 25, 2 * H, 2 * W), dtype, generator)

    def call(function: Callable[..., Tensor], features: Tensor, masks: Tensor) -> Tensor:
        return function(features, masks, 5, 1, 2)

    return Case(
        op="carafe",
        id=f"{LABELS[dtype]} N{N} C{C} {H}x{W} k5",
        dtype=dtype,
        tensors=tensors,
        call=call,
        work=lambda tensors, output: {
            "fwd": Work(nbytes(*tensors, output)),
            "bwd": Work(2 * nbytes(*tensors) + nbytes(output)),
        },
        peer="opzoo.reference",
        sample=lambda rows, features, masks: (features[rows], masks[rows]),
        differentiable=(0, 1),
    )


def cases(device_type: str) -> list[Case]:
    size = (2, 256, 50, 76) if device_type == "cuda" else (1, 64, 25, 38)
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if device_type == "cuda" else (torch.float32,)
    return [_case(*size, dtype) for dtype in dtypes]


def quick() -> list[Case]:
    return [_case(1, 8, 6, 7, torch.float32)]


def tiny() -> list[Case]:
    return [_case(1, 1, 2, 2, torch.float32)]
